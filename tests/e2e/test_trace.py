"""Traces as programs record them, and replays that count what the engine counted."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from llama_server import LlamaServer, environment
from waiting import until

TEXT = "The command grep prints the lines of its input that match a pattern. The command sed edits"
TOKENS = ("tokens_decode", "tokens_prefill")
PROMPT = " ".join([TEXT] * 3)


def complete(demo: Path, trace: Path, stats: Path, *arguments: str, n_tokens: int = 60) -> dict[str, Any]:
    """Record while a text is completed; the engine's statistics."""
    run(
        tool("llama-completion"), "-m", demo, "-p", PROMPT, "-n", str(n_tokens), "-no-cnv", "-t", "1", "-c", "512", "--temp", "0", "--ignore-eos",
        "--moe-trace", trace, *arguments, env=environment({"MOESTREAM_STATS_FILE": str(stats)}),
    )  # fmt: skip
    return json.loads(stats.read_text())


def replayed(trace: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(run(tool("moe-replay-policy"), trace, *arguments).stdout)


def test_replay_counts_what_the_engine_counted(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    first = None
    for policy in {one["policy"] for one in replayed_all(demo, tmp_path)} - {"opt"}:
        for slots in ("6", "13", "all"):
            stats = complete(demo, trace, tmp_path / "stats", "--moe-slots", slots, "--moe-policy", policy, "-ub", "16")
            first = first or trace.read_bytes()
            assert trace.read_bytes() == first, "what is chosen does not depend on slots and policy"
            (again,) = replayed(trace, "--slots", slots.replace("all", "64"), "--policy", policy)["runs"]
            for name in ("hits", "misses", "evictions"):
                assert again["totals"][name] == stats["totals"][name]
                assert [layer[name] for layer in again["layers"]] == [layer[name] for layer in stats["layers"]]
            assert {name: again["totals"][name] for name in TOKENS} == {name: stats["totals"][name] for name in TOKENS}


def replayed_all(demo: Path, tmp_path: Path) -> list[dict[str, Any]]:
    complete(demo, tmp_path / "all", tmp_path / "stats", "--moe-slots", "8", n_tokens=5)
    return replayed(tmp_path / "all", "--slots", "8")["runs"]


@pytest.mark.parametrize("layout", ["deepseek2", "openai-moe", "gemma4"])
def test_layouts(model: Callable[[str, str], Path], tmp_path: Path, layout: str) -> None:
    """Blocks without experts, and models whose last block is of another kind: layers are named by their block."""
    trace, stats_file = tmp_path / "t", tmp_path / "stats"
    run(
        tool("llama-bench"), "-m", model(layout, "q4_0"), "-p", "20", "-n", "10", "-r", "1", "-t", "1", "--moe-slots", "3",
        "--moe-trace", trace, env=environment({"MOESTREAM_STATS_FILE": str(stats_file)}),
    )  # fmt: skip
    stats = json.loads(stats_file.read_text())
    (again,) = replayed(trace, "--slots", "3", "--policy", "lru")["runs"]
    assert stats["totals"]["tokens_decode"] >= 10
    assert {name: again["totals"][name] for name in TOKENS} == {name: stats["totals"][name] for name in TOKENS}
    for name in ("layer", "n_expert", "slots", "hits", "misses", "evictions"):
        assert [layer[name] for layer in again["layers"]] == [layer[name] for layer in stats["layers"]]


def test_optimum_and_slots_by_layer(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    complete(demo, trace, tmp_path / "stats", "--moe-slots", "8")
    runs = {(r["policy"], r["slots"]): r for r in replayed(trace, "--slots", "8,16")["runs"]}
    for (_, slots), one in runs.items():
        assert one["totals"]["misses"] >= runs["opt", slots]["totals"]["misses"]
        assert (
            one["totals"]["hits"] + one["totals"]["misses"]
            == runs["opt", 8]["totals"]["hits"] + runs["opt", 8]["totals"]["misses"]
        )
    mixed = ",".join(f"{i}={16 if i % 2 else 8}" for i in range(8))
    (one,) = replayed(trace, "--layer-slots", mixed, "--policy", "lru")["runs"]
    assert one["slots"] is None
    assert one["layers"] == [runs["lru", 16 if i % 2 else 8]["layers"][i] for i in range(8)]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--slots", "5"), "5 slots are too few: a token of this trace uses 6 experts in layer 0; hint: 6 or more"),
    (("--slots", "many"), "--slots 'many': expected a number from 1"),
    (("--slots", "8", "--policy", "fifo"), "--policy 'fifo': expected one of lru, "),
    (("--layer-slots", "0=8"), "--layer-slots says nothing of layer 1; hint: name every layer of the trace"),
    (("--layer-slots", ",".join(f"{i}=8" for i in range(9))), "--layer-slots names layer 8, which the trace does not have"),
    (("--slots", "8", "--fast"), "unknown argument '--fast'"),
])  # fmt: skip
def test_replay_refuses(demo: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    complete(demo, tmp_path / "t", tmp_path / "stats", "--moe-slots", "8", n_tokens=2)
    done = run(tool("moe-replay-policy"), tmp_path / "t", *arguments, ok=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_replay_refuses_damaged_files(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "t"
    complete(demo, path, tmp_path / "stats", "--moe-slots", "8", n_tokens=2)
    good = path.read_bytes()
    length = int.from_bytes(good[12:16], "little")

    def said(data: bytes) -> str:
        path.write_bytes(data)
        done = run(tool("moe-replay-policy"), path, "--slots", "8", ok=False)
        assert done.returncode == 1
        return done.stderr

    assert "no trace: it does not begin with MOETRACE" in said(b"GGUF" + good[4:])
    assert "no trace" in said(b"")
    assert "version 2 of the format: expected 1" in said(good[:8] + b"\2" + good[9:])
    assert f"the header has {length} bytes, the file {length - 1} behind its length" in said(good[: 16 + length - 1])
    assert "the header is damaged" in said(good[:16] + b"[" + good[17:])
    assert "record 0 (layer 0) has expert 255 of 64" in said(good[: 16 + length + 8] + b"\xff" + good[16 + length + 9 :])
    assert "no such file" in run(tool("moe-replay-policy"), tmp_path / "none", "--slots", "8", ok=False).stderr.lower()
    path.write_bytes(good[:-1])
    assert replayed(path, "--slots", "8")["truncated"] is True


def test_what_a_server_records(demo: Path, tmp_path: Path) -> None:
    """Requests one after the other, start-up not included, and the file is whole when the server has ended."""
    trace = tmp_path / "t"
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "8", "--moe-trace", str(trace)) as server:
        server.complete(PROMPT, 10)
        server.complete("The", 10)
        stats = server.stats()
    report = replayed(trace, "--slots", "8", "--policy", "lru")
    assert report["model"] == {"fingerprint": stats["model_fingerprint"], "architecture": "qwen3moe", "name": demo.name}
    assert report["n_expert_used"] == 6
    assert report["tokens"] == stats["totals"]["tokens_decode"] + stats["totals"]["tokens_prefill"]
    assert report["runs"][0]["totals"]["misses"] == stats["totals"]["misses"]


def test_a_server_that_slept_goes_on(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    arguments = ("--moe-slots", "8", "--moe-trace", str(trace), "--sleep-idle-seconds", "1")
    with LlamaServer(demo, tmp_path / "log", *arguments) as server:
        server.complete("The command", 10)
        until(lambda: server.stats()["streaming"] is False, "the server to sleep")
        first = trace.read_bytes()
        server.complete("The command", 10)
    both = trace.read_bytes()
    begin = 16 + int.from_bytes(both[12:16], "little")
    assert len(first) > begin + 100
    assert both == first + first[begin:], "the same answer to the same question"


def test_a_disk_that_is_full(demo: Path, tmp_path: Path) -> None:
    """A file that may not grow: one line in the log, and the same answer."""
    command = [
        tool("llama-completion"),
        "-m",
        demo,
        "-p",
        PROMPT * 20,
        "-n",
        "5",
        "-no-cnv",
        "-t",
        "1",
        "-c",
        "2048",
        "--temp",
        "0",
    ]
    command = [*map(str, command), "--moe-slots", "8"]
    expected = run(*command, env=environment()).stdout

    trace = tmp_path / "t"
    size = 2000
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [*command, "--moe-trace", str(trace)], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment(),
            restore_signals=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert (done.returncode, done.stdout) == (0, expected)
    assert done.stderr.count("moestream: recording the trace") == 1
    assert "has ended: writing failed: File too large" in done.stderr
    assert replayed(trace, "--slots", "8")["records"] == 0, "what was not written whole is not there"
