"""``moestream pack-bins``: make a release of the engines that are built here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from moestream import paths
from moestream.commands import options
from moestream.errors import MoestreamError
from moestream.result import Result


def pack_bins(
    output: Annotated[Path, typer.Option(help="The folder of the release.")] = Path("dist/bins"),
    backend: options.OneBackend = "cpu",
    min_driver: Annotated[
        str | None, typer.Option(help="NVIDIA's oldest driver for it.", show_default="as CUDA's version asks for")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put the engine in the place of another build of it in that folder.")
    ] = False,
) -> Result:
    """Pack the engine of build --portable for download-bins: an archive, and its entry in the manifest beside it."""
    from moestream.upstream import pack  # takes time, which other commands need not wait for

    if min_driver is not None and not re.fullmatch(r"[0-9]+(\.[0-9]+)*", min_driver):
        raise MoestreamError(f"--min-driver {min_driver} is no version", hint="for example: --min-driver 580.65.06")
    engine = pack.engine_to_pack(backend)
    print(f"packing {engine.id}, which takes a while", file=sys.stderr, flush=True)
    packed = pack.pack(engine, paths.absolute(output.expanduser()), replace_same=replace, min_driver=min_driver)
    entry = packed.entry
    needs = [f"glibc {entry.min_glibc}"] if entry.min_glibc else []
    needs += [f"driver {entry.min_driver}"] if entry.min_driver else []
    needs += list(entry.system_libraries)
    gpus = f"GPU architectures: {', '.join(entry.gpu_archs)}\n" if entry.gpu_archs else ""
    return Result(
        "pack-bins",
        {
            "id": entry.id,
            "archive": str(packed.archive),
            "manifest": str(packed.manifest),
            "sha256": entry.sha256,
            "size_bytes": entry.size_bytes,
            "installed_bytes": entry.installed_bytes,
            "min_glibc": entry.min_glibc,
            "min_driver": entry.min_driver,
            "cpu_variants": list(entry.cpu_variants),
            "gpu_archs": list(entry.gpu_archs),
            "system_libraries": list(entry.system_libraries),
            "engines_in_manifest": packed.engine_count,
        },
        f"packed {entry.id}: {entry.size_bytes / (1 << 20):.1f} MiB, {entry.installed_bytes / (1 << 20):.1f} MiB installed\n"
        f"needs {', '.join(needs) or 'nothing of the system'}; CPU kernels for {', '.join(entry.cpu_variants)}\n{gpus}"
        f"upload both: {packed.archive}\n             {packed.manifest} (engines: {packed.engine_count})",
    )
