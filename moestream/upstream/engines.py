"""Engines, built here or downloaded: one folder each below the data folder, described by its ``engine.json``.

An engine's id says everything that its content depends on: the pin, the patches and the engine's own sources, the
backend, and the processor it was compiled for, or that it is for all of an architecture. So an engine is built once, and
one that is out of date is simply another one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream.patches import read_series, series_hash
from moestream.upstream.pin import load_pin
from moestream.upstream.releases import releases_url

BACKENDS = ("cuda", "hip", "metal", "vulkan", "cpu")  # in order of preference
SCHEMA = "moestream/engine/1"


@dataclass(frozen=True)
class Engine:
    """A built engine.

    Attributes:
        id: the name of its folder.
        path: its folder.
        source: the pinned version, or ``src.DIGEST`` when built with ``--source``.
        sources_sha256: of the patch series and the engine's own sources.
        backend: one of BACKENDS.
        cpu: the processor kind, see :func:`cpu_kind` and :func:`portable_cpu`.
        portable: whether it runs on any processor of that architecture.
        built_at: ISO 8601, UTC.
        targets: what was asked for.   tools: the programs in ``bin_dir``.
        cmake_args: the full list passed to cmake.   extra_cmake_args: those named by the user.
        web_ui: whether llama-server carries its web page.
        cuda_archs: the cards that a cuda engine has code for, as cmake writes them, for example ``90-real``; () elsewhere.
        test_series_sha256: of the test-only patches and our sources of the test programs; "" without them.
    """

    id: str
    path: Path
    source: str
    sources_sha256: str
    backend: str
    cpu: str
    built_at: str
    targets: tuple[str, ...]
    tools: tuple[str, ...]
    cmake_args: tuple[str, ...]
    extra_cmake_args: tuple[str, ...]
    web_ui: bool
    test_series_sha256: str
    portable: bool = False
    cuda_archs: tuple[str, ...] = ()

    @property
    def backend_text(self) -> str:
        """The backend as people read it: ``cpu``, or ``cuda for 90-real``."""
        return f"{self.backend} for {', '.join(self.cuda_archs)}" if self.cuda_archs else self.backend

    @property
    def bin_dir(self) -> Path:
        """The folder with the llama-* programs and the libraries they load."""
        return self.path / "bin"

    def tool(self, name: str) -> Path:
        """The path of a program, for example ``llama-server``.

        Raises:
            MoestreamError: this engine was built without it.
        """
        path = self.bin_dir / name
        if not path.is_file():
            raise MoestreamError(
                f"the engine {self.id} has no {name}",
                hint=f"moestream build --backend {self.backend} --target {name}",
            )
        return path


def cpu_kind() -> str:
    """The machine and a digest of its instruction set extensions: code compiled for one may crash on another."""
    features = ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE):
            features = " ".join(sorted(match[1].split()))
    except OSError:
        features = platform.processor()
    return f"{platform.machine() or sys.platform}-{hashlib.sha256(features.encode()).hexdigest()[:6]}"


def portable_cpu() -> str:
    """The kind of an engine that runs on every processor of this architecture."""
    return f"{platform.machine() or sys.platform}-portable"


def engine_source_files(folder: Path) -> list[Path]:
    """The files of ``engine/`` that an engine is compiled from; prose is left out."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".md" and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def sources_hash() -> str:
    """A digest of the product's patch series and of the engine's sources, as shipped with this version."""
    engine = paths.engine_source_dir()
    digest = hashlib.sha256(series_hash(read_series(paths.patches_dir() / "series")).encode())
    for file in engine_source_files(engine):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(engine).as_posix()}\0{content}\0".encode())
    return digest.hexdigest()


def engine_id(
    source: str,
    sources_sha256: str,
    backend: str,
    cpu: str,
    extra_cmake_args: tuple[str, ...] = (),
    cuda_archs: tuple[str, ...] = (),
) -> str:
    """The id of the engine with these properties."""
    name = f"{source}-{sources_sha256[:10]}-{'-'.join((backend, *cuda_archs))}-{cpu}"
    if extra_cmake_args:
        name += "-" + hashlib.sha256("\0".join(extra_cmake_args).encode()).hexdigest()[:6]
    return name


def write_description(engine: Engine, folder: Path) -> None:
    """Write ``engine.json`` into ``folder``."""
    values = {name: value for name, value in asdict(engine).items() if name != "path"}
    (folder / "engine.json").write_text(json.dumps({"schema": SCHEMA, **values}, indent=2) + "\n", encoding="utf-8")


def read_engine(folder: Path) -> Engine | None:
    """The engine in ``folder``; None when there is none that this version understands."""
    try:
        values = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            return None
        lists = [field.name for field in fields(Engine) if field.type == "tuple[str, ...]"]
        values |= {name: tuple(values.get(name, ())) for name in lists}
        texts = [values[field.name] for field in fields(Engine) if field.type == "str"]
        texts += itertools.chain.from_iterable(values[name] for name in lists)
        return Engine(path=folder, **values) if all(isinstance(text, str) for text in texts) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def installed() -> list[Engine]:
    """Every engine that is there, the preferred one first: by backend, the pin before ``--source``, one for this processor
    alone before a portable one, then the newest."""
    folder = paths.engines_dir()
    found = [read_engine(path) for path in folder.iterdir()] if folder.is_dir() else []
    engines = [engine for engine in found if engine is not None]
    engines.sort(key=lambda engine: engine.built_at, reverse=True)
    engines.sort(key=lambda engine: (_preference(engine.backend), engine.source.startswith("src."), engine.portable))
    return engines


def _preference(backend: str) -> int:
    return BACKENDS.index(backend) if backend in BACKENDS else len(BACKENDS)


def usable(engines: list[Engine], *, pinned_version: str, sources_sha256: str, cpus: Collection[str]) -> list[Engine]:
    """Those that match this version of moestream and this processor, in the order given."""
    return [
        engine
        for engine in engines
        if engine.sources_sha256 == sources_sha256
        and engine.cpu in cpus
        and (engine.source == pinned_version or engine.source.startswith("src."))
    ]


def in_use(backend: str | None = None) -> Engine:
    """The engine that moestream runs: the preferred one that matches this version and this processor.

    Args:
        backend: only an engine of this backend.

    Raises:
        MoestreamError: there is none, or the backend is unknown.
    """
    if backend is not None and backend not in BACKENDS:
        raise MoestreamError(f"unknown backend {backend!r}", hint=f"one of: {', '.join(BACKENDS)}")
    everything = installed()
    matching = usable(
        everything, pinned_version=load_pin().version, sources_sha256=sources_hash(), cpus=(cpu_kind(), portable_cpu())
    )
    for engine in matching:
        if backend in (None, engine.backend):
            return engine
    of_backend = f" for {backend}" if backend else ""
    option = f" --backend {backend}" if backend else ""
    stale = " that matches this version of moestream and this processor" if everything else ""
    raise MoestreamError(
        f"no engine{of_backend} is built{stale}",
        hint="moestream build" + option + (f", or moestream download-bins{option}" if releases_url(os.environ) else ""),
    )
