"""``moestream build``: fetch, patch and compile the engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moestream.commands import options
from moestream.progress import Bar
from moestream.result import Result
from moestream.upstream import build as building


def build(
    backend: options.OneBackend = "cpu",
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
    with Bar(of_bytes=False) as bar:
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
