"""Memory, and what limits it. ``root`` stands for ``/`` everywhere: tests give another."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from moestream.doctor.checks import Check, Finding, Remedy
from moestream.gguf_facts import GgufFacts
from moestream.server.report import size

_LITTLE_BYTES = 1 << 30
_LITTLE_LOCKED_BYTES = 1 << 20
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for none

MEMORY = Check(
    "memory",
    "memory that is available; with MODEL, whether its dense weights and as many experts as a token uses fit",
    {
        "little": Remedy("less than 1 GiB is available", "end programs that are not needed: ps aux --sort=-rss | head"),
        "too-little": Remedy(
            "the model does not fit",
            "end programs that are not needed, or take a smaller quant: moestream needs {need} at least",
        ),
        "swapping": Remedy(
            "more than half of the swap is in use and less memory is available than that",
            "end programs that are not needed; experts that are swapped out are slower than those in the file",
        ),
    },
)
CGROUP = Check(
    "cgroup",
    "the memory limit of the control groups that the process is in (containers, systemd units, batch jobs)",
    {
        "tight": Remedy(
            "it leaves less than half of what the machine has available",
            "raise it if that is not meant: docker run --memory, MemoryMax= of the systemd unit, --mem of the batch job; it limits {group}",
        ),
        "too-little": Remedy(
            "it leaves less than 256 MiB, or less than the model needs",
            "raise it to {need} and more: docker run --memory, MemoryMax= of the systemd unit, --mem of the batch job; it limits {group}",
        ),
    },
)
MEMLOCK = Check(
    "memlock",
    "how much memory may be locked or pinned (RLIMIT_MEMLOCK): buffers of a GPU; io_uring's rings before Linux 5.12",
    {
        "small": Remedy(
            "it is less than 1 MiB, or with an engine for a GPU less than half of the available memory",
            "ulimit -l unlimited; for good: `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd "
            "unit, docker run --ulimit memlock=-1",
        ),
    },
)
HUGE_PAGES = Check(
    "huge-pages",
    "transparent huge pages, which moestream asks for where its slots lie",
    {"never": Remedy("they are switched off", "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")},
)
NUMA = Check(
    "numa",
    "NUMA nodes",
    {
        "several": Remedy(
            "there are several with memory", "spread the memory over all: numactl --interleave=all moestream start …, or moestream start … -- --numa distribute"
        ),
    },
)  # fmt: skip


def smallest_bytes(facts: GgufFacts) -> int:
    """What a model takes at least: dense weights, and slots for the experts of one token. KV cache and buffers come on top."""
    slots = sum(facts.n_expert_used * facts.bytes_per_slot(layer) for layer in facts.moe_layers)
    return facts.dense_bytes + slots


def _fields(path: Path) -> dict[str, int]:
    """Lines ``name value …`` or ``name: value …``; none where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^([\w()]+):?\s+([0-9]+)", text, re.MULTILINE)}


def _number(path: Path) -> int | None:
    """Of a file with one; None where it has none (``max``) or is missing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def available_bytes(root: Path = Path("/")) -> int | None:
    """MemAvailable; None where the system does not tell."""
    kib = _fields(root / "proc/meminfo").get("MemAvailable")
    return None if kib is None else kib * 1024


def memory(root: Path = Path("/"), *, need_bytes: int | None = None) -> Finding:
    """Args: need_bytes: see :func:`smallest_bytes`; None without a model."""
    kib = _fields(root / "proc/meminfo")
    if "MemAvailable" not in kib or "MemTotal" not in kib:
        return MEMORY.skipped("this system does not tell")
    left, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    swap, swap_free = kib.get("SwapTotal", 0) * 1024, kib.get("SwapFree", 0) * 1024
    text = f"{size(left)} of {size(total)} available"
    data = {"available_bytes": left, "total_bytes": total, "need_bytes": need_bytes}
    if need_bytes is not None:
        text += f"; the model takes {size(need_bytes)} at least"
        if left < need_bytes:
            return MEMORY.fail("too-little", text, {"need": size(need_bytes)}, **data)
    if left < _LITTLE_BYTES:
        return MEMORY.warn("little", text, **data)
    if swap_free < swap / 2 and left < swap - swap_free:
        return MEMORY.warn("swapping", f"{text}; {size(swap - swap_free)} of {size(swap)} swap in use", **data)
    return MEMORY.ok(text, **data)


@dataclass(frozen=True)
class _Version:
    """Where a version of control groups has its files: as in engine/budget.cpp."""

    mount: str
    limit: str
    usage: str
    caches: tuple[str, str]


_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Version(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)


@dataclass(frozen=True)
class Allowance:
    """What a control group leaves: its path, its limit and how much of that is not in use (file cache is not)."""

    group: str
    limit_bytes: int
    left_bytes: int


def allowance(root: Path = Path("/")) -> Allowance | None:
    """The tightest on the way from the process's own group to the root; None where nothing limits memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[Allowance] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(version.mount, *parts[:depth])
            limit, usage = _number(folder / version.limit), _number(folder / version.usage)
            if limit is None or limit >= _NO_LIMIT or usage is None:
                continue
            stat = _fields(folder / "memory.stat")
            used = max(0, usage - sum(stat.get(name, 0) for name in version.caches))
            found.append(Allowance("/" + "/".join(parts[:depth]), limit, max(0, limit - used)))
    return min(found, key=lambda a: a.left_bytes, default=None)


def cgroup(root: Path = Path("/"), *, need_bytes: int | None = None) -> Finding:
    """Args: need_bytes: as for :func:`memory`."""
    found = allowance(root)
    if found is None:
        return CGROUP.ok("no limit")
    text = f"limit {size(found.limit_bytes)}, {size(found.left_bytes)} left"
    data = {"limit_bytes": found.limit_bytes, "left_bytes": found.left_bytes, "group": found.group}
    need = max(need_bytes or 0, 256 << 20)
    if found.left_bytes < need:
        wanted = f"; the model takes {size(need_bytes)} at least" if need_bytes else ""
        return CGROUP.fail("too-little", text + wanted, {"need": size(need), "group": found.group}, **data)
    if found.left_bytes < (available_bytes(root) or 0) / 2:
        return CGROUP.warn("tight", text, {"group": found.group}, **data)
    return CGROUP.ok(text, **data)


def memlock_limit() -> int | None:
    """The soft limit in bytes; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock(limit_bytes: int | None, *, gpu: bool, root: Path = Path("/")) -> Finding:
    """Args: limit_bytes: None for no limit.   gpu: the engine in use is for one."""
    if limit_bytes is None:
        return MEMLOCK.ok("unlimited")
    wanted = max(_LITTLE_LOCKED_BYTES, (available_bytes(root) or 0) // 2 if gpu else 0)
    text = f"at most {size(limit_bytes)} may be locked or pinned"
    if limit_bytes < wanted:
        return MEMLOCK.warn("small", text, limit_bytes=limit_bytes)
    return MEMLOCK.ok(text, limit_bytes=limit_bytes)


def huge_pages(root: Path = Path("/")) -> Finding:
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return HUGE_PAGES.skipped("this kernel has none")
    chosen = re.search(r"\[(\w+)\]", text)
    mode = chosen[1] if chosen else text.strip()
    if mode == "never":
        return HUGE_PAGES.warn("never", "never", mode=mode)
    return HUGE_PAGES.ok(mode, mode=mode)


def numa(root: Path = Path("/")) -> Finding:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    nodes = {}
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        try:
            kib = re.search(r"MemTotal:\s+([0-9]+)", (folder / "meminfo").read_text())
        except OSError:
            continue
        if kib and int(kib[1]):
            nodes[folder.name] = int(kib[1]) * 1024
    if not nodes:
        return NUMA.skipped("this system does not tell")
    if len(nodes) == 1:
        return NUMA.ok("one node", nodes=nodes)
    return NUMA.warn(
        "several", f"{len(nodes)} nodes: {', '.join(f'{name} {size(n)}' for name, n in nodes.items())}", nodes=nodes
    )
