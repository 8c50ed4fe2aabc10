"""``moestream logs``: what a server printed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated

import typer

from moestream.errors import MoestreamError
from moestream.result import Result
from moestream.server.records import RecordStore, ServerRecord, tail
from moestream.server.supervise import stop_on_signals

POLL_S = 0.1
MAX_LINES = 1_000_000
BYTES_A_LINE = 1024  # a generous guess of how far back the last lines begin


def _choose(store: RecordStore, port: int | None) -> tuple[int, Path]:
    """The log to show: of a port, of the only server, or of the one that ended last."""
    if port is not None:
        record = store.read(port)
        path = Path(record.log_path) if isinstance(record, ServerRecord) else store.log_path(port)
        if not path.exists():
            raise MoestreamError(f"there is no log of a server on port {port}", hint="moestream status lists the servers")
        return port, path
    live = [r for r in store.all() if isinstance(r, ServerRecord) and r.alive]
    if len(live) > 1:
        ports = ", ".join(str(r.port) for r in live)
        raise MoestreamError(f"{len(live)} servers run, on ports {ports}", hint=f"moestream logs --port {live[0].port}")
    if live:
        return live[0].port, Path(live[0].log_path)
    logs = [p for p in store.folder.glob("*.log") if p.stem.isascii() and p.stem.isdigit()]
    if not logs:
        raise MoestreamError("no server was started by moestream", hint="moestream start --model FILE")
    newest = max(logs, key=lambda p: p.stat().st_mtime)
    return int(newest.stem), newest


def follow(path: Path, n_lines: int, running: Callable[[], bool]) -> Iterator[list[str]]:
    """The last lines of a log, then new ones as they come, until ``running`` says no and nothing is left.

    A log that was replaced (a new start on the port) or truncated is read from its beginning.
    """
    file = open(path, "rb")  # noqa: SIM115 - replaced below when the log is
    try:
        # One handle for what is there and what comes, so that no line falls between.
        size = file.seek(0, os.SEEK_END)
        file.seek(0 if n_lines >= MAX_LINES else max(0, size - BYTES_A_LINE * n_lines))
        *lines, rest = file.read().split(b"\n")
        if lines and n_lines:
            yield [line.decode("utf-8", "replace") for line in lines[-n_lines:]]
        while True:
            alive = running()  # asked before reading: what it printed last must not be missed
            chunk = file.read()
            if chunk:
                *lines, rest = (rest + chunk).split(b"\n")
                if lines:
                    yield [line.decode("utf-8", "replace") for line in lines]
                continue
            replaced = _replaced(path, file.fileno(), file.tell())
            if replaced:
                file.close()
                file = open(path, "rb")  # noqa: SIM115
                rest = b""
                continue
            if not alive:
                if rest:
                    yield [rest.decode("utf-8", "replace")]
                return
            time.sleep(POLL_S)
    finally:
        file.close()


def _replaced(path: Path, fd: int, position: int) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino) or named.st_size < position


def logs(
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="N", help="Of the server on this port.")] = None,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C or the server ends.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, metavar="N", help="Only the last N lines.")] = None,
) -> Generator[Result, None, None]:
    """Print the log of a server, also after it has ended."""
    store = RecordStore()
    found, path = _choose(store, port)
    wanted = MAX_LINES if lines is None else lines

    def result(some: list[str]) -> Result:
        return Result("logs", {"port": found, "log_path": str(path), "lines": some}, "\n".join(some) + "\n")

    if not follow_:
        yield result(tail(path, wanted, 1 << 30))
        return

    # A flag and no KeyboardInterrupt: that would as likely hit whoever prints what is yielded here.
    with stop_on_signals(lambda: None) as signals:

        def running() -> bool:
            record = store.read(found)
            return not signals and isinstance(record, ServerRecord) and record.alive

        for some in follow(path, wanted, running):
            yield result(some)
