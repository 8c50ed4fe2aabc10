"""``moestream stop``: end servers that ``moestream start`` has started, and nothing else."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from typing import Annotated, Any

import typer

from moestream.errors import MoestreamError
from moestream.result import Result
from moestream.server.process import STOP_AGAIN_S, Outcome
from moestream.server.records import BrokenRecord, RecordStore, ServerRecord

POLL_S = 0.05
# Beyond the supervisor's own grace period, after which it kills the server by itself.
SUPERVISOR_MARGIN_S = 5.0
EXIT_CODES = {1: "an error: there is no such server, or one does not end; the others are stopped"}

_DETAILS = {
    Outcome.STOPPED: "stopped",
    Outcome.TERMINATED: f"terminated while busy: it had not ended {STOP_AGAIN_S:g} s after SIGTERM, a second one ended it",
    Outcome.KILLED: "killed: it did not end on SIGTERM",
}


def _wait_gone(record: ServerRecord, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while record.alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop_server(store: RecordStore, record: ServerRecord | BrokenRecord, *, grace_s: float) -> dict[str, Any]:
    """Stop one server and take its record away.

    Every signal goes to a process that was just compared with the record (create time and command line); a pid
    that has another owner now is left alone.

    Returns:
        ``port``, ``outcome`` (a value of ``process.Outcome``, or ``stale``) and ``detail``.

    Raises:
        MoestreamError: it does not end, or what lies in the place of a stale record cannot be removed.
    """
    if isinstance(record, BrokenRecord):
        store.remove_stale(record.port)
        return {"port": record.port, "outcome": "stale", "detail": f"unreadable state file removed: {record.reason}"}
    pid = record.server.pid if record.server else None
    base = {"port": record.port, "pid": pid, "model": record.model}
    if not record.alive:
        store.remove_stale(record.port)
        ended = record.ended or "it ended without a trace"
        return {**base, "outcome": "stale", "detail": f"it did not run any more ({ended}); state file removed"}

    # The supervisor ends its server and leaves a record of how. Without one the server is asked here.
    store.want_end(record.port)
    if record.supervisor.send(signal.SIGTERM):
        outcome = None
        patience_s = grace_s + SUPERVISOR_MARGIN_S
        gone = _wait_gone(record, patience_s)
    else:
        outcome = Outcome.STOPPED
        patience_s = grace_s
        gone = _ask(record, signal.SIGTERM, min(grace_s, STOP_AGAIN_S))
        if not gone and grace_s > STOP_AGAIN_S:
            outcome = Outcome.TERMINATED
            gone = _ask(record, signal.SIGTERM, grace_s - STOP_AGAIN_S)
    if not gone:
        if record.server is not None:
            record.server.send(signal.SIGKILL, group=True)
        record.supervisor.send(signal.SIGKILL)
        if not _wait_gone(record, SUPERVISOR_MARGIN_S):
            raise MoestreamError(
                f"the server on port {record.port} (pid {pid}) does not end, not even by SIGKILL",
                hint="it probably waits for a disk that does not answer",
            )
        detail = f"killed: it did not end within {patience_s:g} s"
        outcome = Outcome.KILLED
    elif outcome is not None:
        detail = _DETAILS[outcome]
    else:
        last = store.read(record.port)
        ours = isinstance(last, ServerRecord) and last.supervisor == record.supervisor
        try:
            outcome = Outcome(last.outcome if ours else "")
            detail = _DETAILS[outcome]
        except ValueError:  # it ended by itself just then, or its record could not be written or was taken away
            outcome = Outcome.STOPPED
            detail = f"it ended: {last.ended}" if ours and last.ended else "it ended; how is not known"
    try:
        store.remove_stale(record.port)
    except MoestreamError as error:  # a full disk: the server is gone all the same, which is what was asked for
        detail += f"; its state file stays: {error.message}"
    return {**base, "outcome": outcome.value, "detail": detail}


def _ask(record: ServerRecord, number: int, timeout_s: float) -> bool:
    if record.server is not None:
        record.server.send(number)
    return _wait_gone(record, timeout_s)


def stop(
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="N", help="The server on this port.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every server.")] = False,
    grace: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long it may take before it is killed.")] = 10.0,
) -> Generator[Result, None, None]:
    """Stop a server: the only one, the one on --port, or --all."""
    store = RecordStore()
    if port is not None and all_:
        raise MoestreamError("--port and --all exclude each other", hint="leave one of them out")
    if port is not None:
        record = store.read(port)
        if record is None:
            raise MoestreamError(f"moestream has started no server on port {port}", hint="moestream status lists the servers")
        chosen = [record]
    else:
        chosen = list(store.all())
        live = [r for r in chosen if isinstance(r, ServerRecord) and r.alive]
        if not all_ and len(live) > 1:
            ports = ", ".join(str(r.port) for r in live)
            raise MoestreamError(
                f"{len(live)} servers run, on ports {ports}",
                hint=f"choose one: moestream stop --port {live[0].port}; or all: moestream stop --all",
            )
        if not all_ and not chosen:
            raise MoestreamError("no server runs that moestream has started", hint="moestream status lists the servers")
    done: list[dict[str, Any]] = []
    failures: list[MoestreamError] = []
    for record in chosen:
        try:
            done.append(stop_server(store, record, grace_s=grace))
        except MoestreamError as error:  # the others are to be stopped all the same
            failures.append(error)
            done.append({"port": record.port, "outcome": "failed", "detail": f"failed: {error.message}"})
    if len(failures) < len(chosen) or not chosen:
        text = "\n".join(f"port {d['port']}: {d['detail']}" for d in done) or "no server runs"
        yield Result("stop", {"servers": done}, text)
    if failures:
        raise failures[0]
