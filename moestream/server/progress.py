"""Showing on stderr that a server is being started: elapsed time and what it printed last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from moestream.server.records import tail

PLAIN_EVERY_S = 5.0  # without a terminal: one line now and then


@contextlib.contextmanager
def progress(what: str, log_path: Path, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Show progress; the caller calls the yielded function several times a second.

    A terminal that goes away must not stop the start: then nothing is shown any more.
    """
    console = console or Console(stderr=True)
    started = time.monotonic()
    status = console.status(what) if console.is_terminal else None
    next_plain = PLAIN_EVERY_S
    broken = False

    def show() -> None:
        nonlocal next_plain, broken
        elapsed = time.monotonic() - started
        if broken or (status is None and elapsed < next_plain):
            return
        last = next((line.strip() for line in reversed(tail(log_path, 20, 8192)) if line.strip()), "")
        text = f"{what}, {elapsed:.0f} s" + (f": {last}" if last else "")
        try:
            if status is not None:
                status.update(escape(text[: max(20, console.width - 4)]))
            else:
                next_plain = elapsed + PLAIN_EVERY_S
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        except (OSError, ValueError):
            broken = True

    try:
        with contextlib.suppress(OSError, ValueError):
            if status is not None:
                status.start()
        yield show
    finally:
        with contextlib.suppress(OSError, ValueError):
            if status is not None:
                status.stop()
