"""The manifest of a release of engines: what each archive is, and what it needs of a machine. docs/engines.md describes it.

Reading is strict about what is known and passes over fields that are not, so that later versions can add some; one whose
schema has another number is refused.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from moestream.errors import MoestreamError
from moestream.upstream.machine import Machine, version_numbers

SCHEMA_NAME = "moestream/engine-release"
SCHEMA_VERSION = 1
MAX_BYTES = 4 << 20  # a manifest is some kilobytes; a server that sends a film instead is cut off here

# What becomes the name of a file or folder: never hidden, never a path.
PlainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,199}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# "" where there is no such need
Version = Annotated[str, StringConstraints(pattern=r"^([0-9]+(\.[0-9]+)*)?$")]
# Code for one architecture ("sm_90"), or code that the driver compiles for it and for later ones ("compute_90").
GpuArchitecture = Annotated[str, StringConstraints(pattern=r"^(sm|compute)_[0-9]+[a-z]?$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class EngineEntry(_Strict):
    """One engine of a release.

    Attributes:
        id: as in its ``engine.json``; the name of its folder once installed.
        source: the pinned version.   llama_cpp_commit: what that version carries.
        sources_sha256: of the patch series and the engine's own sources.
        backend: cpu, cuda, …   os: ``linux``.   arch: ``x86_64``, ``aarch64``, as uname says.
        cpu_features: what every processor must have beyond the base of ``arch``, in the words of /proc/cpuinfo.
        cpu_variants: the kernels inside, of which the best that the processor can run is chosen at run time.
        gpu_archs: of a CUDA engine: ``sm_75`` is code for one architecture and the later ones of its generation,
            ``compute_80`` is compiled by the driver for that and all later ones.
        min_glibc: "2.36"; "" for any C library.   min_driver: of NVIDIA; "" for none.
        system_libraries: what must come from the system, because it belongs to a driver.
        file: beside the manifest.   sha256, size_bytes: of it.   installed_bytes: of what it holds.
        tools: the programs.   web_ui: whether llama-server carries its web page.   built_at: ISO 8601, UTC.
    """

    id: PlainName
    source: str
    llama_cpp_commit: str
    sources_sha256: Sha256
    backend: PlainName
    os: PlainName
    arch: PlainName
    cpu_features: tuple[str, ...] = Field(strict=False)
    cpu_variants: tuple[str, ...] = Field(strict=False)
    gpu_archs: tuple[GpuArchitecture, ...] = Field(strict=False)
    min_glibc: Version
    min_driver: Version
    system_libraries: tuple[PlainName, ...] = Field(strict=False)
    file: PlainName
    sha256: Sha256
    size_bytes: int = Field(gt=0)
    installed_bytes: int = Field(gt=0)
    tools: tuple[PlainName, ...] = Field(strict=False, min_length=1)
    web_ui: bool
    built_at: str


class Manifest(_Strict):
    """A release: the version of moestream that it was made with, and its engines, each id once."""

    moestream_version: str
    engines: tuple[EngineEntry, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _each_once(self) -> Manifest:
        for what in ("id", "file"):
            names = [getattr(entry, what) for entry in self.engines]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"two engines have the {what} {twice[0]}")
        return self


def parse(text: bytes | str, where: str) -> Manifest:
    """Read a manifest.

    Args:
        where: it comes from, for messages.

    Raises:
        MoestreamError: it is no manifest, is of another schema, or a field is missing or wrong.
    """
    hint = "check the address; moestream build makes an engine here"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MoestreamError(f"{where} is not JSON: {error}", hint=hint) from error
    schema = values.pop("schema", None) if isinstance(values, dict) else None
    name, _, number = schema.rpartition("/") if isinstance(schema, str) else ("", "", "")
    if name != SCHEMA_NAME or not number.isdecimal():
        raise MoestreamError(f"{where} is no manifest of engines: its schema is {schema!r}", hint=hint)
    if int(number) != SCHEMA_VERSION:
        age = "newer" if int(number) > SCHEMA_VERSION else "older"
        raise MoestreamError(
            f"{where} has the schema {schema}, which is {age} than this moestream reads ({SCHEMA_NAME}/{SCHEMA_VERSION})",
            hint="use the moestream that the release was made for, or build an engine here: moestream build",
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise MoestreamError(f"{where}: {f'{field}: ' if field else ''}{first['msg']}", hint=hint) from error


def render(manifest: Manifest) -> str:
    """The text of a manifest, which :func:`parse` reads."""
    fields = {"schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}", **manifest.model_dump(mode="json")}
    return json.dumps(fields, indent=2) + "\n"


def misfits(entry: EngineEntry, machine: Machine, *, source: str, sources_sha256: str) -> list[str]:
    """Why an engine does not fit this machine and this version of moestream; [] when it does. Pure.

    Args:
        source, sources_sha256: of this version.
    """
    if (entry.os, entry.arch) != (machine.os, machine.arch):
        return [f"it is for {entry.os} on {entry.arch}, this is {machine.os} on {machine.arch}"]
    reasons = []
    if (entry.source, entry.sources_sha256) != (source, sources_sha256):
        reasons.append("it belongs to another version of moestream")
    if missing := [feature for feature in entry.cpu_features if feature not in machine.cpu_features]:
        reasons.append(f"this processor lacks {', '.join(missing)}")
    if entry.min_glibc and not machine.glibc:
        reasons.append(f"it needs glibc {entry.min_glibc}, and this system has another C library")
    elif version_numbers(entry.min_glibc) > version_numbers(machine.glibc):
        reasons.append(f"it needs glibc {entry.min_glibc}, this system has {machine.glibc}")
    if entry.min_driver and not machine.nvidia_driver:
        reasons.append(f"it needs NVIDIA's driver {entry.min_driver}, and nvidia-smi finds none")
    elif version_numbers(entry.min_driver) > version_numbers(machine.nvidia_driver):
        reasons.append(f"it needs NVIDIA's driver {entry.min_driver}, this system has {machine.nvidia_driver}")
    if (
        entry.gpu_archs
        and machine.nvidia_driver
        and not any(_runs_on(entry.gpu_archs, gpu) for gpu in machine.gpu_capabilities)
    ):
        there = ", ".join(f"sm_{gpu.replace('.', '')}" for gpu in machine.gpu_capabilities) or "none"
        reasons.append(f"it has code for {', '.join(entry.gpu_archs)}, the GPUs here are {there}")
    if lacking := [library for library in entry.system_libraries if not machine.has_library(library)]:
        reasons.append(f"the system has no {', '.join(lacking)}")
    return reasons


def _runs_on(archs: tuple[str, ...], capability: str) -> bool:
    """Whether code for these architectures runs on a GPU of this compute capability ("8.6")."""
    major, minor = (*version_numbers(capability), 0, 0)[:2]
    for arch in archs:
        kind, _, number = arch.partition("_")
        exact = number[-1].isalpha()  # "90a": for that one only
        code_major, code_minor = divmod(int(number.rstrip("abcdefghijklmnopqrstuvwxyz")), 10)
        if (code_major, code_minor) == (major, minor):
            return True
        if exact:
            continue
        if kind == "compute" and (code_major, code_minor) <= (major, minor):
            return True
        if kind == "sm" and code_major == major and code_minor <= minor:
            return True
    return False
