"""A prediction held against what a running server reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moestream.planning.memory import PROGRAM_BYTES

BYTES_TOLERANCE = 0.03
SPEED_TOLERANCE = 0.25


@dataclass(frozen=True)
class Deviation:
    """One figure.

    Attributes:
        tolerance: how much it may differ and count as held, a part of what is reported; None: it is shown, and does not count.
    """

    name: str
    predicted: float | None
    reported: float | None
    tolerance: float | None

    @property
    def relative(self) -> float | None:
        """By how much the prediction differs from what is reported; None where one of them is missing."""
        if self.predicted is None or self.reported is None:
            return None
        if self.reported == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.reported - 1

    @property
    def held(self) -> bool | None:
        """None where it does not count, or cannot be told."""
        if self.tolerance is None or self.predicted is None or self.reported is None:
            return None
        return abs(self.predicted - self.reported) <= self.tolerance * abs(self.reported)

    def as_json(self) -> dict[str, Any]:
        relative = self.relative
        return {
            "name": self.name, "predicted": self.predicted, "reported": self.reported,
            "deviation": None if relative in (None, float("inf")) else round(relative, 5), "tolerance": self.tolerance, "held": self.held,
        }  # fmt: skip


# Compute buffers are an estimate, and read buffers follow from a measurement at start: they count in the total alone.
_ESTIMATES = {"compute_bytes", "bounce_bytes"}


def memory(predicted: Mapping[str, int], reported: Mapping[str, int]) -> list[Deviation]:
    """Bytes by purpose, and their total."""
    return [
        Deviation(name, predicted[name], reported.get(name), None if name in _ESTIMATES else BYTES_TOLERANCE)
        for name in predicted
    ]


def failed(deviations: list[Deviation]) -> list[Deviation]:
    """Those that do not hold."""
    return [d for d in deviations if d.held is False]


def needed_bytes(memory: Mapping[str, int]) -> int:
    """What a server needs of the machine's memory by what it reports, the program itself included; as ``check_memory`` in
    engine/hooks/context.cpp reckons.

    Args:
        memory: ``memory`` of docs/stats.md.
    """
    taken = memory["total_bytes"] - memory.get("device_bytes", 0)
    return taken + PROGRAM_BYTES + taken // 64


def slots_within(memory: Mapping[str, int], slots: int, available_bytes: int) -> int:
    """How many slots would fit beside everything else that a server takes; 0 or less where nothing does.

    Args:
        slots: that it has.
    """
    left = available_bytes - (needed_bytes(memory) - memory["pool_bytes"])
    return left // max(1, memory["pool_bytes"] // slots)
