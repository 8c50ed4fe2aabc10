"""Is a series of measurements flat? Pure functions over (seconds, value) pairs; a soak judges a server's memory and speed with them.

The beginning is left out (buffers grow to their size), the rest is cut into windows of equal time, and each window counts with its
median, so that a burst does not. What is compared is the median of the first third of the windows with that of the last third.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Samples = Sequence[tuple[float, float]]

SKIPPED = 0.2  # of the time, at the beginning
N_WINDOWS = 12


def window_medians(samples: Samples, n_windows: int = N_WINDOWS, skipped: float = SKIPPED) -> list[float]:
    """The median of each window of equal time.

    Raises:
        ValueError: a window has no sample, and so nothing can be said about it.
    """
    if not samples:
        raise ValueError("no samples")
    begin, end = samples[0][0], samples[-1][0]
    begin += skipped * (end - begin)
    width = (end - begin) / n_windows
    windows: list[list[float]] = [[] for _ in range(n_windows)]
    for t, value in samples:
        if t >= begin and width > 0:
            windows[min(int((t - begin) / width), n_windows - 1)].append(value)
    if not all(windows):
        raise ValueError(f"{len(samples)} samples in {end - samples[0][0]:g} s: a window without one")
    return [statistics.median(window) for window in windows]


@dataclass(frozen=True)
class Trend:
    """How a series has changed from its first third to its last."""

    first: float
    last: float
    lowest: float  # of the windows' medians
    highest: float

    @property
    def change(self) -> float:
        return self.last - self.first

    def grew_by_more_than(self, tolerance: float) -> bool:
        return self.change > tolerance

    def fell_by_more_than(self, share: float) -> bool:
        """``share`` of the first value."""
        return self.last < (1 - share) * self.first


def trend(samples: Samples, n_windows: int = N_WINDOWS, skipped: float = SKIPPED) -> Trend:
    medians = window_medians(samples, n_windows, skipped)
    third = max(1, n_windows // 3)
    first, last = statistics.median(medians[:third]), statistics.median(medians[-third:])
    return Trend(first, last, min(medians), max(medians))


def rates(counter: Samples, against: Samples | None = None) -> list[tuple[float, float]]:
    """How fast a counter rises, per second or per unit of another counter sampled at the same times; steps in which that stood still
    are left out."""
    per = [t for t, _ in counter] if against is None else [value for _, value in against]
    return [
        (counter[i][0], (counter[i][1] - counter[i - 1][1]) / (per[i] - per[i - 1]))
        for i in range(1, len(counter))
        if per[i] > per[i - 1]
    ]
