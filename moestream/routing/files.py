"""Files of traces and maps: looked at before they are read, and replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moestream.errors import MoestreamError


def open_regular(path: Path, what: str) -> BinaryIO:
    """Open a regular file for reading. Pipes and devices may never end, and are refused without waiting for them.

    Raises:
        MoestreamError: it cannot be opened, or is something else than a file.
    """
    try:
        # Without O_NONBLOCK opening a pipe waits for whoever writes into it.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise MoestreamError(f"cannot read the {what} {path}: {error.strerror}", hint="check the path") from error
    if not stat.S_ISREG(mode):
        file.close()
        raise MoestreamError(f"cannot read the {what} {path}: it is no regular file", hint=f"name a file that holds a {what}")
    return file


@contextlib.contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """A new, empty file beside ``path``, which takes its place when the block ends without an exception, and else is removed.

    Raises:
        MoestreamError: it cannot be made or put in place.
    """
    target = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
    fresh: str | None = None
    try:
        with _told_as(path, what):
            descriptor, fresh = tempfile.mkstemp(prefix=".moestream-", dir=target.parent)
            os.close(descriptor)
        yield Path(fresh)
        with _told_as(path, what):
            os.chmod(fresh, 0o666 & ~_umask())
            os.replace(fresh, target)
        fresh = None
    finally:
        if fresh is not None:
            with contextlib.suppress(OSError):
                os.unlink(fresh)


@contextlib.contextmanager
def _told_as(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MoestreamError(
            f"cannot write the {what} {path}: {error.strerror}", hint="check the path, and that the disk is not full"
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
