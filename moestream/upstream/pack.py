"""Packing a portable engine for a release: an archive, and its entry in the manifest beside it.

What the archive needs of a machine is read from its files: the symbol versions of glibc they ask for, the libraries they name.
Libraries that are neither glibc's nor part of a driver are packed too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from moestream import __version__
from moestream.errors import MoestreamError
from moestream.upstream import engines, manifest
from moestream.upstream.build import PRODUCT_TARGETS, find_cuda_compiler, native_flag
from moestream.upstream.disk import FULL, full_disk_reported
from moestream.upstream.engines import Engine
from moestream.upstream.fetch import sha256_of
from moestream.upstream.machine import version_numbers
from moestream.upstream.manifest import EngineEntry, Manifest
from moestream.upstream.pin import load_pin
from moestream.upstream.releases import MANIFEST_NAME

# The kernels that every processor of an architecture runs; without them an engine starts on some machines only.
_BASE_VARIANTS = {"x86_64": "x64", "aarch64": "armv8.0_1"}
# glibc's own; a program has to use those of the system that it runs on.
_GLIBC = re.compile(r"(?:ld-linux.*|lib(?:c|m|dl|rt|pthread|resolv|util|anl|mvec))\.so\.\d+")
# Belongs to a driver, and has to match it.
_DRIVER = re.compile(r"lib(?:cuda|nvidia-.*|vulkan)\.so\.\d+")
# Drivers of these backends load the system's C++ library into the process; an older one that we bring would be in their way.
# ROCm's libraries are gigabytes and belong to an installation of it.
_FROM_SYSTEM = {
    "vulkan": re.compile(r"lib(?:stdc\+\+|gcc_s)\.so\.\d+"),
    "hip": re.compile(r"lib(?:stdc\+\+|gcc_s|amd.*|hip.*|hsa-.*|roc.*)\.so\.\d+"),
}
# The oldest driver that runs machine code of each CUDA version: NVIDIA, "CUDA Compatibility", minor version compatibility.
_CUDA_DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580"}
# That does not hold for PTX, which needs a driver that knows the toolkit's own version of it: "CUDA Toolkit Release Notes",
# the driver of each toolkit.
_PTX_DRIVERS = {
    "11.8": "520.61.05", "12.0": "525.60.13", "12.1": "530.30.02", "12.2": "535.54.03", "12.3": "545.23.06",
    "12.4": "550.54.14", "12.5": "555.42.02", "12.6": "560.28.03", "12.8": "570.26", "12.9": "575.51.03", "13.0": "580.65.06",
}  # fmt: skip
_LICENCES = {
    r"lib(?:stdc\+\+|gcc_s|gomp|atomic|quadmath)\.so.*": "GCC runtime library: GPL 3 with the GCC Runtime Library Exception 3.1",
    r"lib(?:cudart|cublas|cublasLt|nccl|nvJitLink)\.so.*": "NVIDIA CUDA Toolkit: redistributable under its EULA, attachment A",
}


@dataclass(frozen=True)
class Packed:
    """What was written: the archive's entry, both files, and how many engines the manifest now lists."""

    entry: EngineEntry
    archive: Path
    manifest: Path
    engine_count: int


def engine_to_pack(backend: str) -> Engine:
    """The newest portable engine of this version for ``backend``.

    Raises:
        MoestreamError: there is none; the message says why what there is will not do.
    """
    if backend not in engines.BACKENDS:
        raise MoestreamError(f"unknown backend {backend!r}", hint=f"one of: {', '.join(engines.BACKENDS)}")
    of_backend = [engine for engine in engines.installed() if engine.backend == backend]
    pin, sources = load_pin().version, engines.sources_hash()
    current = [engine for engine in of_backend if (engine.source, engine.sources_sha256) == (pin, sources)]
    if portable := [engine for engine in current if engine.portable]:
        return portable[0]
    build = f"moestream build --portable --backend {backend}"
    if current:
        raise MoestreamError(
            f"{current[0].id} was built for this machine's processor alone and may crash on others: it is not packed",
            hint=build,
        )
    stale = " of this version of moestream and its pin" if of_backend else ""
    raise MoestreamError(f"no portable engine for {backend}{stale} is built", hint=build)


def pack(engine: Engine, output: Path, *, replace_same: bool = False, min_driver: str | None = None) -> Packed:
    """Write the archive of ``engine`` and its entry in the manifest of the folder ``output``, which is made if need be.

    A manifest that is there already gets one entry more when it is of the same version of moestream and of the same
    sources: so the engines of several backends, packed on several machines, become one release. It changes by a rename,
    after the archive is complete.

    Args:
        min_driver: of NVIDIA, for a CUDA engine; by default what its toolkit's version and its code ask for.
        replace_same: an engine with the same id but another content takes the place of the one that is listed.

    Raises:
        MoestreamError: the engine is not portable, is incomplete or finds libraries by absolute paths; a library that it
            needs is not on this machine; the manifest there is of another release; the disk is full.
    """
    if sys.platform != "linux":
        raise MoestreamError(f"packing on {sys.platform} is not supported", hint="pack on Linux")
    _check_portable(engine)
    with (
        full_disk_reported(output, "packing"),
        _locked(output) as folder,
        tempfile.TemporaryDirectory(dir=folder, prefix=".pack-") as scratch,
    ):
        before = _read_manifest(folder)
        _check_same_release(before, engine, folder)
        contents = _collect(engine, Path(scratch, "tree"), min_driver)
        temporary = Path(scratch, "archive")
        _write_archive(contents.root, temporary, engine)
        digest = sha256_of(temporary)
        entry = EngineEntry(
            id=engine.id, source=engine.source, llama_cpp_commit=load_pin().llama_cpp_commit,
            sources_sha256=engine.sources_sha256, backend=engine.backend, os="linux", arch=engine.cpu.rpartition("-")[0],
            cpu_features=(), cpu_variants=contents.cpu_variants, gpu_archs=contents.gpu_archs, min_glibc=contents.min_glibc,
            min_driver=contents.min_driver, system_libraries=contents.system_libraries,
            file=f"moestream-{engine.id}-{digest[:8]}.tar.xz", sha256=digest, size_bytes=temporary.stat().st_size,
            installed_bytes=sum(file.lstat().st_size for file in contents.root.rglob("*") if not file.is_dir()),
            tools=contents.tools, web_ui=engine.web_ui, built_at=engine.built_at,
        )  # fmt: skip
        same = [other for other in before.engines if other.id == entry.id]
        if same and same[0].sha256 != digest and not replace_same:
            raise MoestreamError(
                f"{folder / MANIFEST_NAME} lists another build of {entry.id} already (sha256 {same[0].sha256[:8]}…)",
                hint="--replace puts this one in its place; or give --output another folder",
            )
        others = tuple(other for other in before.engines if other.id != entry.id)
        after = Manifest(moestream_version=__version__, engines=tuple(sorted((*others, entry), key=lambda listed: listed.id)))
        temporary.chmod(0o644)
        temporary.replace(folder / entry.file)
        text = Path(scratch, "manifest")
        text.write_text(manifest.render(after), encoding="utf-8")
        text.replace(folder / MANIFEST_NAME)
        for old in same:
            if old.file != entry.file:
                (folder / old.file).unlink(missing_ok=True)
        return Packed(entry, folder / entry.file, folder / MANIFEST_NAME, len(after.engines))


def _check_portable(engine: Engine) -> None:
    hint = f"moestream build --portable --backend {engine.backend}"
    if not engine.portable:
        raise MoestreamError(
            f"{engine.id} was built for this machine's processor alone and may crash on others: it is not packed", hint=hint
        )
    if flag := native_flag(engine.extra_cmake_args, {}):
        raise MoestreamError(f"{engine.id} was built with {flag}: it may crash on other processors", hint=hint)
    if engine.source != load_pin().version:
        raise MoestreamError(
            f"{engine.id} was built from {engine.source}, not from the pinned {load_pin().version}: nobody could use it",
            hint=hint,
        )
    if engine.sources_sha256 != engines.sources_hash():
        raise MoestreamError(
            f"{engine.id} was built from patches and sources of another version of moestream", hint=hint
        )  # fmt: skip


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[Path]:
    """The folder, made if need be, and nobody else packing into it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        handle = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise MoestreamError(
            f"--output {output}: {error.strerror}", hint="name a folder that may be written; it is made if need be"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield output
    finally:
        os.close(handle)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Manifest(moestream_version=__version__, engines=())
    return manifest.parse(text, str(path))


def _check_same_release(before: Manifest, engine: Engine, folder: Path) -> None:
    """One release has one version and one set of sources; another one's archives must not get mixed in."""
    others = {(other.source, other.sources_sha256) for other in before.engines}
    if before.moestream_version != __version__ or others - {(engine.source, engine.sources_sha256)}:
        raise MoestreamError(
            f"{folder / MANIFEST_NAME} is the manifest of another release"
            f" (moestream {before.moestream_version}, {', '.join(sorted(other.id for other in before.engines)) or 'no engines'})",
            hint="give --output another folder, or move that release away",
        )


@dataclass(frozen=True)
class _Contents:
    """The files of an archive below ``root``, and what was found out about them; see EngineEntry."""

    root: Path
    tools: tuple[str, ...]
    cpu_variants: tuple[str, ...]
    gpu_archs: tuple[str, ...]
    min_glibc: str
    min_driver: str
    system_libraries: tuple[str, ...]


def _collect(engine: Engine, root: Path, min_driver: str | None) -> _Contents:
    """Copy what belongs into the archive of ``engine`` to the new folder ``root``."""
    bin_dir = root / "bin"
    bin_dir.mkdir(parents=True)
    tools = tuple(target for target in PRODUCT_TARGETS if (engine.bin_dir / target).is_file())
    if missing := [target for target in PRODUCT_TARGETS if target not in tools]:
        raise MoestreamError(
            f"{engine.id} lacks {', '.join(missing)}", hint=f"moestream build --portable --clean --backend {engine.backend}"
        )
    for file in sorted(engine.bin_dir.iterdir()):
        if file.name in tools or (".so" in file.suffixes and not file.name.startswith("libmoe-test-")):
            shutil.copy2(file, bin_dir / file.name, follow_symlinks=False)

    arch = engine.cpu.rpartition("-")[0]
    variants = tuple(
        sorted(match[1] for file in bin_dir.iterdir() if (match := re.fullmatch(r"libggml-cpu-(.+)\.so", file.name)))
    )
    if _BASE_VARIANTS.get(arch) not in variants:
        raise MoestreamError(
            f"{engine.id} has no CPU kernels that every {arch} processor runs (found: {', '.join(variants) or 'none'})",
            hint=f"moestream build --portable --clean --backend {engine.backend}",
        )
    system_libraries, brought = _resolve_libraries(engine.backend, bin_dir)
    facts = [_read_elf(file) for file in bin_dir.iterdir() if not file.is_symlink()]
    described = replace(engine, targets=tools, tools=tools, test_series_sha256="")
    engines.write_description(described, root)
    _copy_licences(engine, root / "licenses", brought)
    gpu_archs = _gpu_archs(bin_dir / "libggml-cuda.so") if engine.backend == "cuda" else ()
    return _Contents(
        root=root,
        tools=tools,
        cpu_variants=variants,
        gpu_archs=gpu_archs,
        min_glibc=max((fact.min_glibc for fact in facts), key=version_numbers, default=""),
        min_driver=_min_driver(brought, gpu_archs) if min_driver is None else min_driver,
        system_libraries=system_libraries,
    )


@dataclass(frozen=True)
class _Elf:
    """Of a program or library: the libraries it names, where it looks for them, the newest glibc whose symbols it uses."""

    needed: tuple[str, ...]
    search: str
    min_glibc: str


def _read_elf(path: Path) -> _Elf:
    """Read the dynamic section.

    Raises:
        MoestreamError: it is no ELF file.
    """
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.dynamic import DynamicSection
        from elftools.elf.elffile import ELFFile
        from elftools.elf.gnuversions import GNUVerNeedSection
    except ImportError as error:
        raise MoestreamError(
            "pack-bins needs pyelftools, which is not installed", hint=f"{sys.executable} -m pip install pyelftools"
        ) from error
    needed, search, glibc = [], [], ""
    try:
        with path.open("rb") as file:
            for section in ELFFile(file).iter_sections():
                if isinstance(section, DynamicSection):
                    for tag in section.iter_tags():
                        if tag.entry.d_tag == "DT_NEEDED":
                            needed.append(tag.needed)
                        elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                            search.append(tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath)
                elif isinstance(section, GNUVerNeedSection):
                    names = [version.name for _, versions in section.iter_versions() for version in versions]
                    found = [name.removeprefix("GLIBC_") for name in names if re.fullmatch(r"GLIBC_[0-9.]+", name)]
                    glibc = max([glibc, *found], key=version_numbers)
    except ELFError as error:
        raise MoestreamError(
            f"{path.name} is no program or library: {error}", hint="moestream build --portable --clean"
        ) from error
    return _Elf(tuple(needed), ":".join(search), glibc)


def _resolve_libraries(backend: str, bin_dir: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Copy the libraries that the files of ``bin_dir`` need into it. Returns those of the system that are left to it, and
    those that were copied, by their name, with the name of the file here."""
    from_system: set[str] = set()
    brought: dict[str, str] = {}
    waiting = sorted(file for file in bin_dir.iterdir() if not file.is_symlink())
    while waiting:
        file = waiting.pop()
        elf = _read_elf(file)
        if absolute := [
            folder for folder in elf.search.split(":") if folder and not re.match(r"\$(ORIGIN|\{ORIGIN\})(/|$)", folder)
        ]:
            raise MoestreamError(
                f"{file.name} looks for libraries in {', '.join(absolute)}, which other machines do not have",
                hint="moestream build --portable --clean",
            )
        for name in elf.needed:
            if (bin_dir / name).exists() or _GLIBC.fullmatch(name):
                continue
            if _DRIVER.fullmatch(name) or (backend in _FROM_SYSTEM and _FROM_SYSTEM[backend].fullmatch(name)):
                from_system.add(name)
                continue
            found = _find_library(name, file)
            shutil.copy2(found, bin_dir / name)
            (bin_dir / name).chmod(0o755)
            brought[name] = found.name
            waiting.append(bin_dir / name)
    return tuple(sorted(from_system)), dict(sorted(brought.items()))


def _min_driver(brought: Mapping[str, str], gpu_archs: tuple[str, ...]) -> str:
    """The oldest driver of NVIDIA that runs what was built with the CUDA runtime among the libraries; "" without one."""
    for name, file in brought.items():
        if match := re.fullmatch(r"libcudart\.so\.(\d+)", name):
            # The file's name carries the whole version: libcudart.so.12.8.57
            whole = re.fullmatch(r"libcudart\.so\.(\d+\.\d+)\..+", file)
            with_ptx = any(arch.startswith("compute_") for arch in gpu_archs)
            driver = _PTX_DRIVERS.get(whole[1] if whole else "") if with_ptx else _CUDA_DRIVERS.get(match[1])
            if driver is None:
                raise MoestreamError(
                    f"which driver the code made with {file} needs is not known",
                    hint="NVIDIA's release notes of that toolkit say it: moestream pack-bins --min-driver VERSION",
                )
            return driver
    return ""


def _cuda_toolkit() -> Path:
    """The folder of the CUDA toolkit that builds take, or that CUDA_HOME names where it is one without a compiler."""
    compiler, _ = find_cuda_compiler()
    if compiler:
        return Path(compiler).resolve().parents[1]
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def _find_library(name: str, needed_by: Path) -> Path:
    """Where this machine's loader finds a library."""
    searched = f"{os.environ.get('LD_LIBRARY_PATH', '')}:{_cuda_toolkit()}/lib64".strip(":")
    environment = {**os.environ, "LD_LIBRARY_PATH": searched}
    done = subprocess.run(["ldd", needed_by], env=environment, capture_output=True, text=True, errors="replace")
    if match := re.search(rf"^\s*{re.escape(name)} => (/.+) \(0x", done.stdout, re.MULTILINE):
        return Path(match[1]).resolve()
    raise MoestreamError(
        f"{needed_by.name} needs {name}, which this machine does not have",
        hint="install it, or set LD_LIBRARY_PATH to its folder",
    )


def _gpu_archs(library: Path) -> tuple[str, ...]:
    """The architectures that a CUDA library has code for, as cuobjdump lists them."""
    toolkit = _cuda_toolkit()
    program = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=f"{toolkit}/bin")
    if not program:
        raise MoestreamError(
            f"cuobjdump not found (looked on PATH and in {toolkit}/bin); it says which GPUs {library.name} has code for",
            hint="install the CUDA toolkit and set CUDA_HOME",
        )
    found: set[str] = set()
    for listing, kind in (("--list-elf", "sm"), ("--list-ptx", "compute")):
        done = subprocess.run([program, listing, library], capture_output=True, text=True, errors="replace")
        found |= {f"{kind}_{number}" for number in re.findall(r"\.sm_(\d+[a-z]?)\.(?:cubin|ptx)", done.stdout)}
    if not found:
        raise MoestreamError(
            f"{program} finds no GPU code in {library.name}", hint="moestream build --portable --clean --backend cuda"
        )
    return tuple(sorted(found, key=lambda arch: (arch.partition("_")[0], len(arch), arch)))


def _copy_licences(engine: Engine, folder: Path, brought: Iterable[str]) -> None:
    """The licences of what is in the archive, which they oblige us to hand on."""
    source = engine.path / "licenses"
    if not (source / "llama.cpp").is_file():
        raise MoestreamError(
            f"{engine.id} has no licences beside it, which belong into the archive",
            hint=f"moestream build --portable --clean --backend {engine.backend}",
        )
    folder.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, folder / file.name)
    rows = []
    for name in brought:
        licence = next((text for pattern, text in _LICENCES.items() if re.fullmatch(pattern, name)), None)
        if licence is None:
            raise MoestreamError(
                f"the engine needs {name}, and under which licence it may be handed on is not known",
                hint="build without what needs it: moestream build --portable --cmake-arg -D…",
            )
        rows.append(f"bin/{name}: {licence}\n")
    if rows:
        (folder / "runtime-libraries").write_text("".join(rows), encoding="utf-8")


def _write_archive(root: Path, archive: Path, engine: Engine) -> None:
    """The same files give the same bytes, whoever packs them and when."""
    built_s = int(datetime.fromisoformat(engine.built_at).timestamp())
    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(root.rglob("*")):
            member = tar.gettarinfo(path, path.relative_to(root).as_posix())
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = built_s
            member.mode = 0o755 if path.is_dir() or path.parent.name == "bin" else 0o644
            if path.is_file() and not path.is_symlink():
                # gettarinfo makes a link of a second name of one file
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.stat().st_size
                with path.open("rb") as content:
                    tar.addfile(member, content)
            else:
                tar.addfile(member)
