"""Memory that a process started now can have: what the system has left, and what the cgroups around this process leave of it."""

from __future__ import annotations

from pathlib import Path

import psutil

from moestream.proc import Memory, within_cgroups


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes; file cache counts as free, since the kernel gives it up. Also where the system is not Linux.

    Args:
        root: where ``proc`` and ``sys`` are; tests have their own.
    """
    return within_cgroups(Memory(psutil.virtual_memory().available, "available"), root).available_bytes
