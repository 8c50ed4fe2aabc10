"""Getting upstream's source: the pinned archive through pip, or what the user names with ``--source``.

pip is used so that the user's own configuration (mirrors, proxies, certificates) applies. The digest is
handed to pip too: it then refuses a wrong archive before it looks inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream.disk import MIB, disk_full, full_disk_reported, require_free
from moestream.upstream.pin import Pin

_ARCHIVE_ESTIMATE_BYTES = 80 * MIB
# Present in every llama.cpp, and nowhere else at this place.
_LLAMA_CPP_MARK = "include/llama.h"
# Never part of what is compiled; a user's own checkout has them, sometimes with gigabytes inside.
_NOT_SOURCE = ("build", "node_modules", "__pycache__")


@dataclass(frozen=True)
class Source:
    """Where llama.cpp comes from.

    Attributes:
        path: an archive or a folder.
        label: the pinned version, or ``src.`` and a digest of the content; part of an engine's id.
        pinned: whether this is exactly the pin.
    """

    path: Path
    label: str
    pinned: bool


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _mismatch(file: str, actual: str, pin: Pin) -> MoestreamError:
    return MoestreamError(
        f"{file} is not {pin.package} {pin.version} as pinned: sha256 is {actual}, expected {pin.sha256}",
        hint="the mirror or a proxy changed the file; fetch it from another index, or pass a good copy with --source",
    )


def fetch_pinned(pin: Pin, downloads_dir: Path) -> Path:
    """The pinned source archive, downloaded unless it is in ``downloads_dir`` already.

    Raises:
        MoestreamError: pip is missing, there is no network, the digest differs, the disk is full.
    """
    target = downloads_dir / f"{pin.package}-{pin.version}.tar.gz"
    # A cached copy that has gone bad is simply fetched again.
    if target.is_file() and sha256_of(target) == pin.sha256:
        return target
    require_free(downloads_dir, _ARCHIVE_ESTIMATE_BYTES, f"fetching {pin.package} {pin.version}")
    with full_disk_reported(downloads_dir, "downloading"):
        downloads_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads_dir, prefix=".fetch-") as folder:
            archive = _pip_download(pin, Path(folder))
            actual = sha256_of(archive)
            if actual != pin.sha256:
                raise _mismatch(archive.name, actual, pin)
            archive.replace(target)
    return target


def _pip_download(pin: Pin, folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin.package, "--retries", "2"),
        *("--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder), "-r", str(requirement)),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode == 0:
        archives = list(folder.glob("*.tar.gz"))
        if len(archives) == 1:
            return archives[0]
    raise _pip_failure(done.stdout, pin, folder)


def _pip_failure(output: str, pin: Pin, folder: Path) -> MoestreamError:
    """What pip's output means for the user."""
    if "No module named pip" in output:
        return MoestreamError(
            f"{sys.executable} has no pip, which fetches {pin.package}", hint=f"{sys.executable} -m ensurepip"
        )
    if "No space left on device" in output:
        return disk_full(folder, "downloading")
    if "DO NOT MATCH THE HASHES" in output:
        got = [line.split()[-1] for line in output.splitlines() if line.strip().startswith("Got ")]
        return _mismatch("the downloaded archive", got[0] if got else "another one", pin)
    offline = "check the network and pip's index settings (pip config list), "
    if "Retrying (Retry(" in output:
        # pip goes on to say that it found no version, which would mislead.
        return MoestreamError(
            f"no connection to pip's package index, so {pin.package} {pin.version} was not fetched",
            hint=offline + "or fetch the archive elsewhere and pass it: moestream build --source FILE",
        )
    lines = [line for line in output.splitlines() if line.strip().startswith("ERROR:")] or output.splitlines()
    reason = lines[0].strip().removeprefix("ERROR:").strip() if lines else "pip said nothing"
    return MoestreamError(
        f"pip could not fetch {pin.package} {pin.version}: {reason}",
        hint=offline + "or fetch the archive elsewhere and pass it: moestream build --source FILE",
    )


def resolve_source(source: Path | None, pin: Pin, downloads_dir: Path) -> Source:
    """Where llama.cpp comes from, without touching the network.

    Without ``source`` it is the pin, and ``path`` is where :func:`fetch_pinned` will put the archive. An archive that
    is byte for byte the pinned one counts as the pin, which is how to build without a network.

    Raises:
        MoestreamError: ``source`` does not exist or holds no llama.cpp.
    """
    if source is None:
        return Source(downloads_dir / f"{pin.package}-{pin.version}.tar.gz", pin.version, pinned=True)
    source = paths.absolute(source.expanduser())
    if source.is_file():
        digest = sha256_of(source)
        if digest == pin.sha256:
            return Source(source, pin.version, pinned=True)
        _archive_prefix(source)
        return Source(source, f"src.{digest[:10]}", pinned=False)
    if source.is_dir():
        root = _llama_cpp_in(source)
        digest = hashlib.sha256()
        for file in source_files(root):
            digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_of(file)}\0".encode())
        return Source(root, f"src.{digest.hexdigest()[:10]}", pinned=False)
    raise MoestreamError(f"--source {source}: no such file or folder", hint="name a llama.cpp folder or a .tar.gz of one")


def _llama_cpp_in(folder: Path) -> Path:
    for root in (folder, folder / "vendor" / "llama.cpp"):
        if (root / _LLAMA_CPP_MARK).is_file():
            return root
    raise MoestreamError(
        f"--source {folder}: no llama.cpp in it (looked for {_LLAMA_CPP_MARK} and vendor/llama.cpp/{_LLAMA_CPP_MARK})",
        hint="name the top folder of a llama.cpp checkout",
    )


def source_files(root: Path) -> Iterator[Path]:
    """The regular files of a llama.cpp folder in a fixed order, without hidden ``.git`` and build folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f != ".git" and not f.startswith(_NOT_SOURCE[0]) and f not in _NOT_SOURCE)
        for name in sorted(files):
            path = Path(folder, name)
            if name != ".git" and not path.is_symlink() and not name.endswith(".gguf"):
                yield path


def _open_archive(archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(archive, "r:*")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise MoestreamError(
            f"{archive} is not a readable tar archive: {error}", hint="name a .tar.gz of llama.cpp or of llama-cpp-python"
        ) from error


@contextlib.contextmanager
def _damage_reported(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise MoestreamError(f"{archive} is damaged: {error}", hint="get it again, then run moestream build") from error


def _archive_prefix(archive: Path) -> str:
    """The folder of llama.cpp inside an archive, with a trailing ``/``."""
    with _damage_reported(archive), _open_archive(archive) as tar:
        names = tar.getnames()
    marks = [name for name in names if name.endswith("/" + _LLAMA_CPP_MARK)]
    if not marks:
        raise MoestreamError(
            f"{archive}: no llama.cpp in it (no {_LLAMA_CPP_MARK})", hint="name a .tar.gz of llama.cpp or of llama-cpp-python"
        )
    return min(marks, key=len).removesuffix(_LLAMA_CPP_MARK)


def unpack(source: Source, destination: Path) -> None:
    """Put llama.cpp, and nothing else of the archive or folder, into the new folder ``destination``.

    Only regular files are taken, each below ``destination``. The ``.git`` file that the source distribution carries
    points at a repository that does not exist and would make git fail in the tree; it is left out.

    Raises:
        MoestreamError: the archive is damaged or holds an unsafe name or a link; the disk is full.
    """
    with full_disk_reported(destination, "unpacking llama.cpp"):
        destination.mkdir(parents=True)
        if source.path.is_dir():
            for file in source_files(source.path):
                target = destination / file.relative_to(source.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
            return
        _unpack_archive(source.path, _archive_prefix(source.path), destination)


def _unpack_archive(archive: Path, prefix: str, destination: Path) -> None:
    with _damage_reported(archive), _open_archive(archive) as tar:
        for member in tar:
            if not member.name.startswith(prefix) or member.isdir():
                continue
            relative = PurePosixPath(member.name.removeprefix(prefix))
            if relative.is_absolute() or ".." in relative.parts or not member.isfile():
                raise MoestreamError(
                    f"{archive}: {member.name} is not a plain file inside the archive's folder",
                    hint="do not use this archive",
                )
            if relative.parts[0] == ".git":
                continue
            target = destination.joinpath(*relative.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None  # a regular file has content
            with target.open("wb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(target, (member.mtime, member.mtime))
