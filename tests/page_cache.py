"""Which bytes of a model the kernel's page cache holds."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from fixture_models import expert_ranges

PAGE = os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def cached_pages(path: Path) -> list[bool]:
    """Which pages of a file are in the page cache."""
    size = path.stat().st_size
    flags = (ctypes.c_ubyte * -(-size // PAGE))()
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, 1, 1, fd, 0)  # PROT_READ, MAP_SHARED; mapping alone reads nothing
        assert address not in (None, ctypes.c_void_p(-1).value)
        assert libc.mincore(address, size, flags) == 0, os.strerror(ctypes.get_errno())
        assert libc.munmap(address, size) == 0
    finally:
        os.close(fd)
    return [bool(flag & 1) for flag in flags]


@functools.cache
def ranges_of(path: Path) -> list[tuple[int, int]]:
    """Read once: reading the header reads ahead, up to megabytes of experts."""
    return sorted(expert_ranges(path))


def drop_from_cache(path: Path) -> None:
    ranges_of(path)
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    assert not any(cached_pages(path))


def expert_runs(path: Path) -> list[tuple[int, int]]:
    """The ranges of experts that lie side by side, as one each: (first byte, byte behind the last)."""
    runs: list[tuple[int, int]] = []
    for begin, end in ranges_of(path):
        if runs and begin - runs[-1][1] < PAGE:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs
