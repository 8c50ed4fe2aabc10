"""Memory that a process started now can have: what the system has left, and what the cgroups around this process leave of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_NO_LIMIT = 1 << 60  # version 1 writes a huge number for none


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes; file cache counts as free, since the kernel gives it up. As ``engine/budget.cpp`` has it.

    Args:
        root: where ``proc`` and ``sys`` are; tests have their own.
    """
    left = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):  # not Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if not controllers:
                left += _along(root / "sys/fs/cgroup", group, "memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                left += _along(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(left)


def _along(mount: Path, group: str, limit_name: str, usage_name: str, prefix: str) -> list[int]:
    """What each group from this one up to the root leaves."""
    found = []
    folder = mount / group.strip("/")
    while True:
        try:
            limit = int((folder / limit_name).read_text())
            usage = int((folder / usage_name).read_text())
        except (OSError, ValueError):  # no such group in here (a container's root), or "max"
            limit = usage = _NO_LIMIT
        if limit < _NO_LIMIT:
            found.append(max(0, limit - max(0, usage - _cache_bytes(folder, prefix))))
        if folder == mount:
            return found
        folder = folder.parent


def _cache_bytes(folder: Path, prefix: str) -> int:
    fields = {}
    with contextlib.suppress(OSError):
        fields = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines() if " " in line)
    return sum(int(fields.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
