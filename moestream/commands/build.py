"""``moestream build``: fetch, patch and compile the engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moestream.result import Result
from moestream.upstream import build as building


class _Bar:
    """Progress on stderr: a bar on a terminal, a line each tenth elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._tenth = -1
        self._text = ""

    def __enter__(self) -> _Bar:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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
            self._bar.reset(self._task, description=text, total=None)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, total=total)
        elif done * 10 // max(total, 1) != self._tenth:
            self._tenth = done * 10 // max(total, 1)
            print(f"{self._text}: {done} of {total}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)


def build(
    backend: Annotated[str, typer.Option(help="cpu, cuda, vulkan, metal or hip.")] = "cpu",
    source: Annotated[
        Path | None, typer.Option(help="A llama.cpp folder, or an archive of it, instead of the pinned release.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="A further cmake target to build; may be given more than once.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Compiler runs at a time.", show_default="one a processor")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Throw earlier source and build trees away first.")] = False,
    ui: Annotated[
        bool | None,
        typer.Option("--ui/--no-ui", help="The server's web page.", show_default="built where npm is installed"),
    ] = None,
    cmake_arg: Annotated[
        list[str] | None, typer.Option(help="A further -DNAME=VALUE for cmake; may be given more than once.")
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="For any processor of this architecture, as pack-bins needs it.")
    ] = False,
    cuda_archs: Annotated[
        list[str] | None,
        typer.Option(
            help="Cards that a cuda engine is to run on, for example 86,90 (compute capabilities 8.6 and 9.0).",
            show_default="those in this machine",
        ),
    ] = None,
    test_series: Annotated[bool, typer.Option("--test-series", hidden=True)] = False,
) -> Result:
    """Fetch the pinned llama.cpp, patch it and build it for this machine. What is built is not built again."""
    start_s = time.monotonic()
    with _Bar() as bar:
        outcome = building.build(
            backend=backend, source=source, targets=target or (), jobs=jobs, clean=clean, web_ui=ui,
            cmake_args=cmake_arg or (), cuda_archs=cuda_archs or (), portable=portable, test_series=test_series, reporter=bar,
        )  # fmt: skip
    engine = outcome.engine
    elapsed_s = round(time.monotonic() - start_s, 1)
    did = f"built in {elapsed_s:.0f} s" if outcome.built else "already built"
    page = "with" if engine.web_ui else "without"
    return Result(
        "build",
        {
            "id": engine.id,
            "built": outcome.built,
            "backend": engine.backend,
            "portable": engine.portable,
            "cuda_archs": list(engine.cuda_archs),
            "bin_dir": str(engine.bin_dir),
            "tools": list(engine.tools),
            "web_ui": engine.web_ui,
            "elapsed_s": elapsed_s,
        },
        f"{did}: {engine.id} ({engine.backend_text}, {page} the web page)\n{engine.bin_dir}",
    )
