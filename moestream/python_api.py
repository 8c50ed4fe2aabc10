"""``moestream.Llama``: llama-cpp-python's ``Llama`` with streaming. Importing this loads the engine's library."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import Any

from moestream import bindings, gguf_facts, paths
from moestream.commands.start import check_model
from moestream.errors import MoestreamError
from moestream.models.store import locate

LIBRARY = bindings.load()
_llama_cpp = LIBRARY.bindings
_logger = importlib.import_module("llama_cpp._logger")

# The engine's refusal of a model or of settings.
_REFUSAL = re.compile(r"error loading model: (?:error loading model \w+: )?(.+?)(?:; hint: (.+))?$", re.MULTILINE)
_FAILURE = re.compile(r"^moestream: (.+)$", re.MULTILINE)
_KEPT_LINES = 200
# ggml's levels as the bindings count them, which take debug, info, warning and error for something else
_THEIR_LEVEL = (0, 4, 1, 2, 3, 5)

_said: deque[str] = deque(maxlen=_KEPT_LINES)  # by llama.cpp, most recently
_loading = threading.Lock()  # who loads finds its own lines in there


@_llama_cpp.llama_log_callback
def _on_log(level: int, text: bytes, user_data: Any) -> None:
    _said.append(text.decode("utf-8", errors="replace"))
    _logger.llama_log_callback(_THEIR_LEVEL[level], text, None)


LIBRARY.set_log(_on_log)


class Llama(_llama_cpp.Llama):  # type: ignore[misc, name-defined]
    """A model whose experts are streamed from its file; everything else is llama-cpp-python's ``Llama``.

    Args:
        model_path: a GGUF file, any shard, a directory with one model, or a pulled model (``hf:OWNER/REPO:QUANT``).
        slots: expert slots in each MoE layer: a number, ``"auto"`` (what memory allows), ``"all"`` or ``"map"``; None: no streaming.
        io, io_threads, io_backend, policy, staging, overlap, prefetch, map_pin, gpu_path, pool, require_gpu: as the flags ``--moe-…``; None: the engine's default.
        ram: memory below the slots: bytes, ``"4GiB"``, ``"auto"`` or ``"none"``.
        map: the model's router map.   trace: record which experts are chosen in this file, ``trace_limit`` MiB at most.
        warm: fill empty slots before they are asked for, and wait for that for so many seconds.
        more: what llama-cpp-python's ``Llama`` takes.

    Raises:
        MoestreamError: the model or a setting cannot be honoured; the message says why.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        slots: int | str | None = "auto",
        io: str | None = None,
        io_threads: int | None = None,
        io_backend: str | None = None,
        policy: str | None = None,
        staging: str | None = None,
        overlap: bool | None = None,
        ram: int | str | None = None,
        prefetch: str | None = None,
        gpu_path: str | None = None,
        pool: str | None = None,
        require_gpu: bool | None = None,
        map: str | os.PathLike[str] | None = None,
        map_pin: int | None = None,
        warm: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_limit: int | None = None,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        type_k: int | None = None,
        type_v: int | None = None,
        **more: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # what is refused below is closed like what is not
        settings = {
            "slots": slots, "io": io, "io_threads": io_threads, "io_backend": io_backend, "policy": policy, "staging": staging,
            "overlap": overlap, "ram": ram, "prefetch": prefetch, "gpu_path": gpu_path, "pool": pool, "require_gpu": require_gpu, "map": map, "map_pin": map_pin, "warm": warm, "trace": trace,
            "trace_limit": trace_limit,
        }  # fmt: skip
        bindings.check_keywords(super().__init__, more)
        ours = bindings.overrides(settings)
        for key in kv_overrides or ():
            if key.startswith("moestream."):
                name = key.removeprefix("moestream.")
                raise bindings.error(f"kv_overrides has {key}: such keys are moestream's own", hint=f"use the argument {name}=")
        try:
            facts = gguf_facts.read(locate(Path(model_path)))
            if ours:
                check_model(facts, str(slots))
        except MoestreamError as failed:
            raise _told(failed) from failed
        if ours:
            # slots="auto" leaves room for the context
            ours |= {"moestream.n_ctx": n_ctx, "moestream.n_ubatch": min(n_batch, n_ubatch)}
            ours |= {f"moestream.{k}": v for k, v in (("type_k", type_k), ("type_v", type_v)) if v is not None}
            if map is not None or trace is not None:
                ours["moestream.files"] = LIBRARY.add_files(
                    trace=paths.absolute(Path(trace)) if trace is not None else None,
                    map=paths.absolute(Path(map)) if map is not None else None,
                )
        # for copies of this object in other processes
        self._moe_arguments = {name: value for name, value in settings.items() if name == "slots" or value is not None}
        self._own_overrides = kv_overrides
        with _loading:
            _said.clear()
            try:
                super().__init__(
                    str(facts.files[0]), kv_overrides={**(kv_overrides or {}), **ours} or None, n_ctx=n_ctx, n_batch=n_batch,
                    n_ubatch=n_ubatch, type_k=type_k, type_v=type_v, **more,
                )  # fmt: skip
            except ValueError as failed:
                refusal = _REFUSAL.search("".join(_said))
                if refusal is None:
                    raise
                hint = refusal[2] and bindings.in_python_words(refusal[2])
                raise bindings.error(bindings.in_python_words(refusal[1]), hint=hint) from failed

    def moe_stats(self) -> dict[str, Any]:
        """What streaming did since the model was loaded, ``moestream/stats/1`` of docs/stats.md; ``streaming`` is False when nothing does,
        or the model is closed."""
        model = getattr(self, "_model", None)
        return json.loads(LIBRARY.stats_json(model.model if model is not None else None))

    def eval(self, tokens: Any) -> None:
        """As in llama-cpp-python. An error says which read failed; the same tokens may be given again."""
        _said.clear()
        try:
            super().eval(tokens)
        except RuntimeError as failed:
            for line in dict.fromkeys(_FAILURE.findall("".join(_said))):
                failed.add_note(f"moestream: {line}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kv_overrides": self._own_overrides, **self._moe_arguments}


def _told(failed: MoestreamError) -> MoestreamError:
    hint = bindings.in_python_words(failed.hint) if failed.hint else None
    return bindings.error(bindings.in_python_words(failed.message), hint=hint)
