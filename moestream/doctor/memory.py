"""Memory, and what limits it. ``root`` stands for ``/`` everywhere: tests give another."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from moestream import proc
from moestream.doctor.checks import Check, Finding, Remedy
from moestream.gguf_facts import GgufFacts
from moestream.server.report import size

_LITTLE_BYTES = 1 << 30
_LITTLE_LOCKED_BYTES = 1 << 20

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


def memory(root: Path = Path("/"), *, need_bytes: int | None = None) -> Finding:
    """Args: need_bytes: see :func:`smallest_bytes`; None without a model."""
    kib = proc.fields(root / "proc/meminfo")
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


def cgroup(root: Path = Path("/"), *, need_bytes: int | None = None) -> Finding:
    """Args: need_bytes: as for :func:`memory`."""
    found = proc.tightest(root)
    if found is None:
        return CGROUP.ok("no limit")
    text = f"limit {size(found.limit_bytes)}, {size(found.left_bytes)} left"
    data = {"limit_bytes": found.limit_bytes, "left_bytes": found.left_bytes, "group": found.group}
    need = max(need_bytes or 0, 256 << 20)
    if found.left_bytes < need:
        wanted = f"; the model takes {size(need_bytes)} at least" if need_bytes else ""
        return CGROUP.fail("too-little", text + wanted, {"need": size(need), "group": found.group}, **data)
    if found.left_bytes < (proc.mem_available(root) or 0) / 2:
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
    wanted = max(_LITTLE_LOCKED_BYTES, (proc.mem_available(root) or 0) // 2 if gpu else 0)
    text = f"at most {size(limit_bytes)} may be locked or pinned"
    if limit_bytes < wanted:
        return MEMLOCK.warn("small", text, limit_bytes=limit_bytes)
    return MEMLOCK.ok(text, limit_bytes=limit_bytes)


def huge_pages(root: Path = Path("/")) -> Finding:
    text = proc.text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if not text:
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
        kib = re.search(r"MemTotal:\s+([0-9]+)", proc.text(folder / "meminfo"))
        if kib and int(kib[1]):
            nodes[folder.name] = int(kib[1]) * 1024
    if not nodes:
        return NUMA.skipped("this system does not tell")
    if len(nodes) == 1:
        return NUMA.ok("one node", nodes=nodes)
    return NUMA.warn(
        "several", f"{len(nodes)} nodes: {', '.join(f'{name} {size(n)}' for name, n in nodes.items())}", nodes=nodes
    )
