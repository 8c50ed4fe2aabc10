"""The state machine of one llama-server process.

States and every transition::

    NEW ──► STARTING ──► LOADING ──► READY
              │   └─────────────────►│ │
              │            │           │
              ├────────────┴───────────┴──► STOPPING ──► EXITED
              └────────────┴───────────┴───────────────► EXITED

NEW       nothing runs yet
STARTING  the process runs, nobody listens on its port
LOADING   it listens and answers 503
READY     GET /health said so, and it was this process that answered
STOPPING  it was asked to end (by the user, or because it was not ready in time)
EXITED    it was reaped; ``Snapshot.exit`` says how. Final.

One writer: a thread of the object's own forks the process, probes it, moves the state and reaps it. Others
send requests through a queue (safe in signal handlers) and read immutable snapshots. The same thread must
fork and reap: on Linux the kernel ties the child's parent-death signal to the thread that forked it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestream.server.client import Health
from moestream.server.records import limit_log

GUARD = Path(__file__).with_name("guard.py")
GUARD_MODE = "pdeathsig" if sys.platform == "linux" else "pipe"

POLL_S = 0.1  # how soon a death is noticed
PROBE_EVERY_S = 0.2
LOG_LOOK_EVERY_S = 10.0
# After one SIGTERM llama-server computes no more, and then may wait for ever for the requests in flight; a second one
# makes it exit(1) at once: signal_handler in upstream's tools/server/server.cpp.
STOP_AGAIN_S = 3.0


class State(enum.Enum):
    NEW = "new"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"


_ALLOWED: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.STARTING, State.EXITED}),
    State.STARTING: frozenset({State.LOADING, State.READY, State.STOPPING, State.EXITED}),
    State.LOADING: frozenset({State.READY, State.STOPPING, State.EXITED}),
    State.READY: frozenset({State.STOPPING, State.EXITED}),
    State.STOPPING: frozenset({State.EXITED}),
    State.EXITED: frozenset(),
}


class Cause(enum.Enum):
    """Why a process is no more."""

    DIED = "died"  # by itself
    STOPPED = "stopped"  # it was asked to
    NOT_READY = "not-ready"  # it took longer than it was given, and was ended
    WRONG_PORT = "wrong-port"  # another process answers on its port
    NOT_STARTED = "not-started"  # fork or exec of the guard failed


class Outcome(enum.StrEnum):
    """How a process that was asked to end did so."""

    STOPPED = "stopped"  # on the first SIGTERM
    TERMINATED = "terminated while busy"  # on the second one: answers in flight were cut off
    KILLED = "killed"  # by SIGKILL


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        cause: see :class:`Cause`.
        code: exit code, None when a signal ended it.
        signal: number of the signal that ended it, None when it exited.
        forced: whether it ignored SIGTERM for the grace period and got SIGKILL.
        message: for ``NOT_STARTED``: the error of the system.
        insisted: whether it got SIGTERM a second time.
    """

    cause: Cause
    code: int | None = None
    signal: int | None = None
    forced: bool = False
    message: str = ""
    insisted: bool = False

    @property
    def outcome(self) -> Outcome:
        """What became of the request to end."""
        if self.forced and self.signal == signal.SIGKILL:
            return Outcome.KILLED
        # llama-server never exits with 0 on a second SIGTERM: with 0 it was faster than that.
        return Outcome.TERMINATED if self.insisted and self.code != 0 else Outcome.STOPPED

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"signal {self.signal} ({signal.Signals(self.signal).name})"
            except ValueError:
                return f"signal {self.signal}"
        return self.message if self.code is None else f"exit code {self.code}"


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment. ``pid`` is the process group too."""

    state: State = State.NEW
    pid: int | None = None
    health: Health | None = None
    exit: Exit | None = None

    @property
    def settled(self) -> bool:
        """Ready, or never going to be."""
        return self.state in (State.READY, State.EXITED)


class _Request(enum.Enum):
    STOP = enum.auto()
    KILL = enum.auto()


class ServerProcess:
    """One llama-server, from fork to reaping.

    Args:
        argv: program (an absolute path) and arguments.
        log_path: gets its output, appended; the server writes the file itself, so nothing it prints can
            block it and nothing is lost when we go.
        probe: asks GET /health once; must return within about a second.
        is_ours: says of a pid whether the one who answers on the port is this process; None for unknown.
        ready_timeout_s: ends a process that is not ready in this time; 0 for never.
        stop_grace_s: time between the first SIGTERM and SIGKILL.
        stop_again_s: time between the first and the second SIGTERM, which is sent when that is before SIGKILL.
        max_log_bytes: a longer log is moved aside.
        on_change: called with each new snapshot, in the thread of this object, before others see it.
        guard: ``pdeathsig`` or ``pipe``, see ``guard.py``; default by system.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        probe: Callable[[], Health],
        is_ours: Callable[[int], bool | None] = lambda _pid: None,
        ready_timeout_s: float = 0.0,
        stop_grace_s: float = 10.0,
        stop_again_s: float = STOP_AGAIN_S,
        max_log_bytes: int = 64 << 20,
        on_change: Callable[[Snapshot], None] = lambda _snapshot: None,
        guard: str | None = None,
    ) -> None:
        self._argv = list(argv)
        self._log_path = log_path
        self._probe = probe
        self._is_ours = is_ours
        self._ready_timeout_s = ready_timeout_s
        self._stop_grace_s = stop_grace_s
        self._stop_again_s = stop_again_s
        self._max_log_bytes = max_log_bytes
        self._on_change = on_change
        self._guard = guard or GUARD_MODE
        # SimpleQueue.put is reentrant: a signal handler may call it whatever it interrupted.
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._snapshot = Snapshot()
        self._thread = threading.Thread(target=self._run, name="moestream-server", daemon=True)
        self._lifeline: int | None = None  # our end of the guard's pipe

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def start(self, argv: Sequence[str] | None = None) -> None:
        """Fork the server. Returns at once; failures arrive as the state ``EXITED``.

        Args:
            argv: instead of that of the constructor.
        """
        if argv is not None:
            self._argv = list(argv)
        self._thread.start()

    def request_stop(self) -> None:
        """Ask it to end: SIGTERM, again after some seconds, SIGKILL after the grace period. A second request kills at once.

        Safe in a signal handler.
        """
        self._requests.put(_Request.STOP)

    def request_kill(self) -> None:
        """SIGKILL without grace. Safe in a signal handler."""
        self._requests.put(_Request.KILL)

    def wait(self, until: Callable[[Snapshot], bool], timeout_s: float | None = None) -> Snapshot:
        """Wait until a snapshot satisfies ``until``, the process has exited, or the time is over.

        Returns:
            the newest snapshot; on timeout one that does not satisfy ``until``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not until(self._snapshot) and self._snapshot.state is not State.EXITED:
                # A bounded wait, so that signal handlers of the main thread get their turn.
                left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._snapshot

    # What follows runs in the object's own thread.

    def _publish(self, **changes: object) -> None:
        new = replace(self._snapshot, **changes)  # type: ignore[arg-type]
        if new == self._snapshot:
            return
        if new.state is not self._snapshot.state:
            assert new.state in _ALLOWED[self._snapshot.state], (self._snapshot.state, new.state)
        self._on_change(new)
        with self._changed:
            self._snapshot = new
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            process = self._fork()
        except OSError as error:
            self._publish(state=State.EXITED, exit=Exit(Cause.NOT_STARTED, message=str(error)))
            return
        try:
            self._publish(state=State.STARTING, pid=process.pid)
            self._supervise(process)
        finally:
            if process.poll() is None:  # only after a bug above: leave no server without its supervisor
                self._signal(process, signal.SIGKILL)
                process.wait()
            if self._lifeline is not None:
                os.close(self._lifeline)
            if self._snapshot.state is not State.EXITED:
                with self._changed:
                    self._snapshot = replace(
                        self._snapshot,
                        state=State.EXITED,
                        exit=Exit(Cause.DIED, message="its supervisor failed"),
                    )
                    self._changed.notify_all()

    def _fork(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", str(GUARD), self._guard]
        passed: tuple[int, ...] = ()
        if self._guard == "pipe":
            theirs, self._lifeline = os.pipe()
            passed = (theirs,)
            command.append(str(theirs))
        else:
            command.append(str(os.getpid()))
        try:
            with open(self._log_path, "ab") as log:
                return subprocess.Popen(
                    [*command, "--", *self._argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=passed,
                    # Ctrl-C in the terminal must reach us alone: a second signal makes llama-server give up at once.
                    start_new_session=True,
                )
        finally:
            for fd in passed:
                os.close(fd)

    def _supervise(self, process: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        next_probe = 0.0
        next_log_look = started + LOG_LOOK_EVERY_S
        kill_at: float | None = None
        insist_at: float | None = None
        cause = Cause.DIED
        forced = insisted = False

        while True:
            try:
                request = self._requests.get(timeout=POLL_S)
            except queue.Empty:
                request = None
            returncode = process.poll()
            if returncode is not None:
                by_signal = returncode < 0
                self._publish(
                    state=State.EXITED,
                    exit=Exit(
                        cause,
                        code=None if by_signal else returncode,
                        signal=-returncode if by_signal else None,
                        forced=forced,
                        insisted=insisted,
                    ),
                )
                return

            now = time.monotonic()
            if request is not None and self._snapshot.state is not State.STOPPING:
                cause = Cause.STOPPED
                kill_at = self._begin_stop(process, now if request is _Request.KILL else now + self._stop_grace_s)
            elif request is not None:
                kill_at = now
            elif self._snapshot.state in (State.STARTING, State.LOADING):
                if now >= next_probe:
                    failure = self._look(process.pid)
                    next_probe = time.monotonic() + PROBE_EVERY_S
                    if failure is not None:
                        cause = failure
                        kill_at = self._begin_stop(process, now + self._stop_grace_s)
                        continue
                if self._ready_timeout_s and now - started >= self._ready_timeout_s and not self._snapshot.settled:
                    cause = Cause.NOT_READY
                    kill_at = self._begin_stop(process, now + self._stop_grace_s)
            if now >= next_log_look:
                next_log_look = now + LOG_LOOK_EVERY_S
                limit_log(self._log_path, self._max_log_bytes)
            if kill_at is None or forced:
                continue
            insist_at = now + self._stop_again_s if insist_at is None else insist_at
            if now >= kill_at:
                forced = True
                self._signal(process, signal.SIGKILL)
            elif now >= insist_at and not insisted:
                insisted = True
                self._signal(process, signal.SIGTERM)

    def _look(self, pid: int) -> Cause | None:
        """Probe once and move on. Returns a cause to end the process for."""
        health = self._probe()
        if health is Health.READY:
            # Another program may have taken the port after it was found free. Ours is about to die of that.
            if self._is_ours(pid) is False:
                return Cause.WRONG_PORT
            self._publish(state=State.READY, health=health)
        elif health is Health.LOADING and self._snapshot.state is State.STARTING:
            self._publish(state=State.LOADING, health=health)
        else:
            self._publish(health=health)
        return None

    def _begin_stop(self, process: subprocess.Popen[bytes], kill_at: float) -> float:
        self._publish(state=State.STOPPING)
        self._signal(process, signal.SIGTERM)
        return kill_at

    def _signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Signal the server; SIGKILL goes to its whole group, which it leads. It is not reaped yet: the pid is its."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)


@contextlib.contextmanager
def guarded(argv: Sequence[str], guard: str = GUARD_MODE, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is killed at the end of the block, and when this process goes, however it goes. Signals of the terminal do not
    reach it.

    Args:
        guard: as of :class:`ServerProcess`. The calling thread must outlive the block.
        how: what ``subprocess.Popen`` takes.
    """
    theirs, ours = os.pipe()
    command = [sys.executable, "-I", "-S", str(GUARD), guard, str(theirs if guard == "pipe" else os.getpid())]
    try:
        process = subprocess.Popen(
            [*command, "--", *argv], pass_fds=(theirs,) * (guard == "pipe"), start_new_session=True, **how
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process
    finally:
        os.close(ours)  # a guard that stays kills its program then
        if guard == "pipe":
            process.wait()
        elif process.poll() is None:
            process.kill()
            process.wait()
