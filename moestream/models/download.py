"""One file from the hub, into its place: continued after an interruption, and checked against what the hub says of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from moestream.errors import MoestreamError
from moestream.models.hub import Hub
from moestream.models.names import printable
from moestream.models.store import ModelFile

# What is asked for at once. The networks that deliver for hubs send no answer beyond some 50 GB, and huggingface_hub asks for none.
PIECE_BYTES = 32 << 30
_READ_BYTES = 4 << 20


def _new_digest(file: ModelFile) -> Any:
    if file.digest.startswith("git-sha1:"):
        return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)
    return hashlib.sha256()


def has_content(file: ModelFile, path: Path, progress: Callable[[int], None] = lambda n_bytes: None) -> bool:
    """Whether a file on disk is what the hub has. Reads all of it, unless its size tells already.

    Args:
        progress: is called with the bytes that were read since.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size != file.size_bytes:
            return False
        digest = _new_digest(file)
        _update(digest, stream, file.size_bytes, progress)
    return bool(digest.hexdigest() == file.digest.partition(":")[2])


def _update(digest: Any, stream: BinaryIO, n_bytes: int, progress: Callable[[int], None] = lambda n_bytes: None) -> None:
    while n_bytes:
        chunk = stream.read(min(_READ_BYTES, n_bytes))
        if not chunk:
            raise OSError("the file became shorter while it was read")
        digest.update(chunk)
        n_bytes -= len(chunk)
        progress(len(chunk))


class _Sink:
    """Where ``http_get`` writes: counts, takes the digest along, and takes no more than it asked for.

    Attributes:
        position: bytes in the file.
        base: where the piece begins that is asked for now.
        end: where it ends.
    """

    def __init__(self, file: ModelFile, stream: BinaryIO, progress: Callable[[int], None]) -> None:
        self.file, self.stream, self.progress = file, stream, progress
        self.position = self.base = 0
        self.end = file.size_bytes
        self.digest = _new_digest(file)

    def write(self, data: bytes) -> int:
        if self.position + len(data) > self.end:
            raise MoestreamError(
                f"the hub sends more of {printable(self.file.path)} than the {self.end} bytes that were asked for",
                hint="a proxy or mirror that ignores Range may be in the way; HF_ENDPOINT names another",
            )
        self.stream.write(data)
        self.digest.update(data)
        self.position += len(data)
        self.progress(len(data))
        return len(data)

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int) -> int:
        """To the beginning alone: the server sends the file anew."""
        if offset or self.base:
            raise MoestreamError(
                f"the hub does not send {printable(self.file.path)} in pieces, and it is too large to be sent at once",
                hint="a proxy or mirror that ignores Range may be in the way; HF_ENDPOINT names another",
            )
        self.progress(-self.position)
        self.stream.seek(0)
        self.position = 0
        self.digest = _new_digest(self.file)
        return 0

    def truncate(self) -> int:
        return self.stream.truncate(self.position)


def fetch(hub: Hub, repo_id: str, commit: str, file: ModelFile, part: Path, progress: Callable[[int], None]) -> int:
    """Download a file, or what is missing of it.

    Args:
        part: where the bytes are collected; what is there is continued. On return it is whole and checked.
        progress: is called with the bytes that came, and with a negative number when they have to come again.

    Returns:
        How many bytes were there already.

    Raises:
        MoestreamError: see ``Hub.read``; or the content is not what the hub says. The part is then taken away, for it
            would never become right.
        OSError: the part cannot be written.
    """
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with os.fdopen(handle, "r+b") as stream:
        sink = _Sink(file, stream, progress)
        there = os.fstat(handle).st_size
        if there > file.size_bytes:
            stream.truncate(0)
            there = 0
        _update(sink.digest, stream, there)
        sink.position = there
        stream.seek(there)
        large = file.size_bytes > PIECE_BYTES
        while sink.position < file.size_bytes:
            if large:
                sink.base, sink.end = sink.position, min(file.size_bytes, sink.position + PIECE_BYTES)
            hub.read(repo_id, commit, file.path, sink, offset=sink.position, end=sink.end, piece=large)  # type: ignore[arg-type]
        stream.flush()
        os.fsync(handle)
    actual = sink.digest.hexdigest()
    kind, _, expected = file.digest.partition(":")
    if actual != expected:
        with contextlib.suppress(OSError):
            part.unlink()
        raise MoestreamError(
            f"{printable(file.path)} is not what the hub says: {kind} is {actual}, expected {expected}",
            hint="the bytes were thrown away; pull again, from another mirror (HF_ENDPOINT) if it stays so",
        )
    return there
