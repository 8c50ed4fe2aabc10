"""``moestream doctor``: what of this machine, its engine and a model works, and what to do about the rest."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated

import typer

from moestream import __version__
from moestream.doctor.checks import Status
from moestream.doctor.survey import Survey, examine
from moestream.errors import MoestreamError
from moestream.progress import Bar
from moestream.result import Result

EXIT_FAILED = 3
EXIT_CODES = {0: "nothing fails; there may be warnings", EXIT_FAILED: "a check fails; the report is printed"}


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
    with Bar(of_bytes=True, text="comparing") as bar:
        survey = examine(model, hashed=hash_, progress=bar.progress)
    yield report(survey)
    if survey.count(Status.fail):
        raise typer.Exit(EXIT_FAILED)
