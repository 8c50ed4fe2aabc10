"""A capped box for one process: memory by cgroup (v1 or v2), disk speed, read-ahead, a cold page cache; and what it used.

Everything that is changed on the machine (cgroups, the read-ahead of the disk) is undone when the ``with`` block ends: on
failure, on Ctrl-C and on SIGTERM too, see :func:`signals_as_exceptions`. Root is needed, and Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moestream.errors import MoestreamError

CGROUP_ROOT = Path("/sys/fs/cgroup")
USUAL_READ_AHEAD_KIB = 128


# --- cgroups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CgroupLayout:
    """Where the memory and block-I/O controllers are.

    Attributes:
        version: 1 or 2.
        memory, io: folders in which groups can be made; ``io`` is None where there is no such controller.
    """

    version: int
    memory: Path
    io: Path | None


def cgroup_layout(mounts: str, root: Path = CGROUP_ROOT, controllers: str | None = None) -> CgroupLayout:
    """Find the controllers.

    Args:
        mounts: the text of /proc/mounts.
        root: where version 2 is mounted, if it is.
        controllers: the text of version 2's cgroup.controllers; read from ``root`` when None.

    Raises:
        MoestreamError: no memory controller.
    """
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        if fields[2] == "cgroup":
            for option in fields[3].split(","):
                v1.setdefault(option, Path(fields[1]))
        elif fields[2] == "cgroup2":
            v2 = Path(fields[1])
    # A hybrid system mounts version 2 without controllers beside version 1.
    if "memory" in v1:
        return CgroupLayout(1, v1["memory"], v1.get("blkio"))
    if v2 is not None:
        if controllers is None:
            try:
                controllers = (v2 / "cgroup.controllers").read_text()
            except OSError:
                controllers = ""
        if "memory" in controllers.split():
            return CgroupLayout(2, v2, v2 if "io" in controllers.split() else None)
    raise MoestreamError("no cgroup memory controller on this machine", hint="boot with cgroup_enable=memory")


class Cgroup:
    """A group of its own for one measured process; made on entry, removed on exit.

    Args:
        memory_bytes: cap of everything, page cache included; None for no cap.
        disk_bytes_per_s: read limit on ``device`` ("MAJOR:MINOR"); None for none.
    """

    def __init__(
        self, layout: CgroupLayout, memory_bytes: int | None, disk_bytes_per_s: int | None = None, device: str | None = None
    ) -> None:
        self.layout = layout
        self.memory_bytes = memory_bytes
        self.disk_bytes_per_s = disk_bytes_per_s
        self.device = device
        name = f"moestream-bench-{os.getpid()}"
        self.memory = layout.memory / name
        self.io = layout.io / name if layout.io else None
        if disk_bytes_per_s and not self.io:
            raise MoestreamError("no cgroup block-I/O controller: the disk cannot be throttled", hint="leave out --disk-mb-s")

    def settings(self) -> list[tuple[Path, str]]:
        """The files to write and what; pure."""
        out: list[tuple[Path, str]] = []
        limit = self.memory_bytes
        if self.layout.version == 1:
            if limit:
                out.append((self.memory / "memory.limit_in_bytes", str(limit)))
                out.append((self.memory / "memory.swappiness", "0"))
            if self.disk_bytes_per_s and self.io:
                out.append((self.io / "blkio.throttle.read_bps_device", f"{self.device} {self.disk_bytes_per_s}"))
        else:
            if limit:
                out.append((self.memory / "memory.max", str(limit)))
                out.append((self.memory / "memory.swap.max", "0"))
            if self.disk_bytes_per_s and self.io:
                out.append((self.io / "io.max", f"{self.device} rbps={self.disk_bytes_per_s}"))
        return out

    @property
    def folders(self) -> list[Path]:
        return [self.memory] if self.io in (None, self.memory) else [self.memory, self.io]

    @property
    def peak_file(self) -> Path:
        return self.memory / ("memory.max_usage_in_bytes" if self.layout.version == 1 else "memory.peak")

    def __enter__(self) -> Cgroup:
        try:
            if self.layout.version == 2:
                for controller in ("+memory", "+io") if self.layout.io else ("+memory",):
                    (self.layout.memory / "cgroup.subtree_control").write_text(controller)
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            for file, value in self.settings():
                if not file.exists() and "swap" in file.name:
                    continue  # built without swap accounting: nothing to forbid
                file.write_text(value)
        except OSError as e:
            self.__exit__()
            raise MoestreamError(
                f"cannot set up the cgroup {self.memory}: {e.strerror} ({e.filename})", hint="run as root, outside a container"
            ) from e
        return self

    def __exit__(self, *_: object) -> None:
        for folder in self.folders:
            for _attempt in range(50):  # a group is busy for a moment after its last process
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.1)

    def join(self) -> None:
        """Move the calling process in; called in the child, between fork and exec."""
        for folder in self.folders:
            with open(folder / "cgroup.procs", "w") as f:
                f.write(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """The most the group ever had, page cache included; None on kernels that do not say."""
        try:
            return int(self.peak_file.read_text())
        except (OSError, ValueError):
            return None


# --- the disk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """The block device that a file lies on.

    Attributes:
        device: ``MAJOR:MINOR`` of the whole disk, which is what the throttles want.
        queue: its folder of settings in /sys.
    """

    device: str
    queue: Path


def disk_of(path: Path, sys_dev: Path = Path("/sys/dev/block")) -> Disk:
    """The disk below a file; a partition's disk where it lies on one.

    Raises:
        MoestreamError: the file is not on a block device (tmpfs, overlay, network).
    """
    dev = path.stat().st_dev
    node = (sys_dev / f"{os.major(dev)}:{os.minor(dev)}").resolve()
    if not node.exists():
        raise MoestreamError(
            f"{path} does not lie on a block device ({os.major(dev)}:{os.minor(dev)})",
            hint="put the model on a local disk; for tmpfs, overlay and network file systems these figures mean nothing",
        )
    if (node / "partition").exists():
        node = node.parent
    return Disk((node / "dev").read_text().strip(), node / "queue")


@contextlib.contextmanager
def read_ahead(disk: Disk, kib: int | None) -> Iterator[int]:
    """Set the disk's read-ahead for the block and put the old value back; yields what is in force, in KiB."""
    file = disk.queue / "read_ahead_kb"
    before = file.read_text().strip()
    if kib is None:
        yield int(before)
        return
    try:
        file.write_text(str(kib))
    except OSError as e:
        raise MoestreamError(f"cannot set {file} to {kib}: {e.strerror}", hint="run as root, or --read-ahead-kib keep") from e
    try:
        yield int(file.read_text())
    finally:
        file.write_text(before)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore(2)."""
    size = path.stat().st_size
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    window = 4 << 30  # the answer takes a byte for each page
    with path.open("rb") as f:
        for at in range(0, size, window):
            length = min(window, size - at)
            # A private map may be writable, which ctypes needs to take its address; nothing is touched.
            with mmap.mmap(f.fileno(), length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=at) as m:
                n_page = -(-length // page)
                vec = (ctypes.c_ubyte * n_page)()
                view = ctypes.c_char.from_buffer(m)
                failed = libc.mincore(ctypes.addressof(view), length, vec)
                del view
                if failed:
                    raise OSError(ctypes.get_errno(), "mincore", str(path))
                total += int((np.frombuffer(vec, np.uint8) & 1).sum()) * page
    return min(total, size)


def drop_cache(files: tuple[Path, ...]) -> None:
    """Empty the page cache of these files, and of everything if the kernel holds on to theirs.

    Other programs' cache is left alone where possible: the machine may be shared.
    """
    for path in files:
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if sum(cached_bytes(p) for p in files) > 0.01 * sum(p.stat().st_size for p in files):
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError as e:
            raise MoestreamError(f"cannot empty the page cache: {e.strerror}", hint="run as root") from e


# --- one process -----------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """What a process used. Bytes; None where it could not be read."""

    peak_rss_bytes: int | None = None
    peak_anon_bytes: int | None = None
    peak_cgroup_bytes: int | None = None
    exit_code: int | None = None

    @property
    def killed(self) -> bool:
        """Ended by SIGKILL, which under a cap is the kernel's out-of-memory killer."""
        return self.exit_code == -signal.SIGKILL


def proc_io(text: str) -> dict[str, int]:
    """The fields of /proc/PID/io."""
    return {k: int(v) for k, _, v in (line.partition(": ") for line in text.splitlines()) if v}


def proc_status_kib(text: str, field: str) -> int | None:
    """One memory field of /proc/PID/status, in KiB."""
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return None


class Process:
    """A child in the box; its output arrives line by line, and its use of memory is sampled until it ends.

    Args:
        on_line: called with ("out" | "err", line) as soon as a line is there, from a reading thread.
    """

    def __init__(
        self,
        command: list[str],
        cgroup: Cgroup | None,
        on_line: Callable[[str, str], None] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.usage = Usage()
        self.err: list[str] = []
        self.out: list[str] = []
        self._cgroup = cgroup
        self._on_line = on_line
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            preexec_fn=cgroup.join if cgroup else None,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._read, args=("out", self.popen.stdout, self.out), daemon=True),
            threading.Thread(target=self._read, args=("err", self.popen.stderr, self.err), daemon=True),
            threading.Thread(target=self._sample, daemon=True),
        ]
        for t in self._threads:
            t.start()

    def _read(self, name: str, stream, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if self._on_line:
                self._on_line(name, lines[-1])

    def _sample(self) -> None:
        status = Path(f"/proc/{self.popen.pid}/status")
        while self.popen.poll() is None:
            try:
                text = status.read_text()
            except OSError:
                break
            hwm, anon = proc_status_kib(text, "VmHWM"), proc_status_kib(text, "RssAnon")
            if hwm:
                self.usage.peak_rss_bytes = max(self.usage.peak_rss_bytes or 0, hwm * 1024)
            if anon:
                self.usage.peak_anon_bytes = max(self.usage.peak_anon_bytes or 0, anon * 1024)
            time.sleep(0.1)

    def read_bytes(self) -> int | None:
        """Bytes the process had the disk read so far, page faults and read-ahead included; None once it has ended."""
        try:
            return proc_io(Path(f"/proc/{self.popen.pid}/io").read_text())["read_bytes"]
        except (OSError, KeyError):
            return None

    def wait(self, timeout_s: float | None = None) -> Usage:
        """Wait for the end.

        Raises:
            MoestreamError: it took longer than ``timeout_s``; it is killed then.
        """
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise MoestreamError(
                f"{Path(self.popen.args[0]).name} did not end within {timeout_s:.0f} s",
                hint="raise --timeout-s, or decode fewer tokens",
            ) from None
        finally:
            if self.popen.poll() is not None:
                for t in self._threads:
                    t.join(5)
        self.usage.exit_code = self.popen.returncode
        if self._cgroup:
            self.usage.peak_cgroup_bytes = self._cgroup.peak_bytes()
        return self.usage

    def kill(self) -> None:
        """End the child and what it started; ours is its process group, made with the session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.kill()


class Interrupted(BaseException):
    """A signal that ends the program, as an exception, so that what was changed is put back."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP raise, as SIGINT does; without it they would leave the read-ahead changed."""

    def raise_it(number: int, _frame: object) -> None:
        raise Interrupted(number)

    before = {s: signal.signal(s, raise_it) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except Interrupted as e:
        print(f"ended by {e}; settings of the machine restored", file=sys.stderr)
        raise SystemExit(128 + e.number) from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
