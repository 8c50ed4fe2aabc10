"""How fast bytes get to a card and within it: asked of NVIDIA's driver itself, so that no CUDA toolkit is needed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from moestream import paths

LIBRARY = "libcuda.so.1"
_LINK_BYTES = 32 << 20
_MEMORY_BYTES = 256 << 20  # more than any card's cache


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


@dataclass(frozen=True)
class CardRates:
    """What the first card does in a second. None: not measured.

    Attributes:
        link_bytes_s: copies from page-locked memory to the card.
        memory_bytes_s: bytes read and written by copies within its memory, both counted.
        free_bytes: of its memory, as a program sees it, which itself takes some.
    """

    link_bytes_s: float | None = None
    memory_bytes_s: float | None = None
    free_bytes: int | None = None


def measure(limit_s: float = 0.1, library: str = LIBRARY) -> CardRates:
    """The best of several copies each; not measured where there is no driver, no card, or no memory for it.

    Args:
        limit_s: for each of both.
    """
    try:
        cuda = ctypes.CDLL(library)
        with _context(cuda):
            free = _or_none(lambda cuda, _: _free(cuda), cuda, limit_s)
            return CardRates(
                _or_none(_link, cuda, limit_s), _or_none(_memory, cuda, limit_s), None if free is None else int(free)
            )
    except (OSError, AttributeError, _NoAnswer):  # no library, an old one, or no
        return CardRates()


def measure_apart(timeout_s: float = 30.0) -> CardRates:
    """The same in a process of its own: a driver that hangs or crashes takes nothing with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": paths.import_path()},
        )  # fmt: skip
        return CardRates(**json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return CardRates()


def _or_none(rate: Callable[[ctypes.CDLL, float], float], cuda: ctypes.CDLL, limit_s: float) -> float | None:
    try:
        return rate(cuda, limit_s)
    except _NoAnswer:
        return None


@contextmanager
def _card_memory(cuda: ctypes.CDLL, size: int) -> Iterator[ctypes.c_uint64]:
    card = ctypes.c_uint64()
    _ok(cuda.cuMemAlloc_v2(ctypes.byref(card), ctypes.c_size_t(size)))
    try:
        yield card
    finally:
        cuda.cuMemFree_v2(card)


def _free(cuda: ctypes.CDLL) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _ok(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value


def _link(cuda: ctypes.CDLL, limit_s: float) -> float:
    host = ctypes.c_void_p()
    _ok(cuda.cuMemAllocHost_v2(ctypes.byref(host), ctypes.c_size_t(_LINK_BYTES)))
    try:
        with _card_memory(cuda, _LINK_BYTES) as card:
            # returns when the bytes are there
            return _best(lambda: cuda.cuMemcpyHtoD_v2(card, host, ctypes.c_size_t(_LINK_BYTES)), _LINK_BYTES, limit_s)
    finally:
        cuda.cuMemFreeHost(host)


def _memory(cuda: ctypes.CDLL, limit_s: float) -> float:
    with _card_memory(cuda, _MEMORY_BYTES) as source, _card_memory(cuda, _MEMORY_BYTES) as target:

        def copy() -> int:
            begun = [cuda.cuMemcpyDtoD_v2(target, source, ctypes.c_size_t(_MEMORY_BYTES)) for _ in range(4)]
            return max(begun) or cuda.cuCtxSynchronize()

        return _best(copy, 4 * 2 * _MEMORY_BYTES, limit_s)


def _best(copy: Callable[[], int], size: int, limit_s: float) -> float:
    best, begin = 0.0, time.perf_counter()
    while not best or time.perf_counter() - begin < limit_s:
        start = time.perf_counter()
        _ok(copy())
        best = max(best, size / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
