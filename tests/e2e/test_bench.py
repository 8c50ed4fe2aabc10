"""``moestream bench`` with the demo model and real servers of the engine in use: table, JSON, plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_server import environment

from moestream import gguf_facts
from moestream.measuring import figures


def moestream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = environment({k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"})
    command = [sys.executable, "-m", "moestream.cli", "bench", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def measured(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plot = tmp_path_factory.mktemp("bench") / "plot.svg"
    done = moestream(
        demo, "--slots", "8,all", "--vs", "stock", "--runs", "2", "--tokens", "120", "--prompt", "30", "--json", "--plot", plot
    )
    assert "moestream 8 slots, cold" in plot.read_text()
    return json.loads(done.stdout)


def test_json(measured: dict[str, Any], demo: Path) -> None:
    assert measured["schema"] == "moestream/bench/1"
    assert list(measured) == [
        "schema", "model", "engine", "backend", "machine", "setting", "sides", "complete", "output", "summary", "versus", "failures",
        "disturbances", "runs",
    ]  # fmt: skip
    facts = gguf_facts.read(demo)
    assert measured["model"] == {
        "path": str(demo), "name": demo.name, "size_bytes": facts.total_bytes, "expert_bytes": facts.expert_bytes,
    }  # fmt: skip
    assert measured["setting"] == {
        "tokens": 120, "prompt_tokens": 30, "rounds": 2, "caches": ["cold", "warm"],
        "sides": ["moestream 8 slots", "moestream all", "stock"],
    }  # fmt: skip
    assert (measured["complete"], measured["failures"]) == (True, [])
    output = measured["output"]
    assert output == {"equal": True, "sha256": output["sha256"], "answers": 15, "difference": None}
    assert {run["output_sha256"] for run in measured["runs"]} == {output["sha256"]}
    assert set(measured["runs"][0]) == set(figures.Run.__dataclass_fields__)
    assert len(measured["runs"]) == 12 and len(measured["summary"]) == 6
    assert [(r["side"], r["cache"], r["figure"], r["pairs"]) for r in measured["versus"]] == [
        (side, cache, figure, 2)
        for side, cache in (("moestream 8 slots", "cold"), ("moestream 8 slots", "warm"), ("moestream all", "cold"), ("moestream all", "warm"))
        for figure in figures.COMPARED
    ]  # fmt: skip


def test_the_figures_are_of_these_runs(measured: dict[str, Any], demo: Path) -> None:
    per_token = 8 * 6 * gguf_facts.read(demo).bytes_per_slot(0)  # layers, experts of each
    known = set()
    for run in measured["runs"]:
        streams = run["side"] != "stock"
        assert len(run["token_s"]) == 119 and all(0 <= t < 60 for t in run["token_s"])
        assert run["decode_tok_per_s"] == pytest.approx(119 / sum(run["token_s"]))
        assert run["token_p50_s"] <= run["token_p95_s"] <= max(run["token_s"])
        assert run["ttft_s"] > 0 and run["prompt_tok_per_s"] > 0 and run["load_s"] > 0
        assert run["peak_rss_bytes"] > 1 << 20
        if not streams:
            assert run["hit_rate"] is run["decode_expert_bytes_per_token"] is run["decode_stall_share"] is None
        elif run["hit_rate"] is not None:  # not known of an answer that was over before anybody could look
            known.add((run["side"], run["cache"]))
            assert 0 < run["hit_rate"] <= 1
            assert run["decode_expert_bytes_per_token"] <= per_token
            assert run["decode_stall_share"] >= 0
            if (run["side"], run["cache"]) == ("moestream all", "warm"):
                assert (run["hit_rate"], run["decode_expert_bytes_per_token"]) == (1, 0)
    assert known, "of at least some"
    sides = measured["sides"]
    assert sides["moestream 8 slots"]["slots"] == 8 and sides["moestream all"]["slots"] == 64
    assert sides["stock"]["streaming"] is False


@pytest.mark.skipif(sys.platform != "linux", reason="the page cache is emptied and looked at on Linux")
def test_cold_is_cold(demo_copy: Path) -> None:
    """Beside the checkout, on a disk; nothing else has this copy open."""
    demo_copy.read_bytes()
    data = json.loads(
        moestream(demo_copy, "--slots", "8", "--cold", "--runs", "1", "--tokens", "4", "--prompt", "4", "--json").stdout
    )
    (cold,) = data["runs"]
    assert cold["cached_share"] == 0
    assert cold["prompt_disk_bytes"] > 100_000
    demo_copy.read_bytes()
    data = json.loads(
        moestream(demo_copy, "--slots", "8", "--warm", "--runs", "1", "--tokens", "4", "--prompt", "4", "--json").stdout
    )
    (warm,) = data["runs"]
    assert (warm["cache"], warm["cached_share"]) == ("warm", 1)


def test_table(demo: Path) -> None:
    done = moestream(demo, "--slots", "8", "--warm", "--runs", "1", "--tokens", "4", "--prompt", "4", "--vs", "stock")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"model   {demo.name}, ")
    assert lines[3].startswith("output  the same in all 6 answers, sha256 ")
    at = next(i for i, line in enumerate(lines) if line.startswith("side "))
    assert lines[at].split()[:3] == ["side", "cache", "runs"]
    assert lines[at + 1].startswith("moestream 8 slots") and lines[at + 2].startswith("stock ")
    ratio = next(line for line in lines if line.startswith("decode, warm: moestream 8 slots "))
    assert ratio.endswith("x stock (" + ratio.partition("x stock (")[2]) and "1 pair)" in ratio
    assert "round 1 of 1" not in done.stdout, "progress goes to stderr"
