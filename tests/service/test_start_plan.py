"""``start`` and ``plan`` come to the same settings, with real processes; budgets that cannot be kept; flags that an engine does not know."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_harness import DEMO, Home
from waiting import free_port

from moestream.upstream import engines


def planned(home: Home, *arguments: str) -> dict[str, Any]:
    done = home.run("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def started(home: Home, *arguments: str) -> tuple[dict[str, Any], str]:
    """The report of a server, and what was told; the fixture ends it."""
    done = home.run("start", "--port", "0", "--detach", "--no-map", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def value(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


OPTIONS = [
    ("--ram", "1GiB"),
    ("--ram", "60MiB", "--parallel", "1", "--ctx", "1024"),
    ("--ram", "64MiB", "--ram-tier", "4MiB", "--ctx", "512"),
    ("--ram", "70MiB", "--slots", "8", "--ram-tier", "auto", "--parallel", "2"),
]


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_the_same_settings(home: Home, arguments: tuple[str, ...]) -> None:
    plan = planned(home, str(DEMO), *arguments)
    report, told = started(home, str(DEMO), *arguments)
    argv, own = report["argv"], report["plan"]
    assert own["slots"] == plan["slots"] and value(argv, "--moe-slots") == (
        "all" if plan["slots"] == 64 else str(plan["slots"])
    )
    assert own["staging"] == plan["staging"] and own["ubatch"] == plan["settings"]["ubatch"]
    assert own["threads"] == plan["settings"]["threads"]
    assert own["ram_tier_bytes"] == plan["memory"]["expected"]["ram_bytes"] and own["expected"] == plan["memory"]["expected"]
    assert value(argv, "-c") == str(plan["settings"]["ctx_tokens"])
    if "--slots" not in arguments and plan["staging"] != "none":
        assert value(argv, "--moe-staging") == {"full width": "full"}.get(plan["staging"], "ring")
    assert f"notice: planned: {plan['slots']} of 64 experts a layer in slots, " in told and told.count("\n") == 1
    # what plan says to start with comes to the same once more
    again = started(home, *plan["command"].split()[2:])[0]["argv"]
    for flag in ("--moe-slots", "--moe-ram", "--moe-staging", "-c", "-np"):
        assert value(again, flag) == value(argv, flag), flag


def test_the_same_settings_of_a_name(home: Home) -> None:
    """What the file says of slots, memory and the tier counts in both."""
    folder = home.folder / "config"
    folder.mkdir()
    file = folder / "moestream.yaml"
    file.write_text(
        f"models:\n  coder:\n    model: {DEMO}\n    ram: 50MiB\n    ram_tier: 4MiB\n    ctx: 512\n    llama_args: [-ctk, q8_0, -ub, 128]\n"
    )
    plan = planned(home, "coder")
    report, _ = started(home, "coder")
    assert plan["memory"]["limited_by"] == report["plan"]["limited_by"] == "--ram"
    assert plan["memory"]["expected"]["ram_bytes"] == report["plan"]["ram_tier_bytes"] > 0
    (record,) = (home.folder / "state" / "servers").glob("*.json")  # what a check goes by, wherever it runs
    assert json.loads(record.read_text())["available_bytes"] == plan["memory"]["available_bytes"] == 50 << 20
    assert report["plan"]["slots"] == plan["slots"] and report["plan"]["ubatch"] == plan["settings"]["ubatch"] == 128
    assert value(report["argv"], "--moe-ram") == "4MiB"
    assert "--ram-tier 4MiB" in plan["command"]
    assert planned(home, "coder", "--ram-tier", "none")["memory"]["expected"]["ram_bytes"] == 0
    file.write_text(f"models:\n  coder:\n    model: {DEMO}\n    ram: much\n")
    for command in ("plan", "start"):
        done = home.run(command, "coder")
        assert done.returncode == 1 and f"{file}:4:10: models.coder.ram: --ram much: expected a size" in done.stderr


def test_a_map_of_a_name_says_what_is_hit(home: Home, tmp_path: Path) -> None:
    folder = home.folder / "config"
    folder.mkdir()
    (folder / "moestream.yaml").write_text(f"models:\n  coder:\n    model: {DEMO}\n    map: {tmp_path / 'gone.map'}\n")
    done = home.run("plan", "coder")
    assert done.returncode == 1 and f"--map {tmp_path / 'gone.map'}: no such file" in done.stderr


@pytest.mark.parametrize("command", ["plan", "start"])
def test_what_cannot_work_starts_nothing(home: Home, command: str) -> None:
    done = home.run(command, str(DEMO), "--ram", "30MiB")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: 6 slots a layer, what one token uses, need ") and "(--ram) may be used" in done.stderr
    assert "hint: what would do: " in done.stderr
    assert home.record() is None and home.servers() == []


def refused(home: Home, *arguments: str, fake: str = "") -> str:
    done = home.run("start", str(DEMO), "--port", str(free_port()), *arguments, fake=fake)
    assert (done.returncode, done.stdout) == (1, "") and "\nhint: " in done.stderr and "internal error" not in done.stderr
    assert home.servers() == []
    return done.stderr


def test_budgets_that_cannot_be_kept(home: Home) -> None:
    assert refused(home, "--slots", "60", "--ram", "60MiB").startswith("error: 60 slots do not fit: they need ")
    assert refused(home, "--ram", "much").startswith("error: --ram much: expected a size")
    assert refused(home, "--vram", "8GiB").startswith("error: --vram 8GiB: the engine in use (fake) computes on the CPU alone")
    assert refused(home, "--slots", "off", "--ram", "8GiB").startswith("error: --ram 8GiB cannot be combined with --slots off")
    message = refused(home, "--ram", "8GiB", "--", "--lora", "x.gguf")
    assert message.startswith("error: --ram 8GiB cannot be kept: --lora takes memory that the planner does not reckon with")


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_server_that_takes_more_than_was_planned_is_stopped(home: Home, detach: tuple[str, ...]) -> None:
    """Before it serves anybody: the engine does likewise with slots that it chose."""
    message = refused(home, "--ram", "66MiB", *detach, fake="takes=61")
    slots = message.split(" slots a layer take ")[0].rsplit(" ", 1)[1]
    assert message.splitlines()[-2].startswith(
        f"error: the plan does not hold: {slots} slots a layer take 70.0 MiB in all, and 66.0 MiB "
    )
    assert message.splitlines()[-2].endswith("are available (--ram)") and message.splitlines()[-1].startswith(
        "hint: a smaller --ctx"
    )
    assert home.record() is None
    done = home.run("start", str(DEMO), "--ram", "66MiB", "--port", str(home.port), "--detach", fake="takes=50")
    assert done.returncode == 0
    home.run("stop")
    done = home.run("start", str(DEMO), "--slots", "8", "--port", str(home.port), "--detach", fake="takes=999999")
    assert done.returncode == 0, "a number of slots is the user's business"


def test_what_no_plan_can_judge_is_left_to_the_engine(home: Home) -> None:
    report, told = started(home, str(DEMO), "--", "--lora", "x.gguf")
    assert value(report["argv"], "--moe-slots") == "auto" and report["plan"] is None and report["slots_requested"] == "auto"
    assert told == ("notice: --slots auto is left to the engine: --lora takes memory that the planner does not reckon with\n")
    notices = planned(home, str(DEMO))["notices"]
    assert not any("left" in text for text in notices)


# --- flags of a GPU ---


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (("--pool", "host"), ["--moe-pool", "host"]),
        (("--gpu-path", "mailbox"), ["--moe-gpu-path", "mailbox"]),
        (("--no-require-gpu", "--pool", "auto"), ["--moe-pool", "auto"]),
    ],
)
def test_flags_of_a_gpu_are_passed_on(home: Home, given: tuple[str, ...], passed: list[str]) -> None:
    argv = started(home, str(DEMO), "--slots", "8", *given)[0]["argv"]
    at = argv.index("--moe-slots") + 2
    assert argv[at : at + len(passed)] == passed and "--moe-require-gpu" not in argv


@pytest.mark.parametrize("detach", [(), ("--detach",)])
@pytest.mark.parametrize(
    ("given", "flag", "ours"),
    [(("--pool", "device"), "--moe-pool", "--pool"), (("--gpu-path", "copy"), "--moe-gpu-path", "--gpu-path")],
)
def test_an_engine_that_does_not_know_them(
    home: Home, given: tuple[str, ...], flag: str, ours: str, detach: tuple[str, ...]
) -> None:
    message = refused(home, "--slots", "8", *given, *detach, fake=f"knows-not={flag}")
    assert message.startswith(
        f"error: the engine in use cannot honour {ours}: its llama-server does not know {flag} (exit code 1)"
    )
    assert f"\nhint: build the engine again: moestream build; or leave out {ours}; " in message


def test_a_gpu_that_is_required(home: Home) -> None:
    message = refused(home, "--slots", "8", "--require-gpu")
    assert message.startswith(
        "error: --require-gpu cannot be honoured: the engine in use (fake) computes on the CPU alone\nhint: "
    )
    folder = home.folder / "config"
    folder.mkdir()
    (folder / "moestream.yaml").write_text("defaults: {require_gpu: true}\n")
    assert f"require_gpu is from {folder}/moestream.yaml:1" in refused(home, "--slots", "8")
    assert started(home, str(DEMO), "--slots", "8", "--no-require-gpu")[0]["streaming"] is True


@pytest.mark.parametrize("argument", ["--moe-pool", "--moe-gpu-path", "--moe-require-gpu"])
def test_they_are_start_s_own(home: Home, argument: str) -> None:
    message = refused(home, "--slots", "8", "--", argument, "auto")
    assert message.startswith(f"error: {argument} after -- collides with moestream's own {argument.replace('moe-', '')}\n")


def test_an_engine_for_a_gpu(home: Home) -> None:
    """Its own auto without a budget; with one, slots in RAM and all else on the card, as plan says."""
    home.environment()  # describes the engine for the processor
    cpu = engines.read_engine(home.server.parents[1])
    folder = cpu.path.with_name("fake-cuda")
    shutil.copytree(cpu.path, folder)
    engines.write_description(replace(cpu, id=folder.name, path=folder, backend="cuda"), folder)
    card = (str(DEMO), "--backend", "cuda")
    report, told = started(home, *card)
    assert report["engine"] == "fake-cuda" and value(report["argv"], "--moe-slots") == "auto"
    assert told.startswith(
        "notice: --slots auto is left to the engine: slots in the memory of a card are not planned (fake-cuda)"
    )
    report, told = started(home, *card, "--ram", "60MiB", "--vram", "1GiB")
    argv, plan = report["argv"], planned(home, str(DEMO), "--ram", "60MiB", "--vram", "1GiB")
    assert value(argv, "-ngl") == "99" and "--cpu-moe" in argv and " -- --cpu-moe -ngl 99" in plan["command"]
    assert (
        report["plan"]["slots"] == plan["slots"] == 64
        and report["plan"]["dense_on_gpu"] is plan["memory"]["dense_on_gpu"] is True
    )
    assert "the rest on the GPU" in told
    assert value(started(home, *card, "--slots", "8", "--require-gpu")[0]["argv"], "--moe-require-gpu") == "on"
    report, told = started(home, *card, "--vram", "100MiB", "--pool", "device")
    assert 6 <= int(value(report["argv"], "--moe-slots") or 0) < 64 and value(report["argv"], "-ngl") == "99"
    assert value(report["argv"], "--moe-pool") == "device" and " experts a layer in slots on the card, " in told
    done = home.run("start", *card, "--vram", "1GiB", "--pool", "host")
    assert done.returncode == 1 and done.stderr.startswith("error: --vram cannot be combined with --pool host: ")
