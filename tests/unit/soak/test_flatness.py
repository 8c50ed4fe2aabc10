"""A leak and a slow-down are seen; noise, bursts and a warm-up are not taken for one."""

from __future__ import annotations

import random

import pytest
from flatness import Trend, rates, trend, window_medians

MIB = 1 << 20


def memory(leak_per_s: float = 0, *, n: int = 600, noise: float = 2 * MIB, seed: int = 1) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(float(t), 100 * MIB + leak_per_s * t + rng.gauss(0, noise)) for t in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat(seed: int) -> None:
    assert not trend(memory(seed=seed)).grew_by_more_than(4 * MIB)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_growth(seed: int) -> None:
    """20 KiB a second: a few KiB for each request."""
    found = trend(memory(20 << 10, seed=seed))
    assert found.grew_by_more_than(4 * MIB)
    # a third of the windows lies between the middle of the first third and that of the last, twice
    assert found.change == pytest.approx((20 << 10) * 600 * 0.8 * 2 / 3, rel=0.25)


def test_one_descriptor_a_minute_is_growth() -> None:
    leaking = [(t, 12.0 + t // 60) for t in range(600)]
    assert trend(leaking).grew_by_more_than(2)
    assert not trend([(t, 12.0 + t % 5) for t in range(600)]).grew_by_more_than(0)


def test_a_warm_up_is_left_out() -> None:
    warming = [(t, 50.0 + min(t, 100)) for t in range(600)]
    assert trend(warming).change == 0
    assert trend(warming, skipped=0).change > 0


def test_a_burst_does_not_count() -> None:
    assert trend([(t, 1000.0 if 300 <= t < 310 else 10.0) for t in range(600)]).change == 0


def test_slower_is_seen_and_faster_is_no_complaint() -> None:
    slower = [(t, 100 - t / 10) for t in range(600)]
    assert trend(slower).fell_by_more_than(0.25)
    assert not trend([(t, v + 500) for t, v in slower]).fell_by_more_than(0.25)
    assert not trend([(t, 200 - v) for t, v in slower]).fell_by_more_than(0)


def test_what_a_trend_says() -> None:
    found = trend([(t, float(t)) for t in range(121)], skipped=0)
    assert found == Trend(first=19.5, last=99.5, lowest=4.5, highest=115.0)


def test_nothing_is_said_without_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        trend([])
    with pytest.raises(ValueError, match="a window without one"):
        trend([(t, 1.0) for t in (0, 1, 2, 598, 599, 600)])
    with pytest.raises(ValueError, match="a window without one"):
        window_medians([(5.0, 1.0)])


def test_rates_of_a_counter() -> None:
    counter = [(0.0, 10.0), (2.0, 30.0), (3.0, 30.0), (4.0, 50.0)]
    assert rates(counter) == [(2.0, 10.0), (3.0, 0.0), (4.0, 20.0)]
    cpu = [(0.0, 1.0), (2.0, 3.0), (3.0, 3.0), (4.0, 4.0)]
    assert rates(counter, cpu) == [(2.0, 10.0), (4.0, 20.0)]
