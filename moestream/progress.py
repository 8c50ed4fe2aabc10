"""Progress on stderr: a bar on a terminal, a line each tenth elsewhere."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Bar:
    """One task at a time, of a number of things or of bytes.

    Args:
        of_bytes: what :meth:`progress` counts.
        text: of the task, until :meth:`step` names another.
    """

    def __init__(self, *, of_bytes: bool, text: str = "") -> None:
        self._console = Console(stderr=True, highlight=False)
        self._of_bytes = of_bytes
        self._text = text
        self._bar: Progress | None = None
        self._tenth = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.say(f"note: {text}")

    def step(self, text: str) -> None:
        """What is done now; how much of it there is, is not known yet."""
        self._text, self._tenth = text, -1
        if self._console.is_terminal:
            self._show()
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        if self._console.is_terminal:
            if self._bar is None:
                self._show()
            self._bar.update(self._task, completed=done, total=total)  # type: ignore[union-attr]
        elif (tenth := done * 10 // max(total, 1)) != self._tenth:
            self._tenth = tenth
            shown = f"{done >> 20} of {total >> 20} MiB" if self._of_bytes else f"{done} of {total}"
            print(f"{self._text}: {shown}", file=sys.stderr, flush=True)

    def _show(self) -> None:
        if self._bar is None:
            counts = (
                (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
                if self._of_bytes
                else (MofNCompleteColumn(), TimeElapsedColumn())
            )
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(), *counts, console=self._console, transient=True)
            self._bar.start()
        else:
            self._bar.remove_task(self._task)  # a reset would keep the last step's size
        self._task = self._bar.add_task(self._text, total=None)
