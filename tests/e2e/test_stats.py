"""/moe/stats and /metrics: the documented fields, figures that add up, and a document that names them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_models import expert_ranges, run, tool
from llama_server import LlamaServer, environment

DOC = Path(__file__).resolve().parents[2] / "docs" / "stats.md"
COUNTERS = ("hits", "misses", "evictions", "bytes_needed", "bytes_read", "bytes_copied", "stall_us")
OFF = {"schema": "moestream/stats/1", "streaming": False}
SLOTS = 8


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    arguments = ("--moe-slots", str(SLOTS), "--moe-io", "direct", "--moe-io-threads", "3")
    with LlamaServer(demo, tmp_path_factory.mktemp("stats") / "log", *arguments) as running:
        running.complete("The command grep", 30)
        yield running


def documented() -> dict[str, set[str]]:
    """The names in the first column of each table, by the heading above it."""
    found: dict[str, set[str]] = {}
    heading = ""
    for line in DOC.read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif match := re.match(r"\| `([^`]+)` \|", line):
            found.setdefault(heading, set()).add(match[1])
    return found


def names(value: dict[str, Any], *, below: tuple[str, ...]) -> set[str]:
    """The keys of an object; those of the objects named in ``below`` with their parent's name and a dot."""
    result: set[str] = set()
    for key, inner in value.items():
        result |= {f"{key}.{k}" for k in inner} if key in below else {key}
    return result


def test_document_and_answer_have_the_same_fields(server: LlamaServer) -> None:
    stats, doc = server.stats(), documented()
    both = doc["In `totals` and in each of `layers`"]
    assert names(stats, below=("io", "kernels", "memory", "prefetch")) == doc["Fields"]
    assert set(stats["totals"]) == both | doc["In `totals` only"]
    for layer in stats["layers"]:
        assert set(layer) == both | doc["In each of `layers`"]
    assert {re.sub(r"\{.*", "", name) for name in server.metrics()} == doc["Prometheus"]


def test_what_is_in_force(server: LlamaServer, demo: Path) -> None:
    stats = server.stats()
    assert stats["schema"] == "moestream/stats/1"
    assert stats["streaming"] is True
    assert stats["model"] == demo.name
    assert (stats["n_layer_moe"], stats["n_expert"], stats["n_expert_used"]) == (8, 64, 6)
    assert (stats["slots"], stats["slots_requested"], stats["policy"], stats["overlap"]) == (SLOTS, str(SLOTS), "lru", True)
    assert stats["io"] == {
        "mode": "direct", "requested": "direct", "reason": "as asked", "threads": 3, "backend": "threads", "in_flight": 3,
        "probe": {"note": "--moe-io says how to read", "rates": []},
    }  # fmt: skip
    assert stats["gpu_path"] is None
    assert (stats["placement"], stats["kernels"]) == (
        "cpu",
        {"experts": "plain", "dense": "plain", "same_bits_as": "stock llama.cpp with --no-repack"},
    )
    assert [layer["layer"] for layer in stats["layers"]] == list(range(8))
    assert all((layer["n_expert"], layer["slots"]) == (64, SLOTS) for layer in stats["layers"])


def test_memory_adds_up(server: LlamaServer, demo: Path) -> None:
    memory = server.stats()["memory"]
    assert memory["total_bytes"] == sum(value for name, value in memory.items() if name != "total_bytes")
    experts = sum(end - begin for begin, end in expert_ranges(demo))
    assert memory["pool_bytes"] == experts * SLOTS // 64
    assert 2 * experts / 8 <= memory["staging_bytes"] < 2.1 * experts / 8  # two layers
    assert 0.98 * (demo.stat().st_size - experts) > memory["dense_bytes"] > 0.8 * (demo.stat().st_size - experts)
    assert memory["kv_bytes"] == 2048 * 8 * 2 * (2 * 64) * 2  # tokens, layers, K and V, two heads of 64, F16


def check_sums(stats: dict[str, Any], demo: Path) -> None:
    expert_bytes = sum(end - begin for begin, end in expert_ranges(demo)) // (8 * 64)
    for name in COUNTERS:
        assert stats["totals"][name] == sum(layer[name] for layer in stats["layers"])
    for layer in stats["layers"]:
        assert layer["bytes_needed"] == (layer["hits"] + layer["misses"]) * expert_bytes
        assert layer["bytes_read"] >= layer["misses"] * expert_bytes
        assert layer["bytes_read"] % expert_bytes == layer["bytes_copied"] % expert_bytes == 0
        assert 0 < layer["evictions"] <= layer["misses"] + layer["bytes_copied"] // expert_bytes


def test_counters_add_up_and_grow(server: LlamaServer, demo: Path) -> None:
    before = server.stats()
    check_sums(before, demo)
    server.complete("A harbor is", 25)
    after = server.stats()
    check_sums(after, demo)
    grown = {name: after["totals"][name] - before["totals"][name] for name in after["totals"]}
    assert all(grown[name] > 0 for name in COUNTERS)
    assert grown["read_errors"] == 0
    # the answer's last token is not computed with; of one token at a time each goes through slots, 6 accesses a layer
    assert grown["tokens_decode"] == 24
    assert 2 <= grown["tokens_prefill"] <= 8
    assert grown["hits"] + grown["misses"] >= 24 * 6 * 8


def test_metrics_are_the_same_figures(server: LlamaServer) -> None:
    stats, metrics = server.stats(), server.metrics()  # nothing is computed in between
    fields = dict(re.findall(r"^\| `(moestream_\w+)` \| \w+ \| `layer` \| `(\w+)` \|", DOC.read_text(), re.MULTILINE))
    assert len(fields) == 17
    for name, field in fields.items():
        for layer in stats["layers"]:
            assert metrics.pop(f'{name}{{layer="{layer["layer"]}"}}') == layer[field]
    for field in ("tokens_decode", "tokens_prefill", "read_errors"):
        assert metrics.pop(f"moestream_{field}_total") == stats["totals"][field]
    for use, size in stats["memory"].items():
        if use not in ("total_bytes", "device_bytes"):
            assert metrics.pop(f'moestream_memory_bytes{{use="{use.removesuffix("_bytes")}"}}') == size
    assert metrics.pop("moestream_device_memory_bytes") == stats["memory"]["device_bytes"] == 0
    assert metrics == {}


def test_metrics_have_help_and_type(server: LlamaServer) -> None:
    text = server.http.get("/metrics").text
    types = dict(re.findall(r"^\| `(moestream_\w+)` \| (\w+) \|", DOC.read_text(), re.MULTILINE))
    for name, kind in types.items():
        assert len(re.findall(rf"^# TYPE {name} {kind}$", text, re.MULTILINE)) == 1
        assert len(re.findall(rf"^# HELP {name} \S.*$", text, re.MULTILINE)) == 1


def test_without_streaming(demo: Path, tmp_path: Path) -> None:
    with LlamaServer(demo, tmp_path / "log") as server:
        server.complete("The", 3)
        assert server.stats() == OFF
        assert server.metrics() == {}


def test_all_experts_in_slots(demo: Path, tmp_path: Path) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "all") as server:
        server.complete("The command grep " * 20, 30)
        stats = server.stats()
    assert stats["memory"]["staging_bytes"] == 0
    assert stats["totals"]["tokens_prefill"] == stats["totals"]["evictions"] == stats["totals"]["bytes_copied"] == 0
    assert stats["totals"]["misses"] <= 8 * 64  # each expert is read once at most


@pytest.mark.parametrize("streaming", [True, False])
def test_stats_file(demo: Path, tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "stats.json"
    run(
        tool("llama-completion"), "-m", demo, "-p", "The command", "-n", "20", "-no-cnv", "--no-repack", "-t", "1", "-c", "256",
        *(("--moe-slots", "6") if streaming else ()), env=environment({"MOESTREAM_STATS_FILE": str(path)}),
    )  # fmt: skip
    assert path.exists() == streaming
    if streaming:
        stats = json.loads(path.read_text())
        check_sums(stats, demo)
        assert stats["slots"] == 6
        assert stats["totals"]["tokens_decode"] >= 19
