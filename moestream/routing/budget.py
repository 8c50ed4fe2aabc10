"""Slots for each layer under a budget of memory. Pure: curves and sizes in, slots out."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from moestream.errors import MoestreamError


@dataclass(frozen=True)
class LayerCurve:
    """What slots are worth in one layer.

    Attributes:
        n_min, n_max: the fewest and the most slots.
        slot_bytes: of one slot.
        misses: misses over the whole trace, by slots; has n_min and n_max, and any in between.
    """

    layer: int
    n_min: int
    n_max: int
    slot_bytes: int
    misses: Mapping[int, int]


def gains(curve: LayerCurve) -> list[float]:
    """Misses that each further slot behind ``n_min`` saves, never rising.

    Between measured points the saving is spread evenly over the lower convex hull, so that a step which only pays after several
    slots counts for each of them.
    """
    hull: list[tuple[int, int]] = []
    for point in sorted(curve.misses.items()):
        while len(hull) >= 2 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    found: list[float] = []
    for (n, misses), (n_next, misses_next) in itertools.pairwise(hull):
        found += [max(0.0, (misses - misses_next) / (n_next - n))] * (n_next - n)
    return found


def _above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def divide(curves: list[LayerCurve], budget_bytes: int) -> dict[int, int]:
    """Slots by layer: the fewest everywhere, then each further slot where it saves the most bytes read per byte of memory.

    A miss of a layer costs its ``slot_bytes`` to read, which is also what the slot costs, so that the gain per byte is the number of misses
    saved. What is left when the best slot does not fit goes to the next best that does.

    Raises:
        MoestreamError: not even the fewest fit.
    """
    least = sum(c.n_min * c.slot_bytes for c in curves)
    if least > budget_bytes:
        raise MoestreamError(
            f"a budget of {budget_bytes / 2**20:.1f} MiB is too small: the fewest slots there can be take {least / 2**20:.1f} MiB",
            hint=f"--budget {-(-least // 2**20)}MiB or more",
        )
    slots = {c.layer: c.n_min for c in curves}
    left = budget_bytes - least
    steps = [gains(c) for c in curves]
    queue = [(-g[0], i, 0) for i, g in enumerate(steps) if g]
    heapq.heapify(queue)
    while queue:
        _, i, taken = heapq.heappop(queue)
        curve = curves[i]
        if curve.slot_bytes > left:
            continue  # nor do its later slots fit
        left -= curve.slot_bytes
        slots[curve.layer] += 1
        if taken + 1 < len(steps[i]):
            heapq.heappush(queue, (-steps[i][taken + 1], i, taken + 1))
    return slots


def same_for_all(curves: list[LayerCurve], budget_bytes: int) -> int:
    """The most slots that every layer can have alike; layers with fewer experts have as many as those."""
    n = max(c.n_min for c in curves)
    while n < max(c.n_max for c in curves) and sum(min(n + 1, c.n_max) * c.slot_bytes for c in curves) <= budget_bytes:
        n += 1
    return n
