"""Experts are neither loaded, mapped nor read ahead: looked up in the server's mappings and in the kernel's page cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fixture_models import expert_ranges
from llama_server import LlamaServer
from page_cache import PAGE, cached_pages, drop_from_cache, expert_runs, ranges_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and mincore")

# The cache holds large pages: one with the last bytes of a dense tensor may hold the first of an expert.
EDGE_BYTES = 256 * 1024


def cached_expert_bytes(path: Path) -> int:
    """Of the experts, edges left out."""
    cached, runs = cached_pages(path), expert_runs(path)
    pages = [p for begin, end in runs for p in range(-(-(begin + EDGE_BYTES) // PAGE), (end - EDGE_BYTES) // PAGE)]
    assert len(pages) * PAGE > 0.8 * sum(end - begin for begin, end in runs)
    return sum(cached[page] for page in pages) * PAGE


def mapped_expert_bytes(pid: int, path: Path) -> int:
    """Of the experts, whole pages only, in mappings of the file."""
    mapped = 0
    ranges = ranges_of(path)
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(.*)", line)
        if match and match[4] == str(path):
            first, behind, offset = (int(match[i], 16) for i in (1, 2, 3))
            for begin, end in ranges:
                whole = (-(-begin // PAGE) * PAGE, end // PAGE * PAGE)
                mapped += max(0, min(whole[1], offset + behind - first) - max(whole[0], offset))
    return mapped


def memory_of(pid: int, field: str) -> int:
    """Bytes, a field of /proc/PID/status."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


@pytest.mark.parametrize("load_mode", ["none", "mmap", "dio", None])
def test_direct_reads_leave_nothing_behind(demo_copy: Path, tmp_path: Path, load_mode: str | None) -> None:
    drop_from_cache(demo_copy)
    more = ("--load-mode", load_mode) if load_mode else ()
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "8", "--moe-io", "direct", *more) as server:
        assert cached_expert_bytes(demo_copy) == 0
        assert mapped_expert_bytes(server.pid, demo_copy) == 0
        assert server.stats()["totals"]["bytes_read"] == 0

        server.complete("The command grep", 60)
        assert server.stats()["totals"]["bytes_read"] > 20e6
        assert cached_expert_bytes(demo_copy) == 0
        assert mapped_expert_bytes(server.pid, demo_copy) == 0


@pytest.mark.parametrize("load_mode", ["none", "mmap"])
def test_buffered_reads_load_nothing_up_front(demo_copy: Path, tmp_path: Path, load_mode: str) -> None:
    drop_from_cache(demo_copy)
    arguments = ("--moe-slots", "8", "--moe-io", "buffered", "--load-mode", load_mode)
    with LlamaServer(demo_copy, tmp_path / "log", *arguments) as server:
        # Reading the header reads ahead, how far is the device's setting; in the last layer, far behind that, there is none.
        cached = cached_pages(demo_copy)
        begin, end = expert_runs(demo_copy)[-1]
        pages = cached[(begin + EDGE_BYTES) // PAGE : end // PAGE]
        assert len(pages) > 100
        assert sum(pages) == 0
        assert mapped_expert_bytes(server.pid, demo_copy) == 0
        assert server.stats()["totals"]["bytes_read"] == 0

        server.complete("The command grep", 60)
        assert mapped_expert_bytes(server.pid, demo_copy) == 0


def test_the_measurements_see_a_stock_server(demo_copy: Path, tmp_path: Path) -> None:
    drop_from_cache(demo_copy)
    with LlamaServer(demo_copy, tmp_path / "log", "--load-mode", "mmap") as server:
        experts = sum(end - begin for begin, end in expert_ranges(demo_copy))
        assert mapped_expert_bytes(server.pid, demo_copy) > 0.95 * experts
        assert cached_expert_bytes(demo_copy) > 0.8 * experts


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_memory_is_what_was_announced(demo: Path, tmp_path: Path, io: str) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "8", "--moe-io", io) as server:
        server.complete("The command grep " * 100, 100)
        planned = server.stats()["memory"]["total_bytes"]
        line = re.search(r"moestream: memory: ([\d.]+) MiB", server.text())
        assert line
        assert abs(float(line[1]) * 2**20 - planned) < 0.1 * 2**20
        # Beside the plan: the programs and libraries (files), vocabulary, sampler, HTTP threads. Compute buffers are planned for the
        # largest batch, and not all of them are touched.
        programs = memory_of(server.pid, "RssFile")
        peak = memory_of(server.pid, "VmHWM") - programs
        assert 0.6 * planned < peak < planned + 24 * 2**20
