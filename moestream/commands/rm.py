"""``moestream rm``: remove a model that was pulled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moestream.errors import MoestreamError
from moestream.models import names
from moestream.models.pull import remove
from moestream.models.store import ModelStore, size_of
from moestream.result import Result
from moestream.server import report

EXIT_CODES = {1: "an error, or the question was answered with no"}


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As moestream list shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Result:
    """Remove a pulled model: the files that pull made, and nothing else."""
    store = ModelStore()
    entry = store.find(names.parse(name))
    if entry is None:
        raise MoestreamError(f"{name}: not pulled", hint="moestream list shows what is there")

    def confirm(gone: list[Path], kept: list[Path]) -> bool:
        if yes:
            return True
        if not sys.stdin.isatty():
            raise MoestreamError(
                f"{entry.name} is not removed without being asked about, and there is no terminal to ask on",
                hint=f"moestream rm --yes {entry.name}",
            )
        for path in gone:
            print(f"  {path}", file=sys.stderr)
        size = report.size(sum(size_of(path) or 0 for path in gone))
        return typer.confirm(f"remove {len(gone)} {'file' if len(gone) == 1 else 'files'}, {size}?", err=True)

    removed = remove(entry, store, confirm)
    if removed is None:
        raise MoestreamError(f"{entry.name} was not removed")
    data = {
        "name": entry.name,
        "removed": [str(path) for path in removed.files],
        "kept": [str(path) for path in removed.kept],
        "freed_bytes": removed.freed_bytes,
    }
    lines = [f"removed {entry.name}: {report.size(removed.freed_bytes)} freed"]
    lines += [f"left: {path}, which pull did not make, or which has changed since" for path in removed.kept]
    return Result("rm", data, "\n".join(lines))
