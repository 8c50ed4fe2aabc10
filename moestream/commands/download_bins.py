"""``moestream download-bins``: install an engine that was built elsewhere."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from moestream.errors import MoestreamError
from moestream.progress import Bar
from moestream.result import Result
from moestream.upstream import engines
from moestream.upstream.releases import resolve_origin


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
    with Bar(of_bytes=True) as bar:
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
