"""What was pulled: records of it, the files they name, and finding them again.

A model has up to two records in ``MODELS/.pulled``, schema ``moestream/pulled-model/1``: ``KEY.json`` of files that are whole,
checked and in their place, and ``KEY.pending.json`` of a download that has begun and not ended. A record appears and
changes in one step, before the first file that only it names and after the last: whatever ends a process, everything that
it has written can be found, continued and removed. Both may be there, while a newer version is downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moestream import gguf_facts, paths
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.models import names
from moestream.models.names import Candidate, Reference
from moestream.routing.files import replacing
from moestream.server.records import RecordStore, ServerRecord

SCHEMA = "moestream/pulled-model/1"
_BY_HAND = "look at it and remove it by hand"


@dataclass(frozen=True)
class ModelFile:
    """One file of a pulled model.

    Attributes:
        path: in the repository, and below the folder of the model.
        digest: ``sha256:…`` as the hub says it, or ``git-sha1:…`` for a file that the hub keeps in git itself.
        made: whether pull wrote it; one that was there already is not removed.
    """

    path: str
    size_bytes: int
    digest: str
    made: bool = True


@dataclass(frozen=True)
class PulledModel:
    """A record.

    Attributes:
        repo_id: ``OWNER/REPO`` as it was asked for.
        label: which of the repository's models; see ``names.Candidate``.
        quant: empty where its name tells none.
        commit: of the repository.
        folder: absolute.
        files: all shards, in order.
        pulled_s: seconds since the epoch.
    """

    repo_id: str
    label: str
    quant: str
    commit: str
    folder: str
    files: tuple[ModelFile, ...]
    pulled_s: float

    @property
    def name(self) -> str:
        return f"{self.repo_id}:{self.label}"

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def path(self, file: ModelFile) -> Path:
        return Path(self.folder, *file.path.split("/"))

    def part(self, file: ModelFile) -> Path:
        """Where a download collects the bytes; its name says of which content, so that versions never mix."""
        path = self.path(file)
        return path.with_name(f"{path.name}.{file.digest.partition(':')[2][:16]}.incomplete")

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.path(file) for file in self.files)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PulledModel:
        """Read a record back.

        Raises:
            ValueError: it is no record, or names files outside of its folder.
        """
        raw: Any = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        try:
            files = tuple(ModelFile(**file) for file in raw.pop("files"))
            model = cls(**raw, files=files)
        except (KeyError, TypeError) as error:
            raise ValueError(f"incomplete record: {error}") from error
        strings = (
            model.repo_id,
            model.label,
            model.quant,
            model.commit,
            model.folder,
            *(v for f in files for v in (f.path, f.digest)),
        )
        if not all(isinstance(value, str) for value in strings) or not all(
            type(file.size_bytes) is int and type(file.made) is bool for file in files
        ):
            raise ValueError("incomplete record")
        if (
            not files
            or not os.path.isabs(model.folder)
            or not all(re.fullmatch(r"[a-z0-9-]+:[0-9a-f]+", f.digest) for f in files)
        ):
            raise ValueError("incomplete record")
        try:
            names.parse(model.repo_id)
            for file in files:
                names.check_path(file.path)
        except MoestreamError as error:
            raise ValueError(error.message) from error
        return model


@dataclass(frozen=True)
class Entry:
    """All that is known of one name.

    Attributes:
        whole: the record of what is in its place.
        pending: the record of a download that has not ended.
    """

    whole: PulledModel | None = None
    pending: PulledModel | None = None

    @property
    def model(self) -> PulledModel:
        """The record to go by."""
        model = self.whole or self.pending
        assert model is not None
        return model

    @property
    def name(self) -> str:
        return self.model.name

    def problem(self) -> str | None:
        """What is wrong with files that were whole once; None when nothing is, or when none ever were."""
        if self.whole is None:
            return None
        for file in self.whole.files:
            path = self.whole.path(file)
            size = size_of(path)
            if size != file.size_bytes:
                return f"{path} is missing" if size is None else f"{path} has {size} bytes and not {file.size_bytes}"
        return None

    def state(self) -> str:
        """``complete``, ``partial`` or ``damaged``."""
        if self.whole is None:
            return "partial"
        return "damaged" if self.problem() else "complete"

    def present_bytes(self) -> int:
        """How much of the model is on disk."""
        model = self.model
        total = 0
        for file in model.files:
            size = size_of(model.path(file))
            total += size if size is not None else min(size_of(model.part(file)) or 0, file.size_bytes)
        return total

    def facts(self) -> GgufFacts:
        """What its header says.

        Raises:
            MoestreamError: see ``gguf_facts.read``.
        """
        return gguf_facts.read(self.model.paths[0])


@dataclass(frozen=True)
class BrokenEntry:
    """A file in the place of a record that cannot be read as one."""

    path: Path
    reason: str


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


class ModelStore:
    """The folder of pulled models.

    Args:
        folder: default ``paths.models_dir()``. Created when something is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or paths.models_dir()
        self.records = self.folder / ".pulled"

    def _key(self, name: str) -> str:
        name = name.casefold()  # as the hub, which knows no two repositories that differ in case alone
        return f"{re.sub(r'[^a-z0-9._-]+', '-', name)[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"

    def all(self) -> list[Entry | BrokenEntry]:
        """Every model, by name; what cannot be read last."""
        found: dict[str, dict[str, PulledModel]] = {}
        broken: list[Entry | BrokenEntry] = []
        try:
            files = sorted(self.records.glob("*.json"))
        except OSError:
            files = []
        for file in files:
            try:
                model = PulledModel.from_json(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                broken.append(BrokenEntry(file, getattr(error, "strerror", None) or names.printable(str(error))))
                continue
            kind = "pending" if file.name.endswith(".pending.json") else "whole"
            found.setdefault(model.name.casefold(), {})[kind] = model
        return [*(Entry(**found[name]) for name in sorted(found)), *broken]

    def entry(self, name: str) -> Entry | None:
        """The model of exactly this name (``Entry.name``), case ignored."""
        return next((e for e in self.all() if isinstance(e, Entry) and e.name.casefold() == name.casefold()), None)

    def find(self, reference: Reference) -> Entry | None:
        """The pulled model that a reference names; None where none is pulled.

        Raises:
            MoestreamError: it may be any of several.
        """
        entries = [e for e in self.all() if isinstance(e, Entry)]
        of_repo = [e for e in entries if e.model.repo_id.casefold() == reference.repo_id.casefold()]
        if reference.label is not None:
            models = [_candidate(e.model) for e in of_repo]
            found = names.matching(reference.label, models)
            of_repo = [e for e, model in zip(of_repo, models, strict=True) if model in found]
        if len(of_repo) > 1:
            raise MoestreamError(
                f"'{reference}' may be any of {len(of_repo)} models that were pulled: {', '.join(e.name for e in of_repo)}",
                hint=f"name one of them, for example {of_repo[0].name}",
            )
        return of_repo[0] if of_repo else None

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Keep others from changing the files of a model meanwhile.

        Raises:
            MoestreamError: somebody else does that now.
        """
        with writing(self.records):
            self.records.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.records / f"{self._key(name)}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise MoestreamError(
                    f"another moestream is pulling or removing {name} right now",
                    hint="wait for it, or end it with Ctrl-C there",
                ) from error
            yield
        finally:
            os.close(lock)

    def write(self, model: PulledModel, *, pending: bool) -> None:
        """Write a record, in one step. That of a whole model takes the place of the pending one.

        Raises:
            MoestreamError: it cannot be written.
        """
        with writing(self.records):
            self.records.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(model.name, pending=pending), "record") as fresh:
            fresh.write_text(model.to_json(), encoding="utf-8")
        if not pending:
            self.forget(model.name, pending=True)

    def forget(self, name: str, *, pending: bool) -> None:
        """Take a record away."""
        path = self._path(name, pending=pending)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise MoestreamError(f"cannot remove {path}: {error.strerror or error}", hint=_BY_HAND) from error

    def _path(self, name: str, *, pending: bool) -> Path:
        return self.records / f"{self._key(name)}{'.pending' if pending else ''}.json"


def _candidate(model: PulledModel) -> Candidate:
    files = tuple(file.path for file in model.files)
    (read,) = names.candidates(files) or [Candidate("", "", files)]
    return Candidate(read.stem, model.quant, files, label=model.label)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell a failure to write as one."""
    try:
        yield
    except OSError as error:
        raise MoestreamError(
            f"cannot write {error.filename or path}: {error.strerror or error}",
            hint="check the permissions, or set MOESTREAM_HOME or --to to a folder that can be written",
        ) from error


def servers_using(files: Iterable[Path]) -> list[ServerRecord]:
    """The running servers that moestream has started with any of these files, as the model or by another argument."""
    ours = {os.path.realpath(file) for file in files}
    return [
        record
        for record in RecordStore().all()
        if isinstance(record, ServerRecord)
        and record.alive
        and any(os.path.realpath(argument) in ours for argument in (record.model, *record.argv) if "\0" not in argument)
    ]


def check_unused(name: str, files: Iterable[Path], doing: str) -> None:
    """Refuse to change files that a server serves: it may read them again at any time.

    Raises:
        MoestreamError: names the server.
    """
    using = servers_using(files)
    if using:
        port = using[0].port
        raise MoestreamError(
            f"{name} is in use by the server on port {port}: not {doing}", hint=f"stop it first: moestream stop --port {port}"
        )


def locate(model: Path, store: ModelStore | None = None) -> Path:
    """The file that ``--model`` names: a path as it is, or the first shard of a pulled model.

    ``hf:OWNER/REPO[:QUANT]`` is always a pulled model; ``OWNER/REPO[:QUANT]``, as ``moestream list`` shows it, where no file is of
    that name.

    Raises:
        MoestreamError: the model is not pulled, or not all of it.
    """
    text = str(model)
    if not text.startswith(names.PREFIX):
        repo_id, colon, _ = text.partition(":")
        if os.path.lexists(model) or repo_id.count("/") != 1 or (not colon and text.endswith(".gguf")):
            return model
        try:
            reference = names.parse(text)
        except MoestreamError:
            return model
    else:
        reference = names.parse(text)
    store = store or ModelStore()
    entry = store.find(reference)
    command = f"moestream pull {names.PREFIX}{reference}"
    if entry is None:
        if not text.startswith(names.PREFIX) and reference.label is None:
            return model  # a relative path, as far as one can tell
        raise MoestreamError(f"--model {text}: not pulled", hint=f"{command}; moestream list shows what is there")
    if entry.state() != "complete":
        why = entry.problem() or "it is not all downloaded"
        raise MoestreamError(f"--model {text}: {why}", hint=f"moestream pull {names.PREFIX}{entry.name}")
    return entry.model.paths[0]
