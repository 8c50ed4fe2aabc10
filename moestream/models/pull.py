"""Pulling a model: choose, check, download, put in place; and removing what was pulled."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from moestream import paths
from moestream.errors import MoestreamError
from moestream.models import download, names
from moestream.models.hub import Hub, RemoteFile
from moestream.models.names import Reference
from moestream.models.store import Entry, ModelFile, ModelStore, PulledModel, check_unused, size_of, writing
from moestream.server import report
from moestream.upstream.disk import full_disk_reported, require_free

_MARGIN_BYTES = 64 << 20  # for the file system's own needs, and records
_ELSEWHERE = "pull to another disk: --to DIR"


class Reporter(Protocol):
    """Who is told how a pull goes on."""

    def step(self, text: str) -> None: ...

    def begin(self, text: str, done_bytes: int, total_bytes: int) -> None: ...

    def advance(self, n_bytes: int) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a pull did.

    Attributes:
        downloaded_bytes: what was fetched now.
        resumed_bytes: what an earlier, interrupted pull had fetched.
    """

    model: PulledModel
    downloaded_bytes: int
    resumed_bytes: int


def pull(reference: Reference, *, to: Path | None, reporter: Reporter, store: ModelStore | None = None) -> Outcome:
    """Download a model; what is there already is not downloaded again.

    Args:
        to: the folder below which the files are put, by their paths in the repository; None for ``MODELS/OWNER/REPO``.

    Raises:
        MoestreamError: see ``Hub``, ``names.choose``, ``download.fetch``; the disk is too small, a file is in the way, the model is in
            another folder or in use. What came so far stays, and the next pull goes on from there.
    """
    store = store or ModelStore()
    reporter.step(f"asking for {reference.repo_id}")
    hub = Hub()
    listing = hub.listing(reference.repo_id)
    remote = {file.path: file for file in listing.files}
    models = names.candidates(remote)
    sizes = {path: max(0, file.size_bytes) for path, file in remote.items()}
    chosen = names.choose(reference, models, sizes, report.size)
    files = tuple(_model_file(hub, reference, remote[path]) for path in chosen.files)
    name = f"{reference.repo_id}:{chosen.label}"
    with store.locked(name):
        old = store.entry(name)
        folder = _folder(store, reference, old, to)
        repo_id = old.model.repo_id if old else reference.repo_id  # they may differ in case
        new = PulledModel(repo_id, chosen.label, chosen.quant, listing.commit, str(folder), files, time.time())
        return _Pull(hub, store, new, old, reporter).run()


def _model_file(hub: Hub, reference: Reference, file: RemoteFile) -> ModelFile:
    names.check_path(file.path)
    if not file.digest:
        raise MoestreamError(
            f"{hub.endpoint} does not say size and sha256 of {reference.repo_id}/{file.path}: what is downloaded could not be checked",
            hint="use another mirror (HF_ENDPOINT), or download the file by hand",
        )
    return ModelFile(file.path, file.size_bytes, file.digest)


def _folder(store: ModelStore, reference: Reference, old: Entry | None, to: Path | None) -> Path:
    """Where the files go: where they are, or where they are asked to be."""
    wanted = Path(os.path.normpath(paths.absolute(to.expanduser()))) if to is not None else None
    if old is not None:
        there = Path(old.model.folder)
        if wanted is not None and wanted != there:
            raise MoestreamError(
                f"--to {to}: {old.name} is in {there} already", hint=f"remove it there first: moestream rm {old.name}"
            )
        return there
    folder = wanted or store.folder / reference.owner / reference.repo
    if os.path.lexists(folder) and not folder.is_dir():
        flag = f"--to {to}" if to is not None else str(folder)
        raise MoestreamError(f"{flag}: it is no folder", hint="name a folder; one that is not there is made")
    return folder


class _Pull:
    """One pull, under the lock of its name."""

    def __init__(self, hub: Hub, store: ModelStore, new: PulledModel, old: Entry | None, reporter: Reporter) -> None:
        self.hub, self.store, self.new, self.reporter = hub, store, new, reporter
        self.whole = old.whole if old else None
        self.pending = old.pending if old else None

    def run(self) -> Outcome:
        missing = [file for file in self.new.files if not self._is_there(file)]
        self.new = replace(self.new, files=tuple(self._owned(file, file in missing) for file in self.new.files))
        missing = [replace(file, made=True) for file in missing]
        resumed, downloaded = self._download(missing) if missing else (0, 0)
        self._put_in_place(missing)
        return Outcome(self.new, downloaded, resumed)

    def _recorded(self, model: PulledModel | None, file: ModelFile) -> ModelFile | None:
        return next((f for f in model.files if f.path == file.path), None) if model else None

    def _is_there(self, file: ModelFile) -> bool:
        """Whether a file is in its place already.

        Raises:
            MoestreamError: something else is, which pull has not put there.
        """
        path = self.new.path(file)
        whole = self._recorded(self.whole, file)
        if not os.path.lexists(path):
            return False
        if size_of(path) == file.size_bytes:
            if whole and whole.digest == file.digest:
                return True
            self.reporter.step(f"comparing {path.name}, which is there, with the hub's")
            with self._disk("reading"):
                if download.has_content(file, path):
                    return True
        ours = (whole and whole.made) or self._recorded(self.pending, file)
        if not ours or path.is_dir():
            raise MoestreamError(
                f"{path} is there, and is not the file of {self.new.name}", hint=f"move it away, or {_ELSEWHERE}"
            )
        return False

    def _owned(self, file: ModelFile, is_missing: bool) -> ModelFile:
        """Note whether the file was there before moestream had anything to do with it."""
        record = self._recorded(self.whole, file) or self._recorded(self.pending, file)
        return replace(file, made=is_missing or (record is not None and record.made))

    def _download(self, missing: Sequence[ModelFile]) -> tuple[int, int]:
        """Fetch into parts; returns bytes that were there and bytes that came."""
        new = self.new
        replaced = [path for path in (self.new.path(file) for file in missing) if os.path.lexists(path)]
        check_unused(new.name, replaced, "replaced by a newer version")
        done = sum(min(size_of(new.part(file)) or 0, file.size_bytes) for file in missing)
        total = sum(file.size_bytes for file in missing)
        folder = Path(new.folder)
        require_free(folder, total - done + _MARGIN_BYTES, f"downloading {new.name}", _ELSEWHERE)
        self.store.write(new, pending=True)
        self._remove_old_parts()
        self.reporter.begin(f"downloading {new.name}", done, total)
        resumed = 0
        for file in missing:
            part = new.part(file)
            with self._disk("downloading"):
                part.parent.mkdir(parents=True, exist_ok=True)
                resumed += download.fetch(self.hub, new.repo_id, new.commit, file, part, self.reporter.advance)
        return resumed, total - resumed

    def _put_in_place(self, missing: Sequence[ModelFile]) -> None:
        """All files at once, as near as one gets: until then the older version is whole."""
        with self._disk("putting files in place"):
            for file in missing:
                os.replace(self.new.part(file), self.new.path(file))
        self._remove_old_parts()
        self.store.write(self.new, pending=False)
        if self.whole:  # shards that the newer version has no more
            kept = set(self.new.paths)
            _remove_files(self.whole, [f for f in self.whole.files if self.whole.path(f) not in kept])

    def _remove_old_parts(self) -> None:
        """Those of a download that began before the hub had a newer version."""
        kept = {self.new.part(file) for file in self.new.files}
        for file in self.pending.files if self.pending else ():
            if (part := self.new.part(file)) not in kept:
                _unlink(part)

    @contextlib.contextmanager
    def _disk(self, doing: str) -> Iterator[None]:
        folder = Path(self.new.folder)
        with writing(folder), full_disk_reported(folder, f"{doing} {self.new.name}", _ELSEWHERE):
            yield


@dataclass(frozen=True)
class Removed:
    """What a removal did.

    Attributes:
        files: what is gone.
        kept: what is left, because pull did not make it, or because it is not what pull made.
        freed_bytes: without files that have another name as well (hard links).
    """

    files: tuple[Path, ...]
    kept: tuple[Path, ...]
    freed_bytes: int


def removable(entry: Entry) -> tuple[list[Path], list[Path]]:
    """The files that a removal would take away, and those of the model that it would leave."""
    gone: list[Path] = []
    kept: list[Path] = []
    for model in filter(None, (entry.whole, entry.pending)):
        for file in model.files:
            path, part = model.path(file), model.part(file)
            if os.path.lexists(part) and part not in gone:
                gone.append(part)
            if not os.path.lexists(path) or path in gone or path in kept:
                continue
            recorded = [f for m in (entry.whole, entry.pending) if m for f in m.files if m.path(f) == path]
            ours = any(f.made and size_of(path) == f.size_bytes for f in recorded) and not path.is_symlink()
            (gone if ours else kept).append(path)
    return gone, kept


def remove(entry: Entry, store: ModelStore, confirm: Callable[[list[Path], list[Path]], bool]) -> Removed | None:
    """Remove what pull made of a model.

    Args:
        confirm: is told the files that would go and those that would stay; None is returned when it says no.

    Raises:
        MoestreamError: the model is in use or being pulled, or a file cannot be removed. The record stays until all is gone.
    """
    with store.locked(entry.name):
        entry = store.entry(entry.name) or entry
        gone, kept = removable(entry)
        check_unused(entry.name, [*gone, *kept], "removed")
        if not confirm(gone, kept):
            return None
        check_unused(entry.name, [*gone, *kept], "removed")  # the question may have stood for long
        freed = sum(_unlink(path) for path in gone)
        for model in filter(None, (entry.whole, entry.pending)):
            _remove_folders(model, store)
        store.forget(entry.name, pending=True)
        store.forget(entry.name, pending=False)
    return Removed(tuple(gone), tuple(kept), freed)


def _unlink(path: Path) -> int:
    """Remove a file; the bytes that it frees."""
    try:
        status = path.lstat()
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise MoestreamError(
            f"cannot remove {path}: {error.strerror or error}", hint="check the permissions, then run it again"
        ) from error
    return status.st_size if status.st_nlink == 1 else 0


def _remove_files(model: PulledModel, files: Sequence[ModelFile]) -> None:
    for file in files:
        path = model.path(file)
        if file.made and size_of(path) == file.size_bytes and not path.is_symlink():
            _unlink(path)


def _remove_folders(model: PulledModel, store: ModelStore) -> None:
    """Take away folders that are empty now: those below the model's, and OWNER/REPO in the folder of models."""
    top = Path(model.folder)
    folders = {parent for path in model.paths for parent in path.parents if top in parent.parents}
    if store.folder in top.parents:
        folders |= {top, *(parent for parent in top.parents if store.folder in parent.parents)}
    for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
        with contextlib.suppress(OSError):  # there is something else in it
            folder.rmdir()
