"""How fast bytes get from page-locked memory to a card: asked of NVIDIA's driver itself, so that no CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARY = "libcuda.so.1"
_BYTES = 32 << 20


class _NoAnswer(Exception):
    """A call of the driver failed."""


def _ok(status: int) -> None:
    if status != 0:
        raise _NoAnswer(status)


@contextmanager
def _context(cuda: ctypes.CDLL) -> Iterator[None]:
    """The first card's, for calls meanwhile."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _ok(cuda.cuInit(0))
    _ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
    _ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _ok(cuda.cuCtxSetCurrent(context))
        yield
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def bytes_per_s(limit_s: float = 0.1, library: str = LIBRARY) -> float | None:
    """Copies to the first card, the best of several; None where there is no driver, no card, or no memory for it."""
    try:
        cuda = ctypes.CDLL(library)
        with _context(cuda):
            host, card = ctypes.c_void_p(), ctypes.c_uint64()
            _ok(cuda.cuMemAllocHost_v2(ctypes.byref(host), ctypes.c_size_t(_BYTES)))
            try:
                _ok(cuda.cuMemAlloc_v2(ctypes.byref(card), ctypes.c_size_t(_BYTES)))
                try:
                    return _best(cuda, host, card, limit_s)
                finally:
                    cuda.cuMemFree_v2(card)
            finally:
                cuda.cuMemFreeHost(host)
    except (OSError, AttributeError, _NoAnswer):  # no library, an old one, or no
        return None


def _best(cuda: ctypes.CDLL, host: ctypes.c_void_p, card: ctypes.c_uint64, limit_s: float) -> float:
    best, begin = 0.0, time.perf_counter()
    while not best or time.perf_counter() - begin < limit_s:
        start = time.perf_counter()
        _ok(cuda.cuMemcpyHtoD_v2(card, host, ctypes.c_size_t(_BYTES)))  # returns when the bytes are there
        best = max(best, _BYTES / (time.perf_counter() - start))
    return best
