"""The machine that is measured on: the page cache of files, what a process uses, and what may disturb. Linux; elsewhere most is unknown."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from moestream import nvidia_smi, proc
from moestream.errors import MoestreamError

COLD_SHARE = 0.01  # a cache that holds more of the model than this is not called cold
BUSY_SHARE = 0.10  # of a core: a process that is told by name; of all cores: others during a run
SAMPLE_EVERY_S = 0.2
LOOK_S = 0.5


# --- the page cache ---


def drop_cache(files: Iterable[Path]) -> None:
    """Have the kernel forget its copies of these files, by posix_fadvise(2); other files are left alone. What a process has mapped stays.

    Raises:
        MoestreamError: this system cannot, or a file cannot be opened.
    """
    if not hasattr(os, "posix_fadvise"):
        raise MoestreamError("this system has no posix_fadvise: the page cache cannot be emptied", hint="measure --warm alone")
    for path in files:
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not written yet would stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise MoestreamError(f"cannot empty the page cache of {path}: {error.strerror}", hint="check the path") from error


def cached_share(files: Sequence[Path]) -> float | None:
    """How much of the files the page cache holds, 0 to 1, by mincore(2); None where that cannot be known."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    n_cached = n_page = 0
    window = 1 << 30
    try:
        for path in files:
            size = path.stat().st_size
            with path.open("rb") as file:
                for at in range(0, size, window):
                    length = min(window, size - at)
                    # Private and writable, for ctypes takes the address of nothing else; no page is touched.
                    with mmap.mmap(
                        file.fileno(), length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=at
                    ) as m:
                        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
                        view = ctypes.c_char.from_buffer(m)
                        failed = libc.mincore(ctypes.addressof(view), length, pages)
                        del view
                        if failed:
                            return None
                        n_cached += bytes(pages).translate(_LOW_BIT).count(1)
                        n_page += len(pages)
    except (OSError, ValueError):
        return None
    return n_cached / n_page if n_page else None


_LOW_BIT = bytes(i & 1 for i in range(256))


# --- one process ---


def disk_read_bytes(pid: int) -> int | None:
    """Bytes that the kernel had the disk read for a process so far, page faults and read-ahead included."""
    return proc.field(Path(f"/proc/{pid}/io"), "read_bytes")


def first_to_go(pid: int) -> None:
    """Where memory runs out, let the kernel end this process and no other one."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def vram_used_bytes() -> int | None:
    """Memory in use on all GPUs, whoever uses it, as nvidia-smi says; None without one."""
    used = [row[0] for row in nvidia_smi.ask("memory.used", timeout_s=10).rows]
    return sum(map(int, used)) << 20 if used and all(n.isdigit() for n in used) else None


class Watch:
    """Looks at the memory of a process several times a second, until closed.

    Attributes:
        vram_before: of all GPUs, before the process was started; None: no GPU.
        peak_anon_bytes: the most of its own memory, without mapped files.
        peak_vram_bytes: the most beyond ``vram_before``, which others on the GPU may have used.
    """

    def __init__(self, pid: int, vram_before: int | None) -> None:
        self.pid = pid
        self.vram_before = vram_before
        self.peak_anon_bytes: int | None = None
        self.peak_vram_bytes: int | None = None
        self._peak_rss_bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moestream-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SAMPLE_EVERY_S):
            self.look()

    def look(self) -> None:
        """Look now."""
        status = Path(f"/proc/{self.pid}/status")
        rss, anon = proc.field(status, "VmHWM"), proc.field(status, "RssAnon")
        if rss is not None:
            self._peak_rss_bytes = max(self._peak_rss_bytes or 0, rss * 1024)
        if anon is not None:
            self.peak_anon_bytes = max(self.peak_anon_bytes or 0, anon * 1024)
        if self.vram_before is not None and (used := vram_used_bytes()) is not None:
            self.peak_vram_bytes = max(self.peak_vram_bytes or 0, used - self.vram_before)

    @property
    def peak_rss_bytes(self) -> int | None:
        """The most of memory that was its own or mapped, since it was started; the kernel keeps count."""
        return self._peak_rss_bytes

    def close(self) -> None:
        self._end.set()
        self._thread.join()


# --- what may disturb ---


@dataclass(frozen=True)
class Cpu:
    """Processor time so far, in seconds: of all cores together, of one process, and what the host took."""

    busy_s: float
    total_s: float
    steal_s: float
    process_s: float

    @classmethod
    def now(cls, pid: int) -> Cpu | None:
        try:
            times = psutil.cpu_times()
            own = psutil.Process(pid).cpu_times()
        except (psutil.Error, OSError):
            return None
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(total - idle, total, getattr(times, "steal", 0.0), own.user + own.system)

    def others_since(self, before: Cpu) -> float | None:
        """The share of all cores that others than the process have used since then; None: too short to say."""
        total = self.total_s - before.total_s
        if total < 0.2:
            return None
        others = (self.busy_s - before.busy_s) - (self.process_s - before.process_s)
        return min(1.0, max(0.0, others / total))


@dataclass(frozen=True)
class Conditions:
    """The state of the machine at one moment. Counters run from boot; None: not known.

    Attributes:
        load: average of the last minute.
        busy: other processes that use a core for more than BUSY_SHARE of the time: name, pid, share of one core.
        swapped_bytes: moved between memory and swap so far.
        throttles: times that the cgroup of this process was held back for its processor time.
        oom_kills: processes that the kernel has ended for want of memory.
        cpu_quota: cores that the cgroup allows; None: all.
        memory_limit_bytes: of the cgroup; None: none.
    """

    n_core: int
    load: float | None = None
    busy: tuple[tuple[str, int, float], ...] = ()
    swap_used_bytes: int | None = None
    swapped_bytes: int | None = None
    throttles: int | None = None
    oom_kills: int | None = None
    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None


def conditions(look_s: float = LOOK_S, sleep: Callable[[float], None] = time.sleep) -> Conditions:
    """Look at the machine.

    Args:
        look_s: for so long it is watched who is busy; 0: not at all.
    """
    swap = None
    with contextlib.suppress(psutil.Error, OSError, RuntimeError, ValueError):
        swap = psutil.swap_memory()
    return Conditions(
        n_core=os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        busy=_busy(look_s, sleep) if look_s > 0 else (),
        swap_used_bytes=swap.used if swap else None,
        swapped_bytes=swap.sin + swap.sout if swap else None,
        throttles=proc.throttles(),
        oom_kills=proc.field(Path("/proc/vmstat"), "oom_kill"),
        cpu_quota=proc.cpu_quota(),
        memory_limit_bytes=min((limit.limit_bytes for limit in proc.memory_limits()), default=None),
    )


def _busy(look_s: float, sleep: Callable[[float], None]) -> tuple[tuple[str, int, float], ...]:
    before: dict[int, tuple[psutil.Process, float]] = {}
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            before[process.pid] = (process, times.user + times.system)
    begun = time.monotonic()
    sleep(look_s)
    took = max(time.monotonic() - begun, 1e-3)
    found = []
    for pid, (process, used) in before.items():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            share = (times.user + times.system - used) / took
            if share > BUSY_SHARE and pid not in own:
                found.append((process.name(), pid, share))
    return tuple(sorted(found, key=lambda one: -one[2])[:5])


@dataclass
class Seen:
    """What was noticed during the runs.

    Attributes:
        warm_starts: runs that should have been cold, and how much of the model was in the page cache.
        others: shares of all cores that others used during the runs.
    """

    warm_starts: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


def disturbances(before: Conditions, after: Conditions, seen: Seen) -> list[str]:
    """What may have disturbed the runs between two moments, a line each. Pure."""
    lines = []
    cores = f"{before.n_core} core{'' if before.n_core == 1 else 's'}"
    if before.load is not None and before.load > 0.25 * before.n_core:
        lines.append(f"the load average was {before.load:.2f} on {cores} at the start")
    for name, pid, share in before.busy:
        lines.append(f"{name} (pid {pid}) used {share:.0%} of a core at the start")
    if seen.others and max(seen.others) > BUSY_SHARE:
        n_runs = sum(share > BUSY_SHARE for share in seen.others)
        lines.append(
            f"other processes used up to {max(seen.others):.0%} of all cores, and more than {BUSY_SHARE:.0%} in {n_runs} of {len(seen.others)} runs"
        )
    if before.swapped_bytes is not None and after.swapped_bytes is not None and after.swapped_bytes > before.swapped_bytes:
        lines.append(f"{(after.swapped_bytes - before.swapped_bytes) / 2**20:.1f} MiB went to or came from swap")
    if before.cpu_quota is not None and before.cpu_quota < before.n_core:
        lines.append(f"the cgroup allows {before.cpu_quota:g} of {cores}")
    if before.throttles is not None and after.throttles is not None and after.throttles > before.throttles:
        lines.append(f"the cgroup was held back {after.throttles - before.throttles} times for its processor time")
    if before.oom_kills is not None and after.oom_kills is not None and (n := after.oom_kills - before.oom_kills) > 0:
        lines.append(f"the kernel ended {n} process{'' if n == 1 else 'es'} for want of memory")
    if seen.warm_starts:
        lines.append(
            f"{len(seen.warm_starts)} cold runs were not cold: up to {max(seen.warm_starts):.0%} of the model stayed in the page cache "
            "(another process has it open?)"
        )
    return lines
