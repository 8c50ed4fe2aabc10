"""What Linux says in /proc and /sys of memory and processors, and what control groups of either version leave of them.

``root`` stands for ``/`` everywhere: tests give another. Files that are not there, as on other systems, say nothing.
The twin is ``available_memory`` in engine/budget.cpp, which decides in the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 writes a huge number for "no limit"


def text(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Of a file with one; None where it has none (``max``) or is missing."""
    content = text(path).strip()
    return int(content) if content.isascii() and content.isdigit() else None


def field(path: Path, name: str) -> int | None:
    """The number behind a name, with or without a colon, at the start of a line."""
    return fields(path).get(name)


def fields(path: Path) -> dict[str, int]:
    """All lines ``name value …`` or ``name: value …``."""
    found = {}
    for line in text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isascii() and words[1].isdigit():
            found.setdefault(words[0].removesuffix(":"), int(words[1]))
    return found


# --- control groups ---


@dataclass(frozen=True)
class _Version:
    """How a version names what is said of memory: its limit, its use, and the file cache in that use."""

    limit: str
    usage: str
    caches: tuple[str, str]


_V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def groups(controller: str, root: Path = _ROOT) -> Iterator[tuple[str, Path, bool]]:
    """The groups around this process that a controller may limit, innermost first: path, folder, whether it is of version 2.

    Folders need not be there: a container may see its own group as the root.
    """
    for line in text(root / "proc/self/cgroup").splitlines():
        _, colon, rest = line.partition(":")
        controllers, colon2, group = rest.partition(":")
        if not colon or not colon2:
            continue
        names = controllers.split(",") if controllers else []
        if names and controller not in names:
            continue
        # version 2 has one hierarchy for all; version 1 one for each, which may be named by all that share it
        mounts = dict.fromkeys([controllers, controller] if names else [""])
        parts = [part for part in group.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                inner = parts[:depth]
                yield "/" + "/".join(inner), root.joinpath("sys/fs/cgroup", mount, *inner), not names


# --- memory ---


@dataclass(frozen=True)
class Memory:
    """Memory that there is now, and what limits it: ``MemAvailable``, or ``cgroup`` and its path."""

    available_bytes: int
    limited_by: str


@dataclass(frozen=True)
class Limit:
    """What a control group allows, and how much of that is not in use; file cache is not."""

    group: str
    limit_bytes: int
    left_bytes: int


def memory_limits(root: Path = _ROOT) -> list[Limit]:
    """Of all groups around this process that have one."""
    found = []
    for group, folder, is_v2 in groups("memory", root):
        version = _V2 if is_v2 else _V1
        limit, usage = number(folder / version.limit), number(folder / version.usage)
        if limit is None or limit >= _UNLIMITED or usage is None:
            continue
        stat = fields(folder / "memory.stat")
        used = max(0, usage - sum(stat.get(name, 0) for name in version.caches))
        found.append(Limit(group, limit, max(0, limit - used)))
    return found


def tightest(root: Path = _ROOT) -> Limit | None:
    """The group that leaves least; None where nothing limits memory."""
    return min(memory_limits(root), key=lambda limit: limit.left_bytes, default=None)


def mem_available(root: Path = _ROOT) -> int | None:
    """``MemAvailable`` in bytes; None where the system does not say."""
    kib = field(root / "proc/meminfo", "MemAvailable")
    return None if not kib else kib * 1024


def within_cgroups(now: Memory, root: Path = _ROOT) -> Memory:
    """What the control groups around this process leave of it; one byte of nothing, for 0 would mean unknown."""
    limit = tightest(root)
    if limit is None or limit.left_bytes >= now.available_bytes:
        return now
    return Memory(max(limit.left_bytes, 1), f"cgroup {limit.group}")


def available_memory(root: Path = _ROOT) -> Memory | None:
    """min(MemAvailable, what every control group around this process still allows); None where the system does not say."""
    available = mem_available(root)
    return None if available is None else within_cgroups(Memory(available, "MemAvailable"), root)


# --- processors ---


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores that the control groups around this process allow; None: all."""
    found = []
    for _, folder, is_v2 in groups("cpu", root):
        if is_v2:
            words = text(folder / "cpu.max").split()
            quota, period = (int(w) if w.isascii() and w.isdigit() else None for w in (*words, "", "")[:2])
        else:
            quota, period = (
                number(folder / "cpu.cfs_quota_us"),
                number(folder / "cpu.cfs_period_us"),
            )  # -1 is no number: no limit
        if quota and period:
            found.append(quota / period)
    return min(found, default=None)


def throttles(root: Path = _ROOT) -> int | None:
    """How often the innermost control group that counts it was held back for its processor time."""
    counts = (field(folder / "cpu.stat", "nr_throttled") for _, folder, _ in groups("cpu", root))
    return next((n for n in counts if n is not None), None)
