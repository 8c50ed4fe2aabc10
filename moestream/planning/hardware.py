"""What the machine has and does: the module of planning that measures. Each measurement takes a fraction of a second."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import random
import stat
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moestream import nvidia_smi, proc
from moestream.gguf_facts import GgufFacts
from moestream.planning.memory import CHUNK_BYTES, DEFAULT_IN_FLIGHT, REPACKED_ARM, REPACKED_X86

_ALIGNMENT = 4096
_IN_FLIGHT = (1, 2, 4, 8)
PROBE_S = 0.3
_COPY_BYTES = 64 << 20
_NVIDIA_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Drive:
    """What direct reads of experts gave.

    Attributes:
        bytes_s: the best of all numbers of reads under way; None: not measured.
        in_flight: with so many.
        request_bytes: of each read.
        where: the file that was read.
        note: why nothing was measured; else empty.
        rates: bytes a second, by reads under way.
    """

    bytes_s: float | None
    in_flight: int = 0
    request_bytes: int = 0
    where: str = ""
    note: str = ""
    rates: dict[int, float] = field(default_factory=dict)


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may compute with: those of its affinity without their siblings, and what a cgroup's quota allows."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n = min(logical, psutil.cpu_count(logical=False) or logical)
    quota = proc.cpu_quota(root)
    return max(1, n if quota is None else min(n, int(quota)))


def load() -> float:
    """Threads that wanted to compute, on average of the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def default_threads() -> int:
    """With how many threads llama.cpp computes when nobody says: it knows no quota."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def repacked_types(machine: str | None = None) -> frozenset[str]:
    """Types whose weights the engine's kernels want repacked here."""
    return REPACKED_ARM if (machine or platform.machine()).lower() in ("aarch64", "arm64") else REPACKED_X86


def gpus(program: str = "nvidia-smi", environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that nvidia-smi knows and CUDA_VISIBLE_DEVICES does not hide; none where it is missing or fails."""
    fields = ("name", "memory.total", "memory.free", "index", "uuid")
    answer = nvidia_smi.ask(*fields, timeout_s=_NVIDIA_SMI_TIMEOUT_S, program=program)
    rows: Sequence[tuple[str, ...]] = answer.rows
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        rows = [rows[i] for i in nvidia_smi.visible([(r[-2], r[-1]) for r in rows], wanted)]
    return [
        Gpu(name, int(total) << 20, int(free) << 20)
        for name, total, free, *_ in rows
        if total.isdecimal() and free.isdecimal()  # not where they share the machine's memory
    ]


# --- the drive -------------------------------------------------------------------------------------------------------


def request_bytes(facts: GgufFacts) -> int:
    """The size of the engine's reads: of an expert's matrix, or a piece of it."""
    return min(CHUNK_BYTES, max(t.bytes_per_expert for t in facts.expert_tensors))


def probe_model(facts: GgufFacts, limit_s: float = PROBE_S) -> Drive:
    """Measure direct reads of random experts of a model that is here."""
    places = [
        (t.file_index, t.offset + e * t.bytes_per_expert, min(t.bytes_per_expert, CHUNK_BYTES))
        for t in facts.expert_tensors
        for e in range(t.n_expert)
    ]
    return _probe(facts.files, places, limit_s)


def probe_folder(folder: Path, size_bytes: int, limit_s: float = PROBE_S) -> Drive:
    """The same on the largest file below the folder where a model would be put; not measured when there is none of 64 MiB.

    Args:
        size_bytes: of each read.
    """
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    largest, path = 64 << 20, None
    device = os.stat(folder).st_dev
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = [] if depth >= 4 else [f for f in folders if not f.startswith(".")]
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if stat.S_ISREG(status.st_mode) and status.st_size >= largest and status.st_dev == device:
                    largest, path = status.st_size, Path(parent, name)
    if path is None:
        return Drive(None, note=f"no large file below {folder} to read from")
    size = max(4096, size_bytes)
    places = [(0, i * size, size) for i in range(largest // size)]
    return _probe((path,), places, limit_s)


def _probe(files: Sequence[Path], places: list[tuple[int, int, int]], limit_s: float) -> Drive:
    if not hasattr(os, "O_DIRECT"):
        return Drive(None, note="this system has no direct reads")
    request = max(size for _, _, size in places)
    with contextlib.ExitStack() as stack:
        descriptors: list[int] = []
        for path in files:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                why = "the file system has no direct reads" if error.errno == errno.EINVAL else str(error.strerror)
                return Drive(None, note=f"{path.name}: {why}")
            stack.callback(os.close, fd)
            descriptors.append(fd)
        random.shuffle(places)
        rates: dict[int, float] = {}
        position = 0
        for n in _IN_FLIGHT:
            try:
                rate, position = _measure(descriptors, places, position, n, request, limit_s / len(_IN_FLIGHT))
            except OSError as error:
                return Drive(None, note=f"a direct read failed: {error.strerror}")
            rates[n] = rate
    best = max(rates, key=lambda n: rates[n])
    return Drive(rates[best], best, request, str(files[0]), "", rates)


def _measure(
    descriptors: list[int], places: list[tuple[int, int, int]], position: int, n: int, request: int, window_s: float
) -> tuple[float, int]:
    lock = threading.Lock()
    state: dict[str, Any] = {"next": position, "bytes": 0, "error": None}
    start = time.perf_counter()

    def work() -> None:
        buffer = mmap.mmap(-1, request + 2 * _ALIGNMENT)  # begins at a page
        view = memoryview(buffer)
        try:
            first = True
            while first or time.perf_counter() - start < window_s:
                first = False
                with lock:
                    file, offset, size = places[state["next"] % len(places)]
                    state["next"] += 1
                begin = offset // _ALIGNMENT * _ALIGNMENT
                length = -(-(offset + size - begin) // _ALIGNMENT) * _ALIGNMENT
                got = os.preadv(descriptors[file], [view[:length]], begin)
                with lock:
                    state["bytes"] += min(got, size)
        except OSError as error:
            state["error"] = error
        finally:
            view.release()
            buffer.close()

    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if state["error"]:
        raise state["error"]
    return state["bytes"] / (time.perf_counter() - start), state["next"]


def page_cache_rate(request: int, limit_s: float = 0.1) -> float:
    """Bytes a second that reads of this size give when the kernel has the pages, four of them under way; from a file in memory."""
    size = max(8 << 20, request)
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("moestream-probe")
            stack.callback(os.close, fd)
        else:
            fd = stack.enter_context(tempfile.TemporaryFile()).fileno()
        os.truncate(fd, 0)
        data = memoryview(bytes(1 << 20))
        for offset in range(0, size, len(data)):
            os.pwrite(fd, data[: size - offset], offset)
        places = [(0, offset, request) for offset in range(0, size - request + 1, request)]
        return _measure([fd], places, 0, DEFAULT_IN_FLIGHT, request, limit_s)[0]


# --- memory and arithmetic -------------------------------------------------------------------------------------------


def memory_rate(n_thread: int, limit_s: float = 0.12) -> float:
    """Bytes a second that so many threads copy within memory; what is read and what is written count once together.

    The best of several rounds: others may compute meanwhile.
    """
    import numpy as np

    memory = proc.available_memory()
    most = _COPY_BYTES if memory is None else min(_COPY_BYTES, memory.available_bytes // 16)
    size = max(1 << 20, most // n_thread)
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(n_thread)]  # ones: the pages are there
    best, start = 0.0, time.perf_counter()
    while not best or time.perf_counter() - start < limit_s:
        round_start = time.perf_counter()
        threads = [threading.Thread(target=np.copyto, args=(to, of)) for of, to in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, n_thread * size / (time.perf_counter() - round_start))
    return best


def matmul_flops(n_core: int, columns: int = 64, limit_s: float = 0.1) -> float:
    """Floating-point operations a second of matrix products (F32): what one core does at best, times the cores.

    The matrices are so small that BLAS computes each with one thread: its threads for larger ones wait for each other, and where somebody else
    computes too that is all that would be measured.

    Args:
        columns: of what 64 rows and columns of weights are multiplied with.
    """
    import numpy as np

    n_matrix, n = 64, 64
    a, b = np.ones((n_matrix, n, n), np.float32), np.ones((n, min(columns, n)), np.float32)
    out = a @ b
    best, start = 0.0, time.perf_counter()
    while not best or time.perf_counter() - start < limit_s:
        round_start = time.perf_counter()
        np.matmul(a, b, out=out)
        best = max(best, 2 * a.size * b.shape[1] / (time.perf_counter() - round_start))
    return best * n_core


def prompt_columns(facts: GgufFacts, n_token: int) -> int:
    """Tokens of a batch that an expert has on average."""
    return max(1, n_token * facts.n_expert_used // facts.n_expert)
