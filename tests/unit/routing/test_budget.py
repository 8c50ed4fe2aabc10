"""Slots under a budget, against every way there is to divide it."""

from __future__ import annotations

import itertools
import random

import pytest

from moestream.errors import MoestreamError
from moestream.routing.budget import LayerCurve, divide, gains, same_for_all


def test_gains_follow_the_hull() -> None:
    """A step that only pays after several slots counts for each of them; what a policy makes worse counts as nothing."""
    assert gains(LayerCurve(0, 2, 6, 1, {2: 100, 3: 99, 4: 40, 5: 30, 6: 25})) == [30, 30, 10, 5]
    assert gains(LayerCurve(0, 2, 5, 1, {2: 100, 5: 40})) == [20, 20, 20]
    assert gains(LayerCurve(0, 2, 4, 1, {2: 10, 3: 10, 4: 12})) == [0, 0]
    assert gains(LayerCurve(0, 4, 4, 1, {4: 10})) == []


def convex(rng: random.Random, n_min: int, n_max: int) -> dict[int, int]:
    falls = sorted((rng.randrange(50) for _ in range(n_max - n_min)), reverse=True)
    return {n_min + i: 1000 - sum(falls[:i]) for i in range(n_max - n_min + 1)}


def read_bytes(curves: list[LayerCurve], slots: dict[int, int]) -> int:
    return sum(c.misses[slots[c.layer]] * c.slot_bytes for c in curves)


@pytest.mark.parametrize("seed", range(30))
def test_best_division_of_slots_of_one_size(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 7, 100])
    curves = [LayerCurve(i * 2, 2, (n := rng.randint(3, 7)), size, convex(rng, 2, n)) for i in range(3)]
    budget = rng.randint(6 * size, 20 * size)
    slots = divide(curves, budget)
    assert sum(slots.values()) * size <= budget
    ways = itertools.product(*(range(c.n_min, c.n_max + 1) for c in curves))
    fit = [dict(zip(slots, way, strict=True)) for way in ways if sum(way) * size <= budget]
    assert read_bytes(curves, slots) == min(read_bytes(curves, way) for way in fit)


@pytest.mark.parametrize("seed", range(30))
def test_slots_of_different_sizes_fill_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    curves = [LayerCurve(i, 2, (n := rng.randint(2, 9)), rng.randint(3, 9), convex(rng, 2, n)) for i in range(4)]
    budget = rng.randint(sum(2 * c.slot_bytes for c in curves), sum(9 * c.slot_bytes for c in curves))
    slots = divide(curves, budget)
    left = budget - sum(slots[c.layer] * c.slot_bytes for c in curves)
    assert left >= 0
    assert all(c.n_min <= slots[c.layer] <= c.n_max for c in curves)
    assert all(slots[c.layer] == c.n_max or c.slot_bytes > left for c in curves), "no slot more would fit"
    n = same_for_all(curves, budget)
    assert sum(min(n, c.n_max) * c.slot_bytes for c in curves) <= budget


def test_too_small() -> None:
    curves = [LayerCurve(i, 8, 16, 1 << 20, {8: 5, 16: 0}) for i in range(3)]
    with pytest.raises(
        MoestreamError, match=r"a budget of 23.0 MiB is too small: the fewest slots there can be take 24.0 MiB"
    ) as caught:
        divide(curves, 23 << 20)
    assert caught.value.hint == "--budget 24MiB or more"
    assert divide(curves, 24 << 20) == {0: 8, 1: 8, 2: 8}
    assert same_for_all(curves, 47 << 20) == 15
