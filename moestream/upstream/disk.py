"""A full disk, told apart from other failures: before the work by an estimate, during it by the error."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from moestream.errors import MoestreamError

MIB = 1024 * 1024
FULL = (errno.ENOSPC, errno.EDQUOT)


def nearest_existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def disk_full(path: Path, doing: str, elsewhere: str = "set MOESTREAM_HOME to another disk") -> MoestreamError:
    """The error for a disk that filled up while ``doing`` something at ``path``."""
    return MoestreamError(
        f"the disk that holds {path} is full (while {doing})",
        hint=f"free some space (df -h {nearest_existing(path)}) and run it again, or {elsewhere}",
    )


def require_free(
    path: Path, need_bytes: int, doing: str, elsewhere: str = "set MOESTREAM_HOME to a folder on another disk"
) -> None:
    """Raise MoestreamError when the disk of ``path`` has less than ``need_bytes`` free."""
    free_bytes = shutil.disk_usage(nearest_existing(path)).free
    if free_bytes < need_bytes:
        raise MoestreamError(
            f"{doing} needs about {need_bytes // MIB} MiB at {path}, and {free_bytes // MIB} MiB are free",
            hint=f"free some space, or {elsewhere}",
        )


@contextlib.contextmanager
def full_disk_reported(path: Path, doing: str, elsewhere: str = "set MOESTREAM_HOME to another disk") -> Iterator[None]:
    """Turn ENOSPC and EDQUOT inside the block into a MoestreamError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(path, doing, elsewhere) from error
        raise
