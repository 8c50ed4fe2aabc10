"""``moestream download-bins``: install an engine that was built elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moestream.errors import MoestreamError
from moestream.result import Result
from moestream.upstream import engines
from moestream.upstream.releases import resolve_origin


class _Bar:
    """Progress on stderr: a bar on a terminal, a line each tenth elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._tenth = -1
        self._text = ""

    def __enter__(self) -> _Bar:
        if self._console.is_terminal:
            columns = (
                *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)),
                *(TransferSpeedColumn(), TimeRemainingColumn()),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, text: str) -> None:
        self._text = text
        if self._bar:
            self._bar.remove_task(self._task)  # a reset would keep the last step's size
            self._task = self._bar.add_task(text, total=None)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
        elif done_bytes * 10 // total_bytes != self._tenth:
            self._tenth = done_bytes * 10 // total_bytes
            print(f"{self._text}: {done_bytes >> 20} of {total_bytes >> 20} MiB", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)


def download_bins(
    release: Annotated[
        str | None, typer.Option(help="The tag of the release.", show_default="that of this version of moestream")
    ] = None,
    origin: Annotated[
        str | None, typer.Option("--from", metavar="URL|DIR", help="The address or folder of a release itself.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="cpu, cuda, vulkan, metal or hip.", show_default="cuda where it fits, else cpu")
    ] = None,
) -> Result:
    """Download the prebuilt engine that fits this machine, instead of building one."""
    from moestream.upstream import bins  # takes time, which other commands need not wait for

    start_s = time.monotonic()
    where = resolve_origin(release, origin, os.environ)
    with _Bar() as bar:
        outcome = bins.install(where, backend=backend, reporter=bar)
        for id, reasons in outcome.passed_over.items():
            bar.note(f"passed over {id}: {'; '.join(reasons)}")
        engine = outcome.engine
        try:
            used_id = engines.in_use().id
        except MoestreamError:  # it was removed meanwhile
            used_id = None
        if used_id not in (None, engine.id):
            bar.note(f"in use is {used_id}, which comes before it (moestream engines)")
    elapsed_s = round(time.monotonic() - start_s, 1)
    did = f"installed in {elapsed_s:.0f} s" if outcome.installed else "already installed"
    page = "with" if engine.web_ui else "without"
    return Result(
        "download-bins",
        {
            "id": engine.id,
            "installed": outcome.installed,
            "backend": engine.backend,
            "bin_dir": str(engine.bin_dir),
            "tools": list(engine.tools),
            "web_ui": engine.web_ui,
            "in_use": used_id,
            "passed_over": [{"id": id, "reasons": reasons} for id, reasons in outcome.passed_over.items()],
            "elapsed_s": elapsed_s,
        },
        f"{did}: {engine.id} ({page} the web page)\n{engine.bin_dir}",
    )
