"""llama-cpp-python, loaded over the library of our engine instead of its own.

The bindings are thin: they find a shared library when they are first imported, and call it. Which library that is can be said once in a
process, before that import. They mirror the structs of the one llama.cpp that they were released with, and check nothing; so everything is
checked here.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from moestream.errors import MoestreamError
from moestream.sizes import parse_size
from moestream.upstream import engines
from moestream.upstream.engines import Engine
from moestream.upstream.pin import load_pin

PACKAGE = "llama-cpp-python"
INSTALL = "pip install '.[python]' -C cmake.args=-DLLAMA_BUILD=OFF, in a checkout of moestream"
_SLOTS = {"all": -2, "auto": -1, "map": -3}  # as in engine/moe-api.h
_RAM_AUTO = -1
# the settings of a model that a metadata override can carry: name here, key of the engine, type
_PLAIN: dict[str, type] = {
    "io": str, "io_threads": int, "io_backend": str, "policy": str, "staging": str, "overlap": bool, "prefetch": str,
    "map_pin": int, "warm": int, "trace_limit": int, "gpu_path": str, "pool": str, "require_gpu": bool,
}  # fmt: skip


def error(message: str, *, hint: str | None = None) -> MoestreamError:
    """A MoestreamError whose hint a traceback shows."""
    made = MoestreamError(message, hint=hint)
    if hint:
        made.add_note(f"hint: {hint}")
    return made


def in_python_words(text: str) -> str:
    """A message or hint of the engine, with arguments of ``moestream.Llama`` in place of flags."""
    text = text.replace("leave out --moe-slots", "load it without streaming: slots=None").replace("(-c)", "(n_ctx)")
    text = (
        text.replace("(-ub)", "(n_ubatch)").replace("--load-mode none", "use_mmap=False").replace("--slots off", "slots=None")
    )
    return re.sub(r"--(?:moe-)?([a-z][a-z-]*)", lambda m: m[1].replace("-", "_"), text)


def check_keywords(of: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """llama-cpp-python swallows every keyword, so that a slip would go unnoticed.

    Args:
        of: what they are passed on to.

    Raises:
        TypeError: one that it does not have.
    """
    known = {name for name, p in inspect.signature(of).parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known | {"slots", "ram", "map", *_PLAIN}, 1)
            raise TypeError(f"moestream.Llama has no argument {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def overrides(settings: Mapping[str, Any]) -> dict[str, bool | int | str]:
    """Settings of streaming as metadata overrides, ``moestream.KEY``. Empty: nothing streams.

    Args:
        settings: ``slots``, ``ram``, ``map``, ``trace`` and those of ``_PLAIN``; None: not given. Paths are left out here.

    Raises:
        MoestreamError: names the argument, and what it may be.
    """
    slots = settings.get("slots")
    given = {name: value for name, value in settings.items() if name != "slots" and value is not None}
    if slots in (None, "off") or (slots == 0 and not isinstance(slots, bool)):
        if given:
            raise error(
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())} cannot be combined with slots={slots!r}: "
                "without streaming no experts are read",
                hint='leave it out, or stream: slots="auto"',
            )
        return {}
    if isinstance(slots, str) and slots in _SLOTS:
        number = _SLOTS[slots]
    elif isinstance(slots, int) and not isinstance(slots, bool) and slots > 0:
        number = slots
    else:
        raise error(f"slots={slots!r}: expected a number of slots, 'auto', 'all', 'map' or None", hint='slots="auto"')
    found: dict[str, bool | int | str] = {"moestream.slots": number}
    for name, kind in _PLAIN.items():
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise error(f"{name}={value!r}: expected {kind.__name__}, not {type(value).__name__}")
        if kind is int and not -(1 << 31) <= value < 1 << 31:
            raise error(f"{name}={value!r}: out of range")
        found[f"moestream.{name}"] = value
    if (ram := given.get("ram")) is not None:
        found["moestream.ram"] = 0 if ram == "none" else _ram(ram)
    return found


def _ram(value: Any) -> int:
    if value == "auto":
        return _RAM_AUTO
    if isinstance(value, str):
        try:
            return parse_size("ram", value)
        except MoestreamError as failed:
            raise error(f"ram={value!r}: expected a size ('4GiB', say), 'auto' or 'none'") from failed
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63:
        return value
    raise error(f"ram={value!r}: expected bytes, a size ('4GiB', say), 'auto' or 'none'")


class _Files(ctypes.Structure):
    """``struct moe_files`` of engine/moe-api.h."""

    _fields_ = (("size", ctypes.c_size_t), ("trace", ctypes.c_char_p), ("map", ctypes.c_char_p))


class EngineLibrary:
    """What our engine adds to libllama.

    Attributes:
        engine: which one.   bindings: the module ``llama_cpp`` over its library.
    """

    def __init__(self, engine: Engine, bindings: ModuleType) -> None:
        self.engine = engine
        self.bindings = bindings
        library = bindings.llama_cpp._lib
        try:
            self._add_files = library.moe_add_files
            self._stats_copy = library.moe_stats_copy
            self._log_filter = library.moe_log_without_debug
        except AttributeError as missing:
            raise error(
                f"{library._name} was built without moestream's engine: {missing}", hint="moestream build --clean"
            ) from missing
        self._add_files.argtypes = (ctypes.POINTER(_Files),)
        self._add_files.restype = ctypes.c_int64
        self._stats_copy.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
        self._stats_copy.restype = ctypes.c_size_t

    def add_files(self, *, trace: Path | None, map: Path | None) -> int:
        """The number that stands for these paths in ``moestream.files``."""
        files = _Files(ctypes.sizeof(_Files), trace and os.fsencode(trace), map and os.fsencode(map))
        return int(self._add_files(ctypes.byref(files)))

    def stats_json(self, model: int | None) -> bytes:
        """The statistics of a model, docs/stats.md.

        Args:
            model: the address of a ``llama_model``; None and a model that does not stream say ``"streaming": false``.
        """
        size = 1 << 16
        while True:  # it may grow between two calls, since counters get longer
            out = ctypes.create_string_buffer(size)
            needed = int(self._stats_copy(model, out, size))
            if not needed:
                raise MemoryError("no memory for moestream's statistics")
            if needed < size:
                return out.value
            size = needed + 1024

    def set_log(self, callback: Any) -> None:
        """Let llama.cpp's log lines, without those for debugging, go to ``callback``, a ``llama_log_callback`` that lives as long as the
        process."""
        low = self.bindings.llama_cpp
        low.llama_log_set(ctypes.cast(self._log_filter, low.llama_log_callback), ctypes.cast(callback, ctypes.c_void_p))


def load() -> EngineLibrary:
    """Import the bindings over the library of the engine in use.

    Raises:
        MoestreamError: the bindings are missing, of another version than the engine, or already there with another library; there is no
            engine that fits.
    """
    pinned = load_pin().version
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as missing:
        raise error(f"moestream.Llama needs {PACKAGE} {pinned}, which is not installed", hint=INSTALL) from missing
    if version != pinned:
        raise error(
            f"{PACKAGE} is {version}, and moestream's engine is that of {pinned}: their structs may differ", hint=INSTALL
        )
    try:
        engine = engines.in_use()
    except MoestreamError as none:
        raise error(none.message, hint=none.hint) from none
    if engine.source != pinned:
        raise error(
            f"the engine {engine.id} is built from another source than {PACKAGE} {pinned}: their structs may differ",
            hint=f"moestream build --backend {engine.backend}",
        )
    folder = engine.bin_dir
    _check_imported(folder)
    for variable in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"):
        set_to = os.environ.get(variable)
        if set_to is not None and not _same(Path(set_to), folder):
            raise error(
                f"{variable} is set to {set_to}, and moestream's engine is {folder}",
                hint=f"unset {variable}: moestream.Llama sets it",
            )
        os.environ[variable] = str(folder)
    try:
        bindings = importlib.import_module("llama_cpp")
    except (RuntimeError, FileNotFoundError, OSError, AttributeError) as failed:
        raise error(f"{PACKAGE} cannot load the engine {engine.id}: {failed}", hint="moestream build --clean") from failed
    library = EngineLibrary(engine, bindings)
    _load_modules(bindings, folder)
    return library


def _same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _check_imported(folder: Path) -> None:
    """Refuse bindings that are in this process already, over another library."""
    low = sys.modules.get("llama_cpp.llama_cpp")
    if low is None:
        return
    loaded = Path(low._lib._name)
    if not _same(loaded.parent, folder):
        raise error(
            f"llama_cpp is already imported, with the library {loaded}: it cannot get moestream's any more",
            hint="in a new process, use moestream.Llama before anything imports llama_cpp",
        )


def _load_modules(bindings: ModuleType, folder: Path) -> None:
    """A portable engine has its CPU kernels in modules beside the programs; this program is Python, which lies elsewhere."""
    suffix = Path(bindings.llama_cpp._lib._name).suffix
    ggml = ctypes.CDLL(str(folder / f"libggml{suffix}"))
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    if ggml.ggml_backend_reg_count() == 0:
        ggml.ggml_backend_load_all_from_path.argtypes = (ctypes.c_char_p,)
        ggml.ggml_backend_load_all_from_path.restype = None
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    if ggml.ggml_backend_reg_count() == 0:
        raise error(f"no module with CPU kernels in {folder} fits this processor", hint="moestream build")
