"""State files: how ``stop``, ``status`` and ``logs`` find a server, and how a reused pid is told from ours.

One file for each port, ``STATE/servers/PORT.json``, schema ``moestream/server-record/1``. Only the supervisor
that claimed a file changes it, and files appear and change atomically. A file may outlive its processes (power
cut, kill -9): readers never trust it before they have compared each process with what was recorded of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from moestream import paths
from moestream.errors import MoestreamError

SCHEMA = "moestream/server-record/1"
RECORDED, SKIP = ".recorded", ".skip"
_BY_HAND = "look at it and remove it by hand"


@dataclass(frozen=True)
class ProcessMark:
    """A process, recognisable after its pid was reused.

    Attributes:
        pid: process id.
        created_s: create time, seconds since the epoch; for showing only where ``token`` is exact.
        token: on Linux boot id and start tick, which a change of the clock does not move; elsewhere the create time.
        cmdline: what its command line ends with.
    """

    pid: int
    created_s: float
    token: str
    cmdline: tuple[str, ...]

    @classmethod
    def of(cls, pid: int, cmdline: Sequence[str] | None = None) -> ProcessMark:
        """Mark a running process.

        Args:
            pid: of a process that is known to run, for example an own child.
            cmdline: what its command line ends, or will end, with; default as it is now.

        Raises:
            psutil.Error: there is no such process.
        """
        process = psutil.Process(pid)
        line = process.cmdline() if cmdline is None else cmdline
        return cls(pid, process.create_time(), _token(process), tuple(line))

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie does not run."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE or _token(process) != self.token:
                return False
            now = process.cmdline()
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return False  # another user's: not one we started
        return tuple(now[len(now) - len(self.cmdline) :]) == self.cmdline

    def send(self, number: int, *, group: bool = False) -> bool:
        """Signal this process, and nothing that has its pid now.

        Args:
            number: the signal.
            group: signal the process group it leads as well.

        Returns:
            False when it does not run any more.
        """
        if hasattr(os, "pidfd_open"):
            try:
                fd = os.pidfd_open(self.pid)  # from here on the pid cannot change its meaning unnoticed
            except ProcessLookupError:
                return False
            except OSError:  # an old kernel, or a sandbox without pidfd
                fd = -1
        else:
            fd = -1
        try:
            if not self.alive():
                return False
            with contextlib.suppress(ProcessLookupError):
                if group:
                    os.killpg(self.pid, number)
                elif fd >= 0:
                    signal.pidfd_send_signal(fd, number)
                else:
                    os.kill(self.pid, number)
            return True
        finally:
            if fd >= 0:
                os.close(fd)


def _token(process: psutil.Process) -> str:
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            # The name in parentheses may contain anything; what follows starts with field 3.
            ticks = stat.rpartition(")")[2].split()[22 - 3]
            boot = _boot_id()
        except (OSError, IndexError) as error:
            raise psutil.NoSuchProcess(process.pid) from error
        return f"{boot}:{ticks}"
    return f"{process.create_time():.3f}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class ServerRecord:
    """What is known of one server. See the module for who writes it.

    Attributes:
        port, host: where it listens.
        url: how to reach it from this machine, without a trailing slash.
        state: a value of ``process.State``.
        supervisor: the process that watches it: ``moestream start`` itself, or a detached one.
        server: the llama-server, None before it was forked.
        detached: whether it runs in the background.
        engine_id, backend: which build it is.
        model: the file it serves.
        slots: as asked for: a number, ``auto``, ``all``, ``off``.
        argv: of llama-server. May hold an API key; the file is readable by its owner alone.
        api_key: for asking the server; None where it needs none.
        log_path: what the server printed.
        started_s, ready_s, ended_s: seconds since the epoch; None for not yet.
        ended: how it ended, empty while it runs. Kept for servers in the background, so that ``status`` can tell.
        kept_map: where the router map of its model is kept; None: neither used nor added to.
        available_bytes: memory that there was for it when it was planned; None where nothing was planned.
        outcome: a value of ``process.Outcome`` when it ended because it was asked to. Kept for ``stop``.
    """

    port: int
    host: str
    url: str
    state: str
    supervisor: ProcessMark
    server: ProcessMark | None
    detached: bool
    engine_id: str
    backend: str
    model: str
    slots: str
    argv: tuple[str, ...]
    log_path: str
    started_s: float
    ready_s: float | None = None
    ended_s: float | None = None
    ended: str = ""
    outcome: str = ""
    kept_map: str | None = None
    available_bytes: int | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def server_alive(self) -> bool:
        return self.server is not None and self.server.alive()

    @property
    def alive(self) -> bool:
        """Whether anything of it still runs."""
        return self.supervisor.alive() or self.server_alive

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ServerRecord:
        """Read a record back.

        Raises:
            ValueError: it is no record of this schema.
        """
        raw: Any = json.loads(text)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        try:
            known = {f.name for f in fields(cls)}
            values = {k: v for k, v in raw.items() if k in known}
            values["supervisor"] = _mark(raw["supervisor"])
            values["server"] = None if raw["server"] is None else _mark(raw["server"])
            values["argv"] = tuple(str(a) for a in raw["argv"])
            record = cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"incomplete record: {error}") from error
        for name, types in _TYPES.items():
            if not isinstance(getattr(record, name), types):
                raise ValueError(f"incomplete record: {name}")
        return record


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("host", "url", "state", "engine_id", "backend", "model", "slots", "log_path", "ended", "outcome"), str),
    "port": int,
    "started_s": int | float,
    "ready_s": int | float | None,
    "ended_s": int | float | None,
    "kept_map": str | None,
    "available_bytes": int | None,
    "api_key": str | None,
}


def _mark(raw: dict[str, Any]) -> ProcessMark:
    pid = int(raw["pid"])
    if not 0 < pid < 2**31:
        raise ValueError(f"incomplete record: pid {pid}")
    return ProcessMark(pid, float(raw["created_s"]), str(raw["token"]), tuple(map(str, raw["cmdline"])))


@dataclass(frozen=True)
class BrokenRecord:
    """A file in the place of a record that cannot be read as one."""

    port: int
    path: Path
    reason: str


class RecordStore:
    """The folder of state files.

    Args:
        folder: default ``STATE/servers``. Created when something is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or paths.state_dir() / "servers"

    def path(self, port: int) -> Path:
        return self.folder / f"{port}.json"

    def log_path(self, port: int) -> Path:
        return self.folder / f"{port}.log"

    def map_path(self, port: int) -> Path:
        """The router map that a server was started with, where it is the kept one."""
        return self.folder / f"{port}.map"

    def trace_path(self, port: int) -> Path:
        """What a server records while it runs."""
        return self.folder / f"{port}.trace"

    def skip_path(self, port: int) -> Path:
        """Which tokens of what a server records are not to be kept."""
        return self.folder / f"{port}{SKIP}"

    def recorded(self) -> list[Path]:
        """Traces that are complete and were not added to a kept map yet, the oldest first."""
        return sorted((p for p in self.folder.glob(f"*{RECORDED}") if p.is_file()), key=lambda path: path.name)

    def ports_with_traces(self) -> list[int]:
        found = (p for p in self.folder.glob("*.trace") if p.stem.isascii() and p.stem.isdigit())
        return sorted(int(p.stem) for p in found if p.is_file())

    def put_aside_trace(self, port: int, *, ours: bool = False) -> Path | None:
        """Give the trace of a server that has ended a name of its own, so that the next one on its port begins another.

        Args:
            ours: whether the caller is the supervisor of that server, which still counts as running. Else the trace of a server that
                runs is left alone: its record was there before the trace.

        Returns:
            the new path; None where there is nothing to put aside.

        Raises:
            MoestreamError: the folder cannot be written.
        """
        path = self.trace_path(port)
        with self._locked(), _state_errors(path):
            if not ours:
                record = self.read(port)
                if isinstance(record, ServerRecord) and record.alive:
                    return None
                _unlink(self.map_path(port))
            aside = self.folder / f"{time.time_ns()}-{port}{RECORDED}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.skip_path(port), aside.with_suffix(SKIP))
            try:
                os.replace(path, aside)
            except FileNotFoundError:
                aside.with_suffix(SKIP).unlink(missing_ok=True)
                return None
            return aside

    def _wanted_path(self, port: int) -> Path:
        return self.folder / f"{port}.stop"

    def read(self, port: int) -> ServerRecord | BrokenRecord | None:
        """The record of a port, None where there is none."""
        path = self.path(port)
        try:
            record = ServerRecord.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            return BrokenRecord(port, path, error.strerror or str(error))
        except (ValueError, RecursionError) as error:
            return BrokenRecord(port, path, str(error))
        if record.port != port:
            return BrokenRecord(port, path, f"the record of another port, {record.port}")
        return record

    def all(self) -> Iterator[ServerRecord | BrokenRecord]:
        """All records, by port."""
        ports = {int(p.stem) for p in self.folder.glob("*.json") if p.stem.isascii() and p.stem.isdigit()}
        for port in sorted(ports):
            record = self.read(port)
            if record is not None:
                yield record

    def claim(self, record: ServerRecord) -> None:
        """Write the first record of a server.

        Raises:
            MoestreamError: a server that still runs has claimed this port, or the folder cannot be written.
        """
        with self._locked():
            other = self.read(record.port)
            if not (isinstance(other, ServerRecord) and other.alive):
                _unlink(self._wanted_path(record.port))
                self._write(record)
                return
        raise MoestreamError(
            f"port {record.port} belongs to a server that moestream has already started",
            hint=f"see moestream status, or stop it with: moestream stop --port {record.port}",
        )

    def update(self, record: ServerRecord) -> None:
        """Replace the record of a server by a newer one of the same supervisor."""
        with self._locked():
            if self._owned(record):
                self._write(record)

    def remove(self, record: ServerRecord) -> None:
        """Take the record away, unless another supervisor has claimed the port since."""
        with self._locked():
            if self._owned(record):
                _unlink(self.path(record.port))

    def want_end(self, port: int) -> None:
        """Let the record of the server that ends next on this port stay, for ``stop`` to read how it ended."""
        with contextlib.suppress(MoestreamError, OSError), self._locked():  # a full disk must not keep it from ending
            self._wanted_path(port).touch(mode=0o600)

    def finish(self, record: ServerRecord) -> None:
        """The last record of a server: taken away like ``remove``, unless ``want_end`` asked for it."""
        with self._locked():
            if not self._owned(record):
                return
            if self._wanted_path(record.port).exists():
                self._write(record)
            else:
                _unlink(self.path(record.port))

    def remove_stale(self, port: int) -> bool:
        """Take away what lies in the place of a record, unless something of it runs. Returns whether it is away.

        Raises:
            MoestreamError: it cannot be taken away, for example a folder.
        """
        with self._locked():
            current = self.read(port)
            if isinstance(current, ServerRecord) and current.alive:
                return False
            _unlink(self.path(port))
            _unlink(self._wanted_path(port))
            return True

    def limit_logs(self, keep: int) -> None:
        """Remove the logs of servers that have no record any more, but for the newest ``keep``.

        With ``--port 0`` each start has a log of its own, which nothing would ever replace.
        """
        with contextlib.suppress(MoestreamError, OSError), self._locked():
            ports = {p.name.split(".")[0] for p in (*self.folder.glob("*.log"), *self.folder.glob("*.log.1"))}
            logs = [
                [p for p in (self.log_path(port), self.folder / f"{port}.log.1") if p.exists()]
                for port in map(int, filter(lambda name: name.isascii() and name.isdigit(), ports))
                if not self.path(port).exists()
            ]
            logs.sort(key=lambda files: max(p.stat().st_mtime for p in files), reverse=True)
            for path in (p for files in logs[keep:] for p in files):
                path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Look and change in one step: without it, two starts that find a stale record replace each other's."""
        with _state_errors(self.folder):
            make_private(self.folder)
            lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _owned(self, record: ServerRecord) -> bool:
        current = self.read(record.port)
        return isinstance(current, ServerRecord) and current.supervisor == record.supervisor

    def _write(self, record: ServerRecord) -> None:
        path = self.path(record.port)
        with _state_errors(path):
            fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=self.folder)  # mode 0600
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    file.write(record.to_json() + "\n")
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise


@contextlib.contextmanager
def _state_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        in_the_way = isinstance(error, IsADirectoryError)
        raise MoestreamError(
            f"cannot write {path}: {error.strerror or error}",
            hint=_BY_HAND if in_the_way else "set MOESTREAM_HOME to a folder that can be written",
        ) from error


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise MoestreamError(f"cannot remove {path}: {error.strerror or error}", hint=_BY_HAND) from error


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can read: logs hold prompts, records may hold a key."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def fresh_log(path: Path) -> None:
    """Start a log; the one before is kept as ``….log.1``.

    Raises:
        MoestreamError: the folder cannot be written.
    """
    with _state_errors(path):
        make_private(path.parent)
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, path.with_name(path.name + ".1"))
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))


def limit_log(path: Path, max_bytes: int) -> bool:
    """Copy a log that has become too long to ``….log.1`` and start it again. Returns whether it was too long.

    The server keeps the file open for appending, so it must stay the same file. What is printed between the copy
    and the cut is lost.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)
    except OSError:
        return False  # no space for the copy: try again later
    return True


def tail(path: Path, n_lines: int, max_bytes: int = 64 * 1024) -> list[str]:
    """The last lines of a log, without reading all of it. A missing log has none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if size > max_bytes:
        lines = lines[1:]  # probably cut
    return lines[-n_lines:] if n_lines else []
