"""The header of a model on a hub, by ranges of its files. Weights are not fetched, but for what the last range reaches into."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from moestream import gguf_facts
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.models import names
from moestream.models.hub import Hub
from moestream.models.names import Reference, printable
from moestream.server import report

# Ranges grow: most headers are some megabytes, nearly all of it vocabulary.
FIRST_BYTES = 64 << 10
LARGEST_BYTES = 2 << 20


@dataclass(frozen=True)
class RemoteModel:
    """A model on a hub.

    Attributes:
        name: ``OWNER/REPO:LABEL``.
        facts: ``files`` are paths in the repository.
        fetched_bytes: what came over the network of the files.
    """

    name: str
    facts: GgufFacts
    fetched_bytes: int


class _Piece(io.BytesIO):
    """Takes one range, and no more: a server that ignores Range would send the whole file."""

    def __init__(self, path: str, n_bytes: int) -> None:
        super().__init__()
        self.path, self.n_bytes = path, n_bytes

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self.n_bytes:
            raise MoestreamError(
                f"the hub sends more of {printable(self.path)} than the {self.n_bytes} bytes that were asked for",
                hint="a proxy or mirror that ignores Range may be in the way; HF_ENDPOINT names another",
            )
        return super().write(data)


class RemoteSource:
    """A ``gguf_facts.HeaderSource``.

    Attributes:
        fetched_bytes: so far.
    """

    def __init__(self, hub: Hub, repo_id: str, commit: str, path: str, size_bytes: int) -> None:
        self.path, self.size_bytes = Path(path), size_bytes
        self.fetched_bytes = 0
        self._hub, self._repo_id, self._commit, self._name = hub, repo_id, commit, path
        self._next_bytes = FIRST_BYTES
        self._data, self._base = b"", 0

    def read_at(self, n_bytes: int, offset: int) -> bytes:
        start = offset - self._base
        if not 0 <= start < len(self._data):
            self._fetch(offset)
            start = 0
        return self._data[start : start + n_bytes]

    def _fetch(self, offset: int) -> None:
        end = min(self.size_bytes, offset + self._next_bytes)
        if end <= offset:
            self._data = b""
            return
        piece = _Piece(self._name, end - offset)
        self._hub.read(self._repo_id, self._commit, self._name, piece, offset=offset, end=end, piece=True)
        self._data, self._base = piece.getvalue(), offset
        self.fetched_bytes += len(self._data)
        self._next_bytes = min(2 * self._next_bytes, LARGEST_BYTES)


def read(reference: Reference, hub: Hub | None = None) -> RemoteModel:
    """Read the header of a model that is not pulled.

    Raises:
        MoestreamError: see ``Hub``, ``names.choose`` and ``gguf_facts.read``; the hub tells no size, or sends no ranges.
    """
    hub = hub or Hub()
    listing = hub.listing(reference.repo_id)
    sizes = {file.path: file.size_bytes for file in listing.files}
    chosen = names.choose(reference, names.candidates(sizes), sizes, report.size)
    sources = []
    for path in chosen.files:
        names.check_path(path)
        if sizes[path] < 0:
            raise MoestreamError(
                f"{hub.endpoint} does not say the size of {reference.repo_id}/{path}",
                hint="use another mirror (HF_ENDPOINT), or pull the model and plan with the file",
            )
        sources.append(RemoteSource(hub, reference.repo_id, listing.commit, path, sizes[path]))
    facts = gguf_facts.read_sources(sources)
    return RemoteModel(f"{reference.repo_id}:{chosen.label}", facts, sum(source.fetched_bytes for source in sources))
