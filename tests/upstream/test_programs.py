"""Upstream's own test programs for what the patches touch pass on the patched tree, with streaming on where a model is involved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fixture_architectures as architectures
import pytest
from fixture_models import run, tool
from llama_server import environment

# Fail in the same places without streaming: the test clears part of a cache of sliding windows, or replays what the state cannot.
FAILS_UNSTREAMED = {
    "test-save-load-state": {"step35-moe.gguf"},
    "test-recurrent-state-rollback": {"bailingmoe3-moe.gguf"},
}
POISON = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of every architecture that has experts."""
    folder = tmp_path_factory.mktemp("models")
    architectures.make_all(folder)
    return folder


def table(program: str, models: Path, *arguments: str) -> dict[str, list[str]]:
    """PASS, FAIL and SKIP by model, as the program prints them."""
    done = run(tool(program), "--models", models, "-t", "1", *arguments, env=environment(POISON), ok=False, cwd=models)
    rows: dict[str, list[str]] = {}
    for line in COLOUR.sub("", done.stdout).splitlines():
        name, *verdicts = line.split()
        if name.endswith(".gguf"):
            assert set(verdicts) <= {"PASS", "FAIL", "SKIP"}, line
            rows[name] = verdicts
    assert set(rows) == {path.name for path in models.glob("*.gguf")}, done.stdout + done.stderr
    return rows


@pytest.mark.parametrize("program", ["test-save-load-state", "test-recurrent-state-rollback"])
def test_state(program: str, models: Path, tmp_path: Path) -> None:
    """Sequences removed, copied, saved and restored; recurrent states rolled back: on every architecture."""
    slots = ("--moe-slots", str(architectures.n_used(architectures.UNEVEN)))
    streamed = table(program, models, *slots)
    assert streamed == table(program, models)
    assert {name for name, verdicts in streamed.items() if "FAIL" in verdicts} == FAILS_UNSTREAMED[program]
    assert sum("PASS" in verdicts for verdicts in streamed.values()) >= (60 if program == "test-save-load-state" else 8)

    stats = tmp_path / "stats.json"
    env = environment({**POISON, "MOESTREAM_STATS_FILE": str(stats)})
    run(tool(program), "-m", models / "qwen35moe-moe.gguf", "-t", "1", *slots, env=env, cwd=models)
    totals = json.loads(stats.read_text())["totals"]
    assert totals["evictions"] > 0
    assert totals["read_errors"] == 0


@pytest.mark.parametrize("arguments", [(), ("--moe-slots", "8")], ids=["off", "streamed"])
def test_thread_safety(demo: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Several models and contexts, each computing in a thread of its own, give the same text."""
    run(
        tool("test-thread-safety"), "-m", demo, "-p", "The meaning of life is", "-n", "32", "-c", "256", "-ub", "32", "-np", "3", "-t", "1",
        *arguments, env=environment(POISON),
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [(), ("--moe-slots", "8")], ids=["off", "streamed"])
def test_restore_into_a_fragmented_cache(demo: Path, arguments: tuple[str, ...]) -> None:
    run(tool("test-state-restore-fragmented"), "-m", demo, "-t", "1", *arguments, env=environment(POISON))


def test_flags() -> None:
    """Every flag of every tool, ours included, has a help text and no other flag's name. What comes last needs a network."""
    done = run(tool("test-arg-parser"), env=environment(), ok=False)
    assert done.returncode == 0 or re.search(
        r"test good URL\s.*cannot make GET request", done.stdout + done.stderr, re.DOTALL
    ), done.stdout + done.stderr


def test_matmul_by_experts() -> None:
    """The kernels that experts go through; a part of the cases, since the patches change none."""
    cases = "type_a=(f32|q8_0|q4_0|q4_K|q6_K|mxfp4|iq4_nl),.*n_mats=(4|8),n_used=[124],.*m=512,n=(1|32),"
    done = run(tool("test-backend-ops"), "test", "-b", "CPU", "-o", "MUL_MAT_ID", "-p", cases, env=environment())
    passed, of = map(int, re.search(r"(\d+)/(\d+) tests passed", done.stdout).groups())
    assert passed == of >= 50


def test_all_architectures_of_upstream() -> None:
    """Upstream's own test of every architecture, dense ones included: results agree between ways to load, and after a save."""
    done = run(tool("test-llama-archs"), "-s", "1", env=environment(), ok=False)
    text = COLOUR.sub("", done.stdout + done.stderr)
    assert done.returncode == 0, text[-3000:]
