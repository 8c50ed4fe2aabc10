"""``moestream engines``: what is built or downloaded, and which one is in use."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from moestream.errors import MoestreamError
from moestream.result import Result
from moestream.upstream import engines as built


def engines(
    path: Annotated[bool, typer.Option("--path", help="Only the folder with the llama-* programs of the one in use.")] = False,
    backend: Annotated[str | None, typer.Option(help="Only those of this backend.")] = None,
) -> Result:
    """List the engines that were built or downloaded; * marks the one in use."""
    if path:
        chosen = built.in_use(backend)
        return Result("engine-path", {"id": chosen.id, "bin_dir": str(chosen.bin_dir)}, str(chosen.bin_dir))
    try:
        used_id = built.in_use(backend).id
    except MoestreamError:
        used_id = None
        if backend is not None and backend not in built.BACKENDS:
            raise
    found = [engine for engine in built.installed() if backend in (None, engine.backend)]
    rows = [
        f"{'*' if engine.id == used_id else ' '} {engine.id}  {engine.backend_text}, built {engine.built_at[:10]}, "
        f"{len(engine.tools)} programs, {'with' if engine.web_ui else 'without'} web page"
        for engine in found
    ]
    if not found:
        rows = ["no engine is built (moestream build)"]
    elif used_id is None:
        rows.append("none matches this version of moestream and this processor (moestream build)")
    listed = [
        {**asdict(engine), "path": str(engine.path), "bin_dir": str(engine.bin_dir), "in_use": engine.id == used_id}
        for engine in found
    ]
    return Result("engines", {"in_use": used_id, "engines": listed}, "\n".join(rows))
