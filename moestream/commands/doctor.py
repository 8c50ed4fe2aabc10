"""``moestream doctor``: what of this machine, its engine and a model works, and what to do about the rest."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moestream import __version__
from moestream.doctor.checks import Status
from moestream.doctor.survey import Survey, examine
from moestream.errors import MoestreamError
from moestream.result import Result

EXIT_FAILED = 3  # a check failed; the report is printed


class _Bar:
    """Progress of reading a model, on stderr: a bar on a terminal, a line each tenth elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._tenth = -1

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._console.is_terminal:
            if self._bar is None:
                columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
                self._bar = Progress(TextColumn("{task.description}"), *columns, console=self._console, transient=True)
                self._task = self._bar.add_task("comparing", total=total_bytes)
                self._bar.start()
            self._bar.update(self._task, completed=done_bytes)
        elif (tenth := done_bytes * 10 // max(total_bytes, 1)) != self._tenth:
            self._tenth = tenth
            print(f"comparing: {done_bytes >> 20} of {total_bytes >> 20} MiB", file=sys.stderr, flush=True)


def report(survey: Survey) -> Result:
    """What was found, for a person and as data."""
    width = max(len(finding.check) for finding in survey.findings)
    lines = []
    for finding in survey.findings:
        lines.append(f"{finding.status:<7}  {finding.check:<{width}}  {finding.found}")
        if finding.hint:
            lines.append(f"{'':<7}  {'':<{width}}  hint: {finding.hint}")
    counts = {status.value: survey.count(status) for status in Status}
    lines.append(", ".join(f"{n} {status}" for status, n in counts.items()))
    checks = [
        {
            "name": f.check,
            "status": f.status.value,
            "case": f.case or None,
            "found": f.found,
            "hint": f.hint,
            "data": dict(f.data),
        }
        for f in survey.findings
    ]
    data = {"moestream_version": __version__, "model": survey.model, "counts": counts, "checks": checks}
    return Result("doctor", data, "\n".join(lines))


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model, as for start: its files and their drive are looked at too.")
    ] = None,
    hash_: Annotated[
        bool, typer.Option("--hash", help="Read all of MODEL, and compare it with what the hub said when it was pulled.")
    ] = False,
) -> Generator[Result, None, None]:
    """Check this machine, the engine and a model; exit code 3 when a check fails."""
    if hash_ and model is None:
        raise MoestreamError("--hash without a model", hint="moestream doctor MODEL --hash", exit_code=2)
    with _Bar() as bar:
        survey = examine(model, hashed=hash_, progress=bar)
    yield report(survey)
    if survey.count(Status.fail):
        raise typer.Exit(EXIT_FAILED)
