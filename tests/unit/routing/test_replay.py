"""What follows from a replay."""

from __future__ import annotations

import pytest

from moestream.commands.trace import parse_list
from moestream.errors import MoestreamError
from moestream.routing.replay import LayerCounts, Run, best_start, predicted_tps
from moestream.sizes import parse_size


def run(policy: str = "lru", slots: int | None = 8, hits: int = 30, misses: int = 10, tokens: int = 4) -> Run:
    layers = (LayerCounts(0, 8, hits, misses, 6), LayerCounts(2, 8, 0, 0, 2))
    return Run(policy, slots, hits, misses, 3, 8, tokens, 100, layers)


def test_rates() -> None:
    assert run().hit_rate == 0.75
    assert run(hits=0, misses=0).hit_rate == 1
    assert run().misses_per_token == 2
    assert run().bytes_per_token({0: 1000, 2: 500}) == (6 * 1000 + 2 * 500) / 4
    assert run(tokens=0).misses_per_token is None
    assert run(tokens=0).bytes_per_token({0: 1, 2: 1}) is None


def test_predicted_speed() -> None:
    assert predicted_tps(0, 1e9, 20) == pytest.approx(20)
    assert predicted_tps(50e6, 1e9, 20) == pytest.approx(10)  # 50 ms to compute, 50 ms to read


def test_what_to_start_with() -> None:
    rates = {
        ("lru", 8): 0.5,
        ("lfu", 8): 0.6,
        ("opt", 8): 0.99,
        ("lru", 16): 0.9,
        ("lfu", 16): 0.88,
        ("lru", 32): 0.92,
        ("lfu", 32): 0.91,
    }
    runs = [run(policy, slots) for policy, slots in rates]
    assert best_start(runs, rates) == ("lru", 16), "95 % of 0.92 is enough, and the optimum is no policy"
    assert best_start(runs, {**rates, ("lfu", 16): 0.905}) == ("lru", 16), "hardly better than the default"
    assert best_start(runs, {**rates, ("lfu", 16): 0.92}) == ("lfu", 16)
    del rates["lru", 16], rates["lfu", 16]
    assert best_start(runs, rates) == ("lru", 32), "a run without a value is left out"
    assert best_start([run("opt", 8), run("lru", None)], rates) is None


def test_sizes() -> None:
    assert [parse_size("--budget", s) for s in ("4GiB", "1.5 gib", "800MB", "100", "2kib", "1TB")] == [
        4 << 30,
        3 << 29,
        800 * 10**6,
        100,
        2048,
        10**12,
    ]
    for bad in ("", "GiB", "-4GiB", "0", "4 G", "4XB", "4IB", "nan", "9" * 400, "9999999999TiB", "0.1"):
        with pytest.raises(MoestreamError, match=r"--budget .*: expected a size"):
            parse_size("--budget", bad)


def test_lists() -> None:
    assert parse_list("--slots", "32, 16,16") == [16, 32]
    for bad in ("", "16,", "a", "0", "-3", "1.5", "9" * 5000):
        with pytest.raises(MoestreamError, match=r"--slots .*is no number from 1"):
            parse_list("--slots", bad)
