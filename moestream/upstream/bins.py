"""Prebuilt engines: found in a release, fetched, checked and installed as if they had been built here.

A release is a manifest (:mod:`moestream.upstream.manifest`) and its archives, side by side behind an address or in a folder.
What was fetched lies in a file named by the digest that the manifest gives, so that going on with it later, after
whatever interruption and from whatever server, cannot mix two files up: the digest of the whole decides. An engine appears
under its name by one rename, after its own program has run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import httpx

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import engines, manifest
from moestream.upstream.disk import full_disk_reported, require_free
from moestream.upstream.engines import Engine
from moestream.upstream.machine import Machine, this_machine
from moestream.upstream.manifest import EngineEntry, Manifest
from moestream.upstream.pin import load_pin
from moestream.upstream.releases import BUILD_INSTEAD, MANIFEST_NAME, Origin

# A CUDA engine comes before one for the CPU where it fits; whether others find a device is not known before they run.
_CHOSEN_UNASKED = ("cuda", "cpu")
_TRIES = 3  # requests in a row that bring nothing new
_TIMEOUT = httpx.Timeout(30.0, read=60.0)
_CHECK_TIMEOUT_S = 120


class Reporter(Protocol):
    """Who is told how an installation goes."""

    def step(self, text: str) -> None:
        """A step begins."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Of the step that downloads."""

    def note(self, text: str) -> None:
        """Something to know that is not an error."""


class SilentReporter:
    def step(self, text: str) -> None: ...
    def progress(self, done_bytes: int, total_bytes: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Installed:
    """An engine, whether it was installed just now, and why others of the release were passed over, by their ids."""

    engine: Engine
    installed: bool
    passed_over: dict[str, list[str]]


def install(
    origin: Origin, *, backend: str | None = None, reporter: Reporter | None = None, machine: Machine | None = None
) -> Installed:
    """Install the engine of a release that fits this machine, unless it is there already.

    Args:
        backend: only one of this backend; None takes CUDA where it fits, else the CPU.
        machine: by default the one that this runs on.

    Raises:
        MoestreamError: the release cannot be reached or read, none of its engines fits, an archive is not what the
            manifest says or holds what no engine does, the engine does not run here, the disk is full. No engine
            is there then that was not there before, and one that was is as it was.
    """
    reporter = reporter or SilentReporter()
    if backend is not None and backend not in engines.BACKENDS:
        raise MoestreamError(f"unknown backend {backend!r}", hint=f"one of: {', '.join(engines.BACKENDS)}")
    with (
        _os_errors_reported(),
        httpx.Client(timeout=_TIMEOUT, follow_redirects=True, headers={"Accept-Encoding": "identity"}) as client,
    ):
        reporter.step("reading the manifest")
        release = manifest.parse(*_read_manifest(origin, client))
        entry, passed_over = choose(release, machine or this_machine(), backend, str(origin))
        with _one_at_a_time(paths.downloads_dir(), reporter):
            target = paths.engines_dir() / entry.id
            present = engines.read_engine(target)
            if present and all((present.bin_dir / tool).is_file() for tool in present.tools):
                return Installed(present, False, passed_over)
            if origin.folder is not None:
                return Installed(_install_archive(origin.folder / entry.file, entry, target, reporter), True, passed_over)
            archive = _download(client, f"{origin.url}/{entry.file}", entry, paths.downloads_dir(), reporter)
            engine = _install_archive(archive, entry, target, reporter)
            archive.unlink(missing_ok=True)
            return Installed(engine, True, passed_over)


def choose(release: Manifest, machine: Machine, backend: str | None, where: str) -> tuple[EngineEntry, dict[str, list[str]]]:
    """The engine to install, and why others do not fit, by their ids.

    Of several that fit, the one of the preferred backend, then the one that asks for the newest driver.

    Raises:
        MoestreamError: none fits; the message says why, for each.
    """
    pin, sources = load_pin().version, engines.sources_hash()
    reasons = {
        entry.id: manifest.misfits(entry, machine, source=pin, sources_sha256=sources)
        for entry in release.engines
        if backend in (None, entry.backend)
    }
    fitting = [entry for entry in release.engines if reasons.get(entry.id) == []]
    wanted = (backend,) if backend else _CHOSEN_UNASKED
    for name in wanted:
        if of_backend := [entry for entry in fitting if entry.backend == name]:
            best = max(of_backend, key=lambda entry: manifest.version_numbers(entry.min_driver))
            return best, {id: why for id, why in reasons.items() if why}
    if fitting:  # of a backend that is not taken unasked
        raise MoestreamError(
            f"no engine of {where} for {' or '.join(wanted)} fits this machine{_listed(reasons)}",
            hint=f"moestream download-bins --backend {fitting[0].backend} takes {fitting[0].id}",
        )
    if not reasons:
        has = ", ".join(sorted({entry.backend for entry in release.engines})) or "none at all"
        raise MoestreamError(
            f"{where} has no engine{f' for {backend}' if backend else ''}; it has: {has}",
            hint="moestream build" + (f" --backend {backend}" if backend else ""),
        )
    raise MoestreamError(
        f"no engine of {where} fits this machine{_listed(reasons)}",
        hint="moestream build" + (f" --backend {backend}" if backend else "") + " makes one that does",
    )


def _listed(reasons: Mapping[str, list[str]]) -> str:
    rows = [f"\n  {id}: {'; '.join(why)}" for id, why in reasons.items() if why]
    return ":" + "".join(rows) if rows else ""


@contextlib.contextmanager
def _os_errors_reported() -> Iterator[None]:
    """Folders that cannot be written, and the like; a full disk has been told before."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename
        raise MoestreamError(
            f"cannot install the engine: {f'{place}: ' if place else ''}{error.strerror or error}",
            hint="check who may write there, or set MOESTREAM_HOME to another folder",
        ) from error


@contextlib.contextmanager
def _one_at_a_time(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of downloads; the kernel drops it when this process dies."""
    with full_disk_reported(folder, "downloading"):
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".engines.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note("another download of an engine is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- reading and downloading


def _unreachable(url: str, reason: object) -> MoestreamError:
    return MoestreamError(f"cannot fetch {url}: {reason}", hint=f"check the network and the address, or {BUILD_INSTEAD}")


def _said(failure: Exception | None) -> str:
    if failure is None:
        return "the server sent no more"
    return str(failure) or type(failure).__name__


def _check_status(response: httpx.Response, url: str) -> None:
    """Raise for what asking again will not change. Server errors are :class:`httpx.HTTPStatusError`, and may pass."""
    if response.status_code >= 500:
        raise httpx.HTTPStatusError(f"HTTP {response.status_code}", request=response.request, response=response)
    if response.status_code not in (200, 206):
        raise _unreachable(url, f"HTTP {response.status_code} {response.reason_phrase}".rstrip())


def _read_manifest(origin: Origin, client: httpx.Client) -> tuple[bytes, str]:
    """The text of the manifest and where it is."""
    if origin.folder is not None:
        path = origin.folder / MANIFEST_NAME
        try:
            with path.open("rb") as file:
                return _of_sane_size(file.read(manifest.MAX_BYTES + 1), path), str(path)
        except OSError as error:
            raise MoestreamError(
                f"cannot read {path}: {error.strerror}", hint="name the folder that moestream pack-bins wrote"
            ) from error
    url = f"{origin.url}/{MANIFEST_NAME}"
    failure: Exception | None = None
    for attempt in range(_TRIES):
        time.sleep(attempt)
        text = b""
        try:
            with client.stream("GET", url) as response:
                _check_status(response, url)
                for block in response.iter_raw():
                    text = _of_sane_size(text + block, url)
                return text, url
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            failure = error
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
    raise _unreachable(url, _said(failure)) from failure


def _of_sane_size(text: bytes, where: object) -> bytes:
    if len(text) > manifest.MAX_BYTES:
        raise MoestreamError(f"{where} is no manifest: it is larger than {manifest.MAX_BYTES} bytes", hint="check the address")
    return text


def _not_as_listed(url: object, what: str) -> MoestreamError:
    return MoestreamError(
        f"{url} is not what the manifest lists: {what}",
        hint=f"the server or a proxy changed the file, or the release is broken; {BUILD_INSTEAD}",
    )


def _download(client: httpx.Client, url: str, entry: EngineEntry, folder: Path, reporter: Reporter) -> Path:
    """The archive of an engine, complete; what an earlier run got of it is not fetched again."""
    part = folder / f"{entry.sha256}.part"
    have_bytes = best_bytes = _size(part)
    require_free(folder, max(0, entry.size_bytes - have_bytes), f"downloading {entry.file}")
    reporter.step(f"downloading {entry.file}")
    if 0 < have_bytes < entry.size_bytes:
        reporter.note(f"going on after the {have_bytes} bytes that are there already")
    barren = 0
    while (have_bytes := _size(part)) < entry.size_bytes:  # a file that is too long is found when it is checked
        failure: Exception | None = None
        try:
            with full_disk_reported(folder, "downloading"):
                _request(client, url, entry, part, have_bytes, reporter)
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            failure = error
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        got_bytes = _size(part)
        barren = 0 if got_bytes > best_bytes else barren + 1
        best_bytes = max(best_bytes, got_bytes)
        if barren == _TRIES:
            raise MoestreamError(
                f"the download of {url} broke off after {got_bytes} of {entry.size_bytes} bytes: {_said(failure)}",
                hint=f"run it again, it goes on from there; or {BUILD_INSTEAD}",
            ) from failure
        time.sleep(barren)
    return part


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _request(client: httpx.Client, url: str, entry: EngineEntry, part: Path, have_bytes: int, reporter: Reporter) -> None:
    """Append to ``part`` what one request brings. A server that knows no ranges sends all, and what is there is passed over."""
    headers = {"Range": f"bytes={have_bytes}-"} if have_bytes else {}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 416:
            part.unlink()
            raise _not_as_listed(url, f"it ends before byte {have_bytes} of {entry.size_bytes}")
        _check_status(response, url)
        skip_bytes, total = have_bytes, response.headers.get("content-length", "")
        if response.status_code == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
            if not span or int(span[1]) != have_bytes:
                raise httpx.RemoteProtocolError(f"asked for what follows byte {have_bytes}, it answered with another range")
            skip_bytes, total = 0, span[2]
        if total.isdecimal() and int(total) != entry.size_bytes:
            part.unlink(missing_ok=True)
            raise _not_as_listed(url, f"{total} bytes instead of {entry.size_bytes}")
        with part.open("ab") as out:
            for block in response.iter_raw():  # as it comes: blocks of a given size would be lost half full
                skipped = min(skip_bytes, len(block))
                skip_bytes -= skipped
                new = memoryview(block)[skipped:]
                if have_bytes + len(new) > entry.size_bytes:
                    part.unlink()
                    raise _not_as_listed(url, f"more than {entry.size_bytes} bytes")
                out.write(new)
                have_bytes += len(new)
                reporter.progress(have_bytes, entry.size_bytes)


# ---------------------------------------------------------------- checking and unpacking


def _install_archive(archive: Path, entry: EngineEntry, target: Path, reporter: Reporter) -> Engine:
    """Put a checked archive's engine to ``target``, whole or not at all."""
    folder = target.parent
    with full_disk_reported(folder, "installing the engine"), _opened(archive) as file:
        reporter.step("checking")
        size_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "sha256").hexdigest() if size_bytes == entry.size_bytes else ""
        if digest != entry.sha256:
            if archive.suffix == ".part":  # ours, and of no use any more
                archive.unlink()
            got = (
                f"sha256 {digest} instead of {entry.sha256}" if digest else f"{size_bytes} bytes instead of {entry.size_bytes}"
            )
            raise _not_as_listed(f"{archive.parent / entry.file}" if archive.suffix != ".part" else entry.file, got)
        require_free(folder, entry.installed_bytes, "installing the engine")
        folder.mkdir(parents=True, exist_ok=True)
        for left_by_a_killed_run in folder.glob(".unpack-*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
            fresh = Path(scratch, "engine")
            reporter.step("unpacking")
            file.seek(0)
            unpack(file, entry, fresh)
            _check_engine(fresh, entry)
            reporter.step("starting it once")
            _check_runs(fresh, entry)
            if target.exists():
                target.rename(Path(scratch, "old"))
            fresh.rename(target)
    engine = engines.read_engine(target)
    assert engine is not None  # checked above
    return engine


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[BinaryIO]:
    try:
        file = archive.open("rb")
    except OSError as error:
        raise MoestreamError(
            f"cannot read {archive}: {error.strerror}", hint="a release is a manifest and the files that it lists"
        ) from error
    with file:
        yield file


_MEMBER = re.compile(r"engine\.json|(?:bin|licenses)/[A-Za-z0-9][A-Za-z0-9._+-]*")


def unpack(file: BinaryIO, entry: EngineEntry, destination: Path) -> None:
    """Unpack an archive into the new folder ``destination``.

    It may hold ``engine.json``, plain files in ``bin`` and ``licenses``, and links in ``bin`` to files beside them. Nothing
    else is ever written.

    Raises:
        MoestreamError: it holds something else, or more bytes than listed, or is damaged.
    """

    def refused(member: tarfile.TarInfo, why: str) -> MoestreamError:
        return MoestreamError(f"{entry.file}: {member.name!r} {why}", hint=f"do not use this release; {BUILD_INSTEAD}")

    own_filter = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in the first releases of Python 3.11
    seen: set[str] = set()
    links: list[tarfile.TarInfo] = []
    total_bytes = 0
    destination.mkdir()
    try:
        with tarfile.open(fileobj=file, mode="r:xz") as tar:
            for member in tar:
                if member.isdir() and member.name in ("bin", "licenses"):
                    continue  # made below, with a mode of our own
                if not _MEMBER.fullmatch(member.name):
                    raise refused(member, "is no place for a file of an engine")
                if member.name in seen:
                    raise refused(member, "is there twice")
                seen.add(member.name)
                if member.issym():
                    if not member.name.startswith("bin/") or not _MEMBER.fullmatch(f"bin/{member.linkname}"):
                        raise refused(member, f"is a link to {member.linkname!r}, which is not beside it")
                    links.append(member)
                elif not member.isreg():
                    raise refused(member, "is neither a plain file nor a link to one beside it")
                total_bytes += member.size
                if total_bytes > entry.installed_bytes:
                    raise refused(member, f"makes it larger than the {entry.installed_bytes} bytes of the manifest")
                (destination / member.name).parent.mkdir(exist_ok=True)
                tar.extract(member, destination, set_attrs=not member.issym(), **own_filter)
    except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise MoestreamError(f"{entry.file} is damaged: {error}", hint=f"do not use this release; {BUILD_INSTEAD}") from error
    for member in links:
        if not (destination / member.name).is_file():
            raise refused(member, f"is a link to {member.linkname!r}, which is not there")


def _check_engine(fresh: Path, entry: EngineEntry) -> None:
    """Refuse an archive whose engine is another one than the manifest says, or is incomplete."""
    engine = engines.read_engine(fresh)
    if engine is None:
        raise _not_as_listed(entry.file, "it holds no engine that this version reads")
    for name in ("id", "source", "sources_sha256", "backend", "tools", "web_ui"):
        if getattr(engine, name) != getattr(entry, name):
            raise _not_as_listed(entry.file, f"{name} is {getattr(engine, name)!r} instead of {getattr(entry, name)!r}")
    if not engine.portable or engine.cpu != engines.portable_cpu():
        raise _not_as_listed(entry.file, f"its engine was built for {engine.cpu}")
    for tool in engine.tools:
        if not os.access(engine.bin_dir / tool, os.X_OK) or not (engine.bin_dir / tool).is_file():
            raise _not_as_listed(entry.file, f"{tool} is missing in it, or is no program")


def _check_runs(fresh: Path, entry: EngineEntry) -> None:
    """Refuse an engine that does not start here, whatever the manifest promised."""
    program = fresh / "bin" / ("llama-server" if "llama-server" in entry.tools else entry.tools[0])
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_CHECK_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        reason = f"it says nothing for {_CHECK_TIMEOUT_S} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return
        last = [line.strip() for line in done.stdout.splitlines() if line.strip()][-1:]
        reason = f"{f'ended by signal {-done.returncode}' if done.returncode < 0 else f'exit code {done.returncode}'}"
        reason += f": {last[0]}" if last else ""
    raise MoestreamError(
        f"{entry.id} does not run on this machine: {program.name} --version: {reason}", hint=f"{BUILD_INSTEAD} that does"
    )
