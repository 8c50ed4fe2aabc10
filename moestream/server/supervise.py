"""One server from its plan to its end: record, process and readiness together.

The supervisor is this process (``moestream start``) or a detached one (``python -m moestream.server.supervise``),
which gets its plan on stdin as JSON and reports on a pipe. Both run the same :class:`Supervisor`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from moestream import paths
from moestream.errors import MoestreamError
from moestream.server import address, learning
from moestream.server.arguments import DEFAULT_READY_TIMEOUT_S, ENGINE_FLAGS
from moestream.server.client import ServerClient, Stats
from moestream.server.learning import Learning
from moestream.server.process import STOP_AGAIN_S, Cause, Exit, Outcome, ServerProcess, Snapshot, State
from moestream.server.records import ProcessMark, RecordStore, ServerRecord, fresh_log, tail

LOG_END_LINES = 15
REFUSAL_WITHIN_LINES = 200  # what llama-server prints after it has refused
STOP_GRACE_S = 10.0
STOP_MARGIN_S = 5.0  # beyond it, for a supervisor in the background
KEPT_LOGS = 5  # of servers that are no more


@dataclass(frozen=True)
class ServerPlan:
    """Everything needed to run one server. JSON-serialisable."""

    argv: tuple[str, ...]
    host: str
    port: int
    url: str
    model: str
    slots: str
    engine_id: str
    backend: str
    log_path: str
    n_ctx_train: int = 0
    detached: bool = False
    api_key: str | None = None
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    stop_grace_s: float = STOP_GRACE_S
    guard: str | None = None
    map_path: str | None = None
    learning: Learning | None = None
    planned: dict[str, Any] | None = None
    config_sources: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerPlan:
        raw = json.loads(text)
        learning = Learning(**raw["learning"]) if raw["learning"] else None
        return cls(**{**raw, "argv": tuple(raw["argv"]), "learning": learning})

    def client(self, timeout_s: float = 2.0) -> ServerClient:
        return ServerClient(self.url, api_key=self.api_key, timeout_s=timeout_s)


class Supervisor:
    """Runs one server and keeps its record true. See ``process.py`` for the states."""

    def __init__(self, plan: ServerPlan, store: RecordStore | None = None) -> None:
        self.plan = plan
        self.store = store or RecordStore()
        # Half a second: while a probe waits for a hung server, a death or a stop waits too.
        self._prober = plan.client(timeout_s=0.5)
        self._record: ServerRecord | None = None
        self.said: list[str] = []  # what was told at the start
        self._recorded: Path | None = None
        self.process = ServerProcess(
            plan.argv,
            log_path=Path(plan.log_path),
            probe=self._prober.health,
            is_ours=lambda pid: address.listens(pid, plan.port),
            ready_timeout_s=plan.ready_timeout_s,
            stop_grace_s=plan.stop_grace_s,
            on_change=self._write_record,
            guard=plan.guard,
        )

    def start(self) -> None:
        """Claim the port's record and fork the server.

        Raises:
            MoestreamError: another server of ours has the port, or state files cannot be written.
        """
        plan = self.plan
        record = ServerRecord(
            port=plan.port, host=plan.host, url=plan.url, state=State.NEW.value,
            supervisor=ProcessMark.of(os.getpid()), server=None, detached=plan.detached,
            engine_id=plan.engine_id, backend=plan.backend, model=plan.model, slots=plan.slots, argv=plan.argv,
            log_path=plan.log_path, started_s=time.time(), api_key=plan.api_key,
            kept_map=plan.learning and plan.learning.kept_path, available_bytes=plan.planned and plan.planned["available_bytes"],
        )  # fmt: skip
        self.store.claim(record)
        self.store.limit_logs(KEPT_LOGS)
        try:
            fresh_log(Path(plan.log_path))  # only now: until the claim it may be another server's
        except MoestreamError:
            self.store.remove(record)
            raise
        if plan.learning is not None:
            more, said = learning.begin(plan.learning, self.store, plan.port)
            # Behind the program and its model, in front of what may be an argument without its value.
            self.plan = plan = replace(plan, argv=(*plan.argv[:3], *more, *plan.argv[3:]))
            record = replace(record, argv=plan.argv)
            self._say(said)
        self._record = record
        # The last chance for an orderly stop: after atexit the interpreter freezes the process's thread.
        atexit.register(self.stop)
        self.process.start(plan.argv)

    def _say(self, lines: list[str]) -> None:
        self.said += lines
        for line in lines:
            notice(line)

    def stop(self) -> Snapshot:
        """Ask the server to end and wait until it has. Harmless when it already has."""
        if self._record is None:
            return self.process.snapshot
        if self.process.snapshot.state is not State.EXITED:
            self.process.request_stop()
        return self.wait_exit()

    def wait_exit(self) -> Snapshot:
        """Wait until the server has ended, for however long it runs, and keep what it has recorded."""
        snapshot = self.process.wait(lambda s: s.state is State.EXITED)
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            self._say(learning.take_in(recorded))
        atexit.unregister(self.stop)
        self._prober.close()
        return snapshot

    def _write_record(self, snapshot: Snapshot) -> None:
        """Runs in the process's thread, at every change."""
        record = self._record
        if record is None or record.state == snapshot.state.value:
            return
        changes: dict[str, Any] = {"state": snapshot.state.value}
        if snapshot.state is State.STARTING and snapshot.pid is not None:
            with contextlib.suppress(psutil.Error):  # gone already: then EXITED follows
                changes["server"] = ProcessMark.of(snapshot.pid, self.plan.argv)
        if snapshot.state is State.READY:
            changes["ready_s"] = time.time()
        if snapshot.exit is not None:
            changes["ended_s"] = time.time()
            changes["ended"] = str(snapshot.exit)
            if snapshot.exit.cause is Cause.STOPPED:
                changes["outcome"] = snapshot.exit.outcome.value
        self._record = replace(record, **changes)
        if snapshot.exit is not None and self.plan.learning is not None:
            # before the record goes, and another server may have the port
            self._recorded, said = learning.end(self.plan.learning, self.store, self.plan.port)
            self._say(said)
        try:
            died_unseen = snapshot.exit is not None and snapshot.exit.cause is not Cause.STOPPED and record.ready_s
            if snapshot.state is State.EXITED and not (self.plan.detached and died_unseen):
                self.store.finish(self._record)
            else:
                self.store.update(self._record)
        except MoestreamError as error:  # a full disk must not take the server down
            notice(f"warning: {error.message}")


def notice(text: str) -> None:
    """Print to stderr; the terminal may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_on_signals(action: Callable[[], None]) -> Iterator[list[int]]:
    """Let SIGINT, SIGTERM and SIGHUP call ``action`` instead of ending this process.

    Yields:
        the signals that came, in order. ``action`` runs in the main thread, between any two instructions of it.
    """
    came: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        action()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks for it to be ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_notice(end: Exit, grace_s: float) -> str | None:
    """What to say of a server that did not end on the first SIGTERM; None when it did."""
    if end.outcome is Outcome.TERMINATED:
        return f"llama-server was still busy {STOP_AGAIN_S:g} s after SIGTERM; a second SIGTERM ended it"
    if end.outcome is Outcome.KILLED:
        return f"llama-server did not end on SIGTERM within {grace_s:g} s and was killed"
    return None


# The engine's refusal of a model or of settings, complete in itself. Upstream's memory-fit pass meets it first and
# logs it as a failure of its own, so that it is the only one of many lines that says something.
_REFUSAL = re.compile(
    r"(?:error loading model: (?:error loading model \w+: )?|moestream: (?=cannot load the model: ))(.+?); hint: (.+)"
)


def in_our_words(text: str, flags: Collection[str] = tuple(ENGINE_FLAGS)) -> str:
    """What the engine says, with the flags of ``moestream start``: its own ones are refused after ``--``.

    Args:
        flags: of the engine's, those that a command has under another name.
    """
    text = text.replace("leave out --moe-slots", "serve without streaming: --slots off").replace("(-c)", "(--ctx)")
    return re.sub(r"--moe-[a-z-]+", lambda found: ENGINE_FLAGS[found[0]] if found[0] in flags else found[0], text)


# What llama-server prints when it gives up, and what to make of it.
_KNOWN_ENDS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"unknown model architecture: '([^']*)'"),
        "llama.cpp does not know the model's architecture '{0}'",
        "the model is newer than the pinned llama.cpp; see moestream engines for the version",
    ),
    (
        re.compile(r"failed to open GGUF file '([^']*)' \(No such file or directory\)"),
        "there is no file {0}",
        "check the path; it was passed on to llama-server as it is",
    ),
    (
        re.compile(r"error loading model: (?:error loading model \w+: )?(.+)"),
        "llama.cpp cannot load the model: {0}",
        "if the file came over a network, it may be damaged: download it again",
    ),
    (
        re.compile(r"error: invalid argument: (--moe-slots)"),
        "this llama-server does not know {0}: it was built without moestream's patches",
        "build the engine again: moestream build",
    ),
    (
        re.compile(r"error: invalid argument: (--moe-\S+)"),
        "the engine in use cannot honour {ours}: its llama-server does not know {0}",
        "build the engine again: moestream build; or leave out {ours}",
    ),
    (
        re.compile(r"error: invalid argument: (\S+)"),
        "llama-server does not know the argument {0}",
        "arguments after -- are passed on as they are; see llama-server --help",
    ),
    (
        re.compile(r"couldn't bind HTTP server socket, hostname: (\S+), port: (\d+)"),
        "llama-server could not listen on {0} port {1}",
        "another program took the port meanwhile; use another one with --port",
    ),
)


def stopped_early() -> MoestreamError:
    return MoestreamError("stopped before the server was ready", exit_code=130)


def end_error(plan: ServerPlan, end: Exit, *, was_ready: bool, after_s: float) -> MoestreamError:
    """The error for a server that ended without being asked to: its own words, or the end of its log."""
    lines = tail(Path(plan.log_path), REFUSAL_WITHIN_LINES)
    if end.cause is Cause.DIED and not was_ready:
        refusal = next((m for m in map(_REFUSAL.search, reversed(lines)) if m), None)
        if refusal:
            return MoestreamError(in_our_words(refusal[1].strip()), hint=in_our_words(refusal[2].strip()))
    lines = lines[-LOG_END_LINES:]
    when = f"after {after_s:.1f} s"
    hint = f"the whole log: {plan.log_path}"
    if end.cause is Cause.NOT_READY:
        what = f"llama-server was not ready {when} and was ended"
        hint = f"give it longer with --ready-timeout SECONDS; {hint}"
    elif end.cause is Cause.WRONG_PORT:
        owner = address.port_owner(plan.port)
        what = f"port {plan.port} is answered by {owner or 'another process'}, not by our llama-server"
        hint = f"use a free port: --port {address.free_port(plan.host, plan.port)}"
    elif end.cause is Cause.NOT_STARTED:
        what = f"llama-server could not be started: {end}"
    else:
        what = f"llama-server ended {'while serving' if was_ready else 'before it was ready'}, {when}: {end}"
        if end.signal == signal.SIGKILL:
            hint = f"the kernel kills what uses too much memory: try fewer --slots or a smaller --ctx; {hint}"
        for pattern, message, known_hint in () if was_ready else _KNOWN_ENDS:
            match = next((m for m in map(pattern.search, reversed(lines)) if m), None)
            if match:
                ours = ENGINE_FLAGS.get(match[1], match[1])
                what = f"{message.format(*match.groups(), ours=ours)} ({end})"
                hint = f"{known_hint.format(ours=ours)}; {hint}"
                break
    if lines:
        what += "\nthe end of its log:\n" + "\n".join(f"  {line}" for line in lines)
    return MoestreamError(what, hint=hint)


@dataclass(frozen=True)
class ReadyFacts:
    """What a server that has become ready says about itself."""

    stats: Stats
    props: dict[str, Any]


def ask_ready_facts(plan: ServerPlan) -> ReadyFacts:
    """Ask a ready server what is in force."""
    with plan.client() as client:
        return ReadyFacts(client.stats(), client.props())


class Detached:
    """A supervisor in a process of its own, seen from the command that started it.

    Raises:
        MoestreamError: by the constructor, when it cannot be started.
    """

    def __init__(self, plan: ServerPlan) -> None:
        ours, theirs = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "moestream.server.supervise", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,  # a closing terminal does not reach it
                env={**os.environ, "PYTHONPATH": paths.import_path()},
            )
        except OSError as error:
            os.close(ours)
            raise MoestreamError(f"cannot start the supervisor: {error.strerror or error}") from error
        finally:
            os.close(theirs)
        assert self._popen.stdin is not None
        self._popen.stdin.write(plan.to_json().encode())
        self._popen.stdin.close()
        self._plan = plan
        self._started = time.monotonic()
        self._report: dict[str, Any] | None = None
        self._stopping = False
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd, encoding="utf-8") as pipe:
            text = pipe.read()
        self._report = json.loads(text) if text else {"error": "the supervisor ended without a report"}

    @property
    def pid(self) -> int:
        return self._popen.pid

    def request_stop(self) -> None:
        """Ask it to end. Safe in a signal handler."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it and its server, and wait until both are gone."""
        self.request_stop()
        try:
            self._popen.wait(self._plan.stop_grace_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # its server goes with it
            self._popen.wait()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has reported."""
        self._reader.join(timeout_s)
        return self._report is not None

    def check(self) -> ServerPlan:
        """After it has reported: the plan as it was carried out. What the supervisor had to say is said here.

        Raises:
            MoestreamError: the server ended, or could not be started.
        """
        report = self._report or {}
        for line in report.get("said", ()):
            notice(line)
        if "exit" in report:
            end = Exit(**{**report["exit"], "cause": Cause(report["exit"]["cause"])})
            if end.cause is Cause.STOPPED:
                raise stopped_early()
            raise end_error(self._plan, end, was_ready=False, after_s=time.monotonic() - self._started)
        if "error" in report:
            if self._stopping:  # before it could say so
                raise stopped_early()
            raise MoestreamError(report["error"], hint=report.get("hint"))
        return replace(self._plan, argv=tuple(report["argv"]))


def _detached_main() -> None:
    """What runs in the background: reports once on a pipe, then watches until the end."""
    report_fd = int(sys.argv[1])
    os.set_inheritable(report_fd, False)

    def report(content: dict[str, Any]) -> None:
        nonlocal report_fd
        if report_fd >= 0:
            with contextlib.suppress(OSError):  # whoever started us may be gone
                os.write(report_fd, json.dumps(content).encode())
            os.close(report_fd)
            report_fd = -1

    plan = ServerPlan.from_json(sys.stdin.read())
    supervisor = Supervisor(plan)
    with stop_on_signals(supervisor.process.request_stop):
        try:
            supervisor.start()
            log = os.open(plan.log_path, os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)  # what goes wrong from here on must be found somewhere
            os.dup2(log, 2)
            os.close(log)
            for line in supervisor.said:
                notice(line)
        except MoestreamError as error:
            report({"error": error.message, "hint": error.hint})
            sys.exit(error.exit_code)
        except Exception:
            report({"error": f"the supervisor failed: {traceback.format_exc()}", "hint": None})
            raise
        snapshot = supervisor.process.wait(lambda s: s.settled)
        if snapshot.exit is not None:
            report({"exit": {**asdict(snapshot.exit), "cause": snapshot.exit.cause.value}, "said": supervisor.said})
            sys.exit(1)
        report({"ready": True, "argv": list(supervisor.plan.argv), "said": supervisor.said})
        snapshot = supervisor.wait_exit()
    assert snapshot.exit is not None
    if snapshot.exit.cause is not Cause.STOPPED:
        notice(f"moestream: llama-server ended: {snapshot.exit}")
        sys.exit(1)
    late = stop_notice(snapshot.exit, plan.stop_grace_s)
    if late:
        notice(f"moestream: {late}")


if __name__ == "__main__":
    _detached_main()
