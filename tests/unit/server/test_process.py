"""The state machine with stand-ins for llama-server: shell one-liners and a made-up health."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moestream.server.client import Health
from moestream.server.process import Cause, Exit, Outcome, ServerProcess, Snapshot, State

DEADLINE_S = 20.0


class Run:
    """A process with a scripted health; the last answer is repeated."""

    def __init__(self, tmp_path: Path, script: str, *health: Health, **options: object) -> None:
        self.seen: list[State] = []
        self.threads: set[str] = set()
        self.answers = list(health) or [Health.REFUSED]
        self.log = tmp_path / "log"
        self.process = ServerProcess(
            ["/bin/sh", "-c", script], log_path=self.log, probe=self._probe, on_change=self._changed, **options
        )  # type: ignore[arg-type]

    def _probe(self) -> Health:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def _changed(self, snapshot: Snapshot) -> None:
        self.threads.add(threading.current_thread().name)
        if not self.seen or self.seen[-1] is not snapshot.state:
            self.seen.append(snapshot.state)

    def wait(self, until: Callable[[Snapshot], bool] = lambda s: False) -> Snapshot:
        snapshot = self.process.wait(until, DEADLINE_S)
        assert until(snapshot) or snapshot.state is State.EXITED, snapshot
        return snapshot

    def wait_until_up(self) -> None:
        """Ready, and far enough in its script to have set its traps and said so."""
        self.wait(lambda s: s.state is State.READY)
        while "up" not in (self.log.read_text() if self.log.exists() else ""):
            time.sleep(0.01)


@pytest.fixture(params=["pdeathsig", "pipe"])
def guard(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_life(tmp_path: Path, guard: str) -> None:
    run = Run(tmp_path, "echo hello; exec sleep 600", Health.REFUSED, Health.LOADING, Health.READY, guard=guard)
    assert run.process.snapshot == Snapshot()
    run.process.start()
    assert run.wait(lambda s: s.settled).state is State.READY
    run.process.request_stop()
    end = run.wait().exit
    assert end == Exit(Cause.STOPPED, signal=signal.SIGTERM)
    assert end.outcome is Outcome.STOPPED
    assert run.seen == [State.STARTING, State.LOADING, State.READY, State.STOPPING, State.EXITED]
    assert run.threads == {"moestream-server"}  # one writer
    assert run.log.read_text() == "hello\n"


def test_exit_code(tmp_path: Path, guard: str) -> None:
    run = Run(tmp_path, "exit 7", guard=guard)
    run.process.start()
    assert run.wait().exit == Exit(Cause.DIED, code=7)
    assert run.seen == [State.STARTING, State.EXITED]


def test_death_by_signal(tmp_path: Path, guard: str) -> None:
    run = Run(tmp_path, "kill -SEGV $$", Health.READY, guard=guard)
    run.process.start()
    end = run.wait().exit
    assert end == Exit(Cause.DIED, signal=signal.SIGSEGV)
    assert str(end) == "signal 11 (SIGSEGV)"


def test_grace_then_kill(tmp_path: Path, guard: str) -> None:
    run = Run(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.1; done", Health.READY, guard=guard, stop_grace_s=0.3)
    run.process.start()
    run.wait_until_up()
    run.process.request_stop()
    end = run.wait().exit
    assert end == Exit(Cause.STOPPED, signal=signal.SIGKILL, forced=True)
    assert end.outcome is Outcome.KILLED


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_sigterm_before_the_kill(tmp_path: Path, guard: str, times: int) -> None:
    """The stand-in ends on SIGTERM number ``times``, as llama-server does."""
    script = f"n=0; trap 'n=$((n+1)); [ $n = {times} ] && exit 1' TERM; echo up; while :; do sleep 0.05; done"
    run = Run(tmp_path, script, Health.READY, guard=guard, stop_again_s=0.5)
    run.process.start()
    run.wait_until_up()
    run.process.request_stop()
    end = run.wait().exit
    assert end == Exit(Cause.STOPPED, code=1, insisted=times == 2)
    assert end.outcome is (Outcome.STOPPED if times == 1 else Outcome.TERMINATED)


def test_outcomes() -> None:
    def outcome(**how: object) -> str:
        return Exit(Cause.STOPPED, **how).outcome.value  # type: ignore[arg-type]

    assert outcome(code=0, insisted=True) == "stopped"  # it was faster than the signal
    assert outcome(code=0, insisted=True, forced=True) == "stopped"
    assert outcome(signal=signal.SIGABRT, insisted=True) == "terminated while busy"  # exit() beside running threads
    assert outcome(signal=signal.SIGKILL, insisted=True, forced=True) == "killed"


@pytest.mark.parametrize("health", [Health.LOADING, Health.SILENT, Health.WRONG, Health.REFUSED])
def test_not_ready_in_time(tmp_path: Path, health: Health) -> None:
    run = Run(tmp_path, "exec sleep 600", health, ready_timeout_s=0.3)
    run.process.start()
    end = run.wait().exit
    assert end is not None and end.cause is Cause.NOT_READY
    assert State.READY not in run.seen


def test_another_one_answers_on_the_port(tmp_path: Path) -> None:
    run = Run(tmp_path, "exec sleep 600", Health.READY, is_ours=lambda _pid: False)
    run.process.start()
    end = run.wait().exit
    assert end is not None and end.cause is Cause.WRONG_PORT
    assert State.READY not in run.seen


def test_stop_before_ready(tmp_path: Path) -> None:
    run = Run(tmp_path, "exec sleep 600", Health.LOADING)
    run.process.start()
    run.process.request_stop()
    end = run.wait().exit
    assert end is not None and end.cause is Cause.STOPPED


def test_program_that_cannot_run(tmp_path: Path, guard: str) -> None:
    program = tmp_path / "no-program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    process = ServerProcess([str(program)], log_path=tmp_path / "log", probe=lambda: Health.REFUSED, guard=guard)
    process.start()
    end = process.wait(lambda s: False, DEADLINE_S).exit
    assert end == Exit(Cause.DIED, code=126)
    assert (tmp_path / "log").read_text().startswith(f"cannot run {program}: ")


def test_log_that_cannot_be_opened(tmp_path: Path) -> None:
    process = ServerProcess(["/bin/true"], log_path=tmp_path / "none" / "log", probe=lambda: Health.REFUSED)
    process.start()
    end = process.wait(lambda s: False, DEADLINE_S).exit
    assert end is not None and end.cause is Cause.NOT_STARTED
    assert "none/log" in str(end)


def test_a_bug_in_a_callback_leaves_no_process(tmp_path: Path) -> None:
    def fail(snapshot: Snapshot) -> None:
        if snapshot.state is State.READY:
            raise RuntimeError("a bug")

    process = ServerProcess(["/bin/sleep", "600"], log_path=tmp_path / "log", probe=lambda: Health.READY, on_change=fail)
    hook, threading.excepthook = threading.excepthook, lambda _args: None
    try:
        process.start()
        snapshot = process.wait(lambda s: False, DEADLINE_S)
    finally:
        threading.excepthook = hook
    assert snapshot.exit is not None and snapshot.exit.message == "its supervisor failed"
    assert snapshot.pid is not None
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(__import__("os").pidfd_open(snapshot.pid), 0)
