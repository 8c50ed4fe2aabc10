"""What a command line of llama-server means to a plan, and what a plan means to a command line. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moestream import gguf_facts
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import fit
from moestream.planning.memory import RAM_AUTO, REPACKED_X86, Wishes
from moestream.planning.plan import Budget, settle
from moestream.planning.state import ContextShape

MIB = 1 << 20
DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"


@pytest.fixture(scope="module")
def facts() -> GgufFacts:
    return gguf_facts.read(DEMO)


def wishes(facts: GgufFacts, *argv: str, **environment: str) -> Wishes:
    return fit.wishes_of(["llama-server", "-m", "x", *argv], environment, facts, repacked=REPACKED_X86)


def test_what_nobody_says(facts: GgufFacts) -> None:
    assert wishes(facts) == Wishes(ContextShape(facts.n_ctx_train, 4, True))
    assert wishes(facts, "-c", "0").context.n_ctx == facts.n_ctx_train == 2048


@pytest.mark.parametrize(
    ("argv", "environment", "change"),
    [
        (("-c", "512", "-np", "2"), {}, {"n_ctx": 512, "n_seq": 2, "unified": False}),
        (("-np", "-1"), {}, {}),
        (("-np", "2", "-kvu"), {}, {"n_seq": 2}),
        (("--no-kv-unified",), {}, {"unified": False}),
        ((), {"LLAMA_ARG_N_PARALLEL": "3", "LLAMA_ARG_KV_UNIFIED": "on"}, {"n_seq": 3}),
        ((), {"LLAMA_ARG_KV_UNIFIED": "0"}, {"unified": False}),
        (("-ub", "128"), {"LLAMA_ARG_UBATCH": "64"}, {"n_ubatch": 128}),
        (("-ub", "4096"), {}, {"n_ubatch": 2048}),
        (("-b", "256"), {}, {"n_ubatch": 256}),
        ((), {"LLAMA_ARG_UBATCH": "64"}, {"n_ubatch": 64}),
        (("-ctk", "q8_0", "--cache_type_v", "Q4_0"), {}, {"type_k": "Q8_0", "type_v": "Q4_0"}),
        ((), {"LLAMA_ARG_CACHE_TYPE_K": "bf16"}, {"type_k": "BF16"}),
    ],
)
def test_contexts(facts: GgufFacts, argv: tuple[str, ...], environment: dict[str, str], change: dict) -> None:
    shape = ContextShape(facts.n_ctx_train, 4, True)
    assert wishes(facts, *argv, **environment).context == replace(shape, **change)


@pytest.mark.parametrize(
    ("argv", "environment", "change"),
    [
        (("--moe-slots", "auto"), {}, {}),
        (("--moe-slots", "8"), {}, {"slots": 8}),
        (("--moe-slots", "all"), {}, {"slots": 64}),
        (("--moe-ram", "4MiB"), {}, {"ram_tier_bytes": 4 * MIB}),
        (("--moe-ram", "none"), {}, {"ram_tier_bytes": 0}),
        (("--moe-ram", "auto"), {"LLAMA_ARG_MOE_RAM": "1GiB"}, {"ram_tier_bytes": RAM_AUTO}),
        ((), {"LLAMA_ARG_MOE_RAM": "1GiB"}, {"ram_tier_bytes": 1 << 30}),
        (("--moe-staging", "ring"), {}, {"staging": "ring"}),
        (("--moe-io-threads", "6", "--moe-io", "direct"), {}, {"in_flight": 6, "io": "direct"}),
        (("--moe-prefetch", "off"), {}, {"prefetch": False}),
        (("--moe-overlap", "off"), {}, {"prefetch": False, "staging": "full"}),
        (("--no-repack",), {}, {"repacked": frozenset()}),
        ((), {"LLAMA_ARG_REPACK": "false"}, {"repacked": frozenset()}),
        (("-nr", "--repack"), {}, {}),
        (("-t", "3"), {}, {"threads": 3}),
        (("-t", "-1"), {}, {}),
        ((), {"LLAMA_ARG_THREADS": "5"}, {"threads": 5}),
    ],
)
def test_streaming(facts: GgufFacts, argv: tuple[str, ...], environment: dict[str, str], change: dict) -> None:
    assert wishes(facts, *argv, **environment) == replace(wishes(facts), **change)


def test_values_that_llama_server_would_refuse(facts: GgufFacts) -> None:
    with pytest.raises(MoestreamError, match="--ubatch-size many: expected a number"):
        wishes(facts, "-ub", "many")
    with pytest.raises(MoestreamError, match="--cache-type-k q3: expected f32"):
        wishes(facts, "-ctk", "q3")


@pytest.mark.parametrize(
    ("argv", "environment", "why"),
    [
        (("--model-draft", "d.gguf"), {}, "--model-draft takes memory"),
        (("--lora", "l.gguf"), {}, "--lora takes memory"),
        (("--mmproj", "p.gguf"), {}, "--mmproj takes memory"),
        (("--swa-full",), {}, "--swa-full takes memory"),
        ((), {"LLAMA_ARG_MMPROJ": "p.gguf"}, "LLAMA_ARG_MMPROJ takes memory"),
    ],
)
def test_what_cannot_be_planned(facts: GgufFacts, argv: tuple[str, ...], environment: dict[str, str], why: str) -> None:
    said = fit.unplanned(["llama-server", *argv], environment, facts)
    assert said is not None and said.startswith(why)
    assert fit.unplanned(["llama-server", "-t", "2", "--no-repack"], {"LLAMA_ARG_MMPROJ": ""}, facts) is None


def test_architectures_that_cannot_be_planned(facts: GgufFacts) -> None:
    assert fit.unplanned([], {}, replace(facts, architecture="marvin42")) == (
        "the architecture marvin42 is not known to the planner"
    )
    assert "deepseek4 has caches beside KV" in (fit.unplanned([], {}, replace(facts, architecture="deepseek4")) or "")


CONTEXT = ContextShape(2048, 1, False)


def wished(**more: object) -> Wishes:
    return Wishes(CONTEXT, **{"prompt_cache_given": True, **more})


def chosen(
    facts: GgufFacts, asked: Wishes, mib: int, *, cores: int = 2, default: int = 2, vram: int | None = None
) -> fit.Chosen:
    budget = Budget(mib * MIB, "--ram", cores, vram)
    return fit.choose(asked, settle(facts, budget, asked), budget, default_threads=default)


def test_slots_that_a_plan_chose_come_with_its_way_of_staging(facts: GgufFacts) -> None:
    """The engine decides about staging by another rule when it is given a number."""
    assert chosen(facts, wished(), 1 << 10) == fit.Chosen("all")
    small = chosen(facts, wished(), 60)
    assert small.slots.isdigit() and small.staging == "ring" and small.arguments == ("--moe-staging", "ring")
    assert chosen(facts, wished(staging="full"), 60).staging is None, "the user has said so"
    assert chosen(facts, wished(slots=8), 60).staging is None, "the engine decides likewise"


def test_a_tier_of_what_is_left_is_a_size(facts: GgufFacts) -> None:
    """Else the engine would reckon with the memory of the machine, and not with the budget."""
    asked = wished(slots=8, ram_tier_bytes=RAM_AUTO)
    tier = chosen(facts, asked, 70).ram_tier
    assert tier is not None and tier.isdigit()
    assert int(tier) == settle(facts, Budget(70 * MIB, "--ram", 2), asked).memory.tier_bytes > MIB
    assert chosen(facts, replace(asked, slots=None), 1 << 10).ram_tier == "none"
    assert chosen(facts, replace(asked, ram_tier_bytes=4 * MIB), 1 << 10).ram_tier is None


def test_threads_under_a_quota(facts: GgufFacts) -> None:
    assert chosen(facts, wished(), 1 << 10, cores=1, default=8).arguments == ("-t", "1")
    assert chosen(facts, wished(threads=3), 1 << 10, cores=1, default=8).arguments == ()


def test_a_gpu_takes_all_but_experts_or_nothing(facts: GgufFacts) -> None:
    assert chosen(facts, wished(), 60, vram=1 << 30).placement == ("--cpu-moe", "-ngl", "99")
    assert chosen(facts, wished(), 60, vram=8 * MIB).placement == ("-ngl", "0")


def test_in_a_line(facts: GgufFacts) -> None:
    asked = wished(ram_tier_bytes=4 * MIB)
    budget = Budget(64 * MIB, "cgroup /a", 1)
    settled = settle(facts, budget, asked)
    said = fit.line(asked, settled, budget)
    assert "\n" not in said
    assert said.startswith(f"planned: {settled.memory.slots} of 64 experts a layer in slots, staging ring of 64, ")
    assert "of RAM tier, 1 thread; needs " in said and said.endswith("(64.0 MiB by cgroup /a, less a margin)")


def test_what_is_left_is_for_old_prompts(facts: GgufFacts) -> None:
    """llama-server keeps up to 8 GiB of them beside everything that was planned."""
    asked = Wishes(CONTEXT)
    for mib in (60, 300, 1 << 10):
        budget = Budget(mib * MIB, "--ram", 2)
        memory = settle(facts, budget, asked).memory
        left = max(0, memory.usable_bytes - memory.budgeted_bytes) // MIB
        assert chosen(facts, asked, mib).arguments[-2:] == ("--cache-ram", str(left))
        assert f", {left} MiB for old prompts; needs " in fit.line(asked, settle(facts, budget, asked), budget)
    assert chosen(facts, asked, 32 << 10).prompt_cache_mib is None, "there is room for all that it takes"
    assert chosen(facts, replace(asked, slots=60), 50).prompt_cache_mib == 0, "there is less than nothing"


@pytest.mark.parametrize("said", [("-cram", "9"), ("--cache-ram", "9")])
def test_old_prompts_as_the_user_says(facts: GgufFacts, said: tuple[str, str]) -> None:
    assert wishes(facts, *said).prompt_cache_given
    assert fit.wishes_of(["llama-server"], {"LLAMA_ARG_CACHE_RAM": "0"}, facts, repacked=frozenset()).prompt_cache_given
    assert not wishes(facts).prompt_cache_given
