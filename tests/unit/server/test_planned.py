"""What ``start`` plans: made-up memory, the demo model, and engines that are names only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moestream import gguf_facts, paths, proc
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import hardware
from moestream.proc import Memory
from moestream.server import planned
from moestream.server.arguments import ServerSettings, build_argv
from moestream.server.planned import Planned

MIB = 1 << 20
DEMO = paths.demo_model()
SERVER = Path("llama-server")


@pytest.fixture(scope="module")
def facts() -> GgufFacts:
    return gguf_facts.read(DEMO)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "available_memory", lambda: Memory(60 * MIB, "cgroup /a"))
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    monkeypatch.setattr(hardware, "default_threads", lambda: 2)


def plan(facts: GgufFacts, backend: str = "cpu", environment: dict[str, str] | None = None, **settings: Any) -> Planned:
    asked = ServerSettings(**{"model": DEMO, "ctx": 2048, "parallel": 1, **settings})
    engine: Any = SimpleNamespace(id=f"e-{backend}", backend=backend)
    return planned.plan_for(asked, facts, engine, {"LLAMA_ARG_CACHE_RAM": "9"} if environment is None else environment)


def refusal(facts: GgufFacts, *more: Any, **settings: Any) -> MoestreamError:
    with pytest.raises(MoestreamError) as caught:
        plan(facts, *more, **settings)
    assert caught.value.hint
    return caught.value


def test_auto_becomes_what_fits(facts: GgufFacts) -> None:
    made = plan(facts)
    assert made.facts is not None and 6 <= made.facts["slots"] < 64
    assert made.settings.slots == str(made.facts["slots"]) and made.settings.planned == ("--moe-staging", "ring")
    assert made.facts["budgeted_bytes"] <= made.facts["usable_bytes"] < 60 * MIB == made.facts["available_bytes"]
    (line,) = made.said
    assert line.startswith(f"notice: planned: {made.settings.slots} of 64 experts") and "(60.0 MiB by cgroup /a, " in line
    argv = build_argv(SERVER, made.settings)
    assert argv[argv.index("--moe-slots") + 1] == made.settings.slots and "ring" in argv


def test_a_budget_counts_instead_of_what_is_free(facts: GgufFacts) -> None:
    small, large = plan(facts), plan(facts, ram="66MiB")
    assert int(large.settings.slots) > int(small.settings.slots)
    assert large.facts is not None and (large.facts["available_bytes"], large.facts["limited_by"]) == (66 * MIB, "--ram")
    assert plan(facts, ram="1GiB").settings.slots == "all"


def test_too_little_memory_is_refused_as_a_plan_is(facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "available_memory", lambda: Memory(40 * MIB, "cgroup /a"))
    error = refusal(facts)
    assert (
        error.message.startswith("6 slots a layer, what one token uses, need ") and "(cgroup /a) may be used" in error.message
    )
    assert "what would do: " in error.hint and "or --slots 6 to try all the same" in error.hint
    assert "-- --cache-type-k q8_0 --cache-type-v q8_0" in refusal(facts, ram="48MiB").hint
    assert "to try all the same" not in refusal(facts, ram="40MiB").hint, "that would be refused as well"


def test_what_the_hint_says_does(facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "available_memory", lambda: Memory(40 * MIB, "cgroup /a"))
    ctx = int(refusal(facts).hint.split("--ctx ")[1].split(",")[0])
    assert int(plan(facts, ctx=ctx).settings.slots) >= 6


def test_a_number_of_slots_is_taken_as_it_is(facts: GgufFacts) -> None:
    made = plan(facts, slots="8")
    assert (made.settings, made.said) == (replace(made.settings, slots="8", planned=()), ())
    made = plan(facts, slots="60")
    assert made.settings.slots == "60" and made.settings.planned == ()
    (line,) = made.said
    assert line.startswith("warning: 60 slots do not fit: they need ") and line.endswith(" slots fit")


def test_a_budget_that_slots_exceed_is_refused(facts: GgufFacts) -> None:
    error = refusal(facts, slots="60", ram="60MiB")
    assert error.message.startswith("60 slots do not fit: they need ")
    assert error.hint == "--slots auto takes what fits, or more than --ram 60MiB"
    assert plan(facts, slots="8", ram="60MiB").settings.slots == "8"
    assert "64 slots do not fit" in refusal(facts, slots="all", ram="60MiB").message


def test_a_tier_of_what_is_left_keeps_the_budget(facts: GgufFacts) -> None:
    made = plan(facts, slots="8", ram_tier="auto", ram="70MiB")
    assert made.settings.ram_tier is not None and made.settings.ram_tier.isdigit()
    assert plan(facts, slots="8", ram_tier="auto").settings.ram_tier == "auto", "the engine knows what is left when it loads"
    assert plan(facts, ram_tier="4MiB").settings.ram_tier == "4MiB"


def test_threads_under_a_quota(facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "default_threads", lambda: 8)
    made = plan(facts, slots="8")
    assert made.settings.planned == ("-t", "2")
    assert made.said == ("notice: 2 threads compute: no more cores may be used, and llama.cpp would take 8",)
    assert plan(facts, slots="8", extra=("--threads", "5")).settings.planned == ()
    argv = build_argv(SERVER, replace(made.settings, extra=("-t", "5")))
    assert argv.index("5") > argv.index("2"), "llama-server takes the last"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"extra": ("--lora", "l.gguf")}, "--lora takes memory"),
        ({"environment": {"LLAMA_ARG_SPEC_DRAFT_MODEL": "d.gguf"}}, "LLAMA_ARG_SPEC_DRAFT_MODEL takes memory"),
        ({"backend": "cuda"}, "slots in the memory of a card are not planned (e-cuda)"),
    ],
)
def test_what_cannot_be_planned_is_left_to_the_engine(facts: GgufFacts, settings: dict[str, Any], why: str) -> None:
    made = plan(facts, **settings)
    assert made.settings.slots == "auto" and made.settings.planned == () and made.facts is None
    (line,) = made.said
    assert line.startswith(f"notice: --slots auto is left to the engine: {why}")
    assert plan(facts, slots="8", **settings).said == ()


def test_an_unknown_architecture(facts: GgufFacts) -> None:
    strange = replace(facts, architecture="marvin42")
    assert plan(strange).said == (
        "notice: --slots auto is left to the engine: the architecture marvin42 is not known to the planner",
    )
    error = refusal(strange, ram="1GiB")
    assert error.message == "--ram 1GiB cannot be kept: the architecture marvin42 is not known to the planner"


def test_what_is_not_planned_at_all(facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(facts, slots="off").facts is None
    assert plan(facts, slots="map", map=Path("m.json")).facts is None
    monkeypatch.setattr(proc, "available_memory", lambda: None)
    assert plan(facts, slots="8") == Planned(plan(facts, slots="8").settings)
    assert refusal(facts).message == "this system does not say how much memory is available"
    assert plan(facts, ram="1GiB").settings.slots == "all"


def test_budgets_of_a_gpu(facts: GgufFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--vram 8GiB: the engine in use (e-cpu) computes on the CPU alone" in refusal(facts, vram="8GiB").message
    made = plan(facts, "cuda", vram="1GiB")
    assert made.settings.planned[:3] == ("--cpu-moe", "-ngl", "99")
    assert made.facts is not None and made.facts["dense_on_gpu"] and made.facts["vram_bytes"] == 1 << 30
    without = plan(facts).facts
    assert without is not None and made.facts["slots"] > without["slots"], "the slots have the RAM to themselves"
    assert plan(facts, "cuda", vram="8MiB").settings.planned[:2] == ("-ngl", "0")
    monkeypatch.setattr(hardware, "gpus", lambda: [hardware.Gpu("X", 2 << 30, 1 << 30)])
    assert plan(facts, "cuda", ram="60MiB").settings == replace(made.settings, ram="60MiB", vram=None)


@pytest.mark.parametrize("settings", [{"extra": ("-ngl", "9")}, {"extra": ("--n_cpu_moe", "3")}, {"pool": "host"}])
def test_two_that_say_where_weights_go(facts: GgufFacts, settings: dict[str, Any]) -> None:
    assert "cannot be combined with " in refusal(facts, "cuda", vram="1GiB", **settings).message


MEMORY = {"pool_bytes": 30 * MIB, "dense_bytes": 20 * MIB, "total_bytes": 64 * MIB}


@pytest.mark.parametrize(
    ("made", "memory"),
    [
        (None, MEMORY),
        ({"binding": False, "available_bytes": MIB, "limited_by": "x"}, MEMORY),
        ({"binding": True, "available_bytes": MIB, "limited_by": "x"}, {}),
        ({"binding": True, "available_bytes": 73 * MIB, "limited_by": "x"}, MEMORY),
        ({"binding": True, "available_bytes": 53 * MIB, "limited_by": "x"}, {**MEMORY, "device_bytes": 20 * MIB}),
    ],
)
def test_a_plan_that_holds(made: dict[str, Any] | None, memory: dict[str, int]) -> None:
    planned.check_held(made, memory, 30)


@pytest.mark.parametrize(
    ("available", "hint"), [(72, "--slots 29"), (50, "--slots 7"), (40, "a smaller --ctx, or smaller batches: -- -ub 128")]
)
def test_a_plan_that_does_not_hold(available: int, hint: str) -> None:
    """64 MiB, a 64th and 8 MiB for the program are 73; each slot of 30 is one."""
    with pytest.raises(MoestreamError) as caught:
        planned.check_held({"binding": True, "available_bytes": available * MIB, "limited_by": "cgroup /a"}, MEMORY, 30)
    assert caught.value.message == (
        f"the plan does not hold: 30 slots a layer take 73.0 MiB in all, and {available}.0 MiB are available (cgroup /a)"
    )
    assert caught.value.hint == hint


@pytest.mark.parametrize("slots", ["auto", "8"])
def test_llama_server_may_keep_old_prompts_in_what_is_left(facts: GgufFacts, slots: str) -> None:
    made = plan(facts, environment={}, slots=slots)
    at = made.settings.planned.index("--cache-ram")
    assert 0 <= int(made.settings.planned[at + 1]) < 60
    assert "--cache-ram" not in plan(facts, environment={}, slots=slots, extra=("-cram", "5")).settings.planned


def on_card(facts: GgufFacts, **settings: Any) -> Planned:
    return plan(facts, "cuda", pool="device", **settings)


def test_slots_in_the_memory_of_a_card(facts: GgufFacts) -> None:
    made = on_card(facts, vram="100MiB")
    assert made.settings.planned == ("-ngl", "99") and 6 <= int(made.settings.slots) < 64 and made.settings.ram_tier is None
    (line,) = made.said
    assert line.startswith(
        f"notice: planned: {made.settings.slots} of 64 experts a layer in slots on the card, 30.0 MiB of locked RAM below them; "
    )
    assert line.endswith(" of 100.0 MiB (--vram, less a margin) may be used")
    argv = build_argv(SERVER, made.settings)
    assert argv[argv.index("--moe-pool") + 1] == "device" and argv[argv.index("--moe-slots") + 1] == made.settings.slots
    assert on_card(facts, vram="1GiB").settings.slots == "all"
    assert "locked RAM" not in on_card(facts, vram="1GiB").said[0]
    fewer = on_card(facts, vram="100MiB", ctx=1024)
    assert int(fewer.settings.slots) >= int(made.settings.slots)


def test_the_tier_below_a_card_keeps_the_budget(facts: GgufFacts) -> None:
    tier = on_card(facts, vram="100MiB", ram="20MiB").settings.ram_tier
    assert tier is not None and 10 * MIB < int(tier) < 20 * MIB
    assert on_card(facts, vram="100MiB", ram="20MiB", ram_tier="8MiB").settings.ram_tier == str(8 * MIB)
    assert on_card(facts, vram="1GiB", ram="20MiB").settings.ram_tier is None, "nothing is below them"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vram": "20MiB"}, "6 slots a layer on the card need "),
        ({"vram": "100MiB", "slots": "60"}, "60 slots a layer on the card need "),
        ({"vram": "100MiB", "extra": ("--cpu-moe",)}, "--vram and --pool device cannot be combined with --cpu-moe"),
        ({"vram": "100MiB", "extra": ("-ngl", "5")}, "--vram and --pool device cannot be combined with -ngl"),
        ({"vram": "100MiB", "extra": ("--lora", "x")}, "--vram 100MiB cannot be kept: --lora takes memory"),
    ],
)
def test_slots_on_a_card_that_cannot_be(facts: GgufFacts, settings: dict[str, Any], said: str) -> None:
    assert refusal(facts, "cuda", pool="device", **settings).message.startswith(said)
