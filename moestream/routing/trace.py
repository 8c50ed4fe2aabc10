"""Reading routing traces, as engine/trace.cpp writes them; the format is in docs/traces.md."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moestream.errors import MoestreamError
from moestream.routing import files

MAGIC = b"MOETRACE"
VERSION = 1
MAX_HEADER_BYTES = 1 << 26
MAX_EXPERTS = 1 << 16
_AGAIN = "the trace is damaged, or is none; record one: moestream trace record"


@dataclass(frozen=True)
class ModelName:
    """Whose choices these are.

    Attributes:
        fingerprint: see :func:`moestream.routing.fingerprint.fingerprint`.
        architecture: ``general.architecture``.
        name: of the file, without its folders.
    """

    fingerprint: str
    architecture: str
    name: str

    def as_json(self) -> dict[str, str]:
        return {"fingerprint": self.fingerprint, "architecture": self.architecture, "name": self.name}


@dataclass(frozen=True)
class LayerTrace:
    """The choices of one layer.

    Attributes:
        layer: the block number in the model.
        n_expert: experts it has.
        counts: ``[n_expert]`` how often each was chosen by a token.
        accesses: ``[n_expert]`` how many batches wanted it.
        n_tokens: tokens that chose.
    """

    layer: int
    n_expert: int
    counts: np.ndarray
    accesses: np.ndarray
    n_tokens: int


@dataclass(frozen=True)
class Trace:
    """One trace.

    Attributes:
        n_expert_used: experts that a token uses, in the layer with the most.
        n_batches: of the first layer.
        n_tokens: of the first layer.
        n_single: of them, those that were a batch of their own.
        truncated: whether the last record was cut short; it is left out.
    """

    path: Path
    size_bytes: int
    model: ModelName
    n_expert_used: int
    layers: tuple[LayerTrace, ...]
    n_records: int
    n_batches: int
    n_tokens: int
    n_single: int
    truncated: bool


def _is_count(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def read_model(value: Any) -> ModelName | None:
    """The JSON object that traces and maps have of a model; None when it is something else."""
    names = ("fingerprint", "architecture", "name")
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in names):
        return None
    return ModelName(*(value[name] for name in names))


def _header(path: Path, file: BinaryIO, size_bytes: int) -> tuple[ModelName, int, list[tuple[int, int]], int]:
    """Model, experts used, (layer, experts) of each layer, and where the records begin."""
    beginning = file.read(16)
    if len(beginning) < 16 or not beginning.startswith(MAGIC):
        raise MoestreamError(f"{path} is not a trace: it does not begin with {MAGIC.decode()}", hint=_AGAIN)
    version, length = struct.unpack_from("<II", beginning, 8)
    if version != VERSION:
        raise MoestreamError(
            f"{path} is a trace of version {version}: expected {VERSION}", hint="record it again: moestream trace record"
        )
    end = 16 + length
    if length > MAX_HEADER_BYTES or end > size_bytes:
        raise MoestreamError(f"{path} ends inside its header: {end} bytes needed, the file has {size_bytes}", hint=_AGAIN)
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise MoestreamError(f"{path}: its header is no JSON: {error}", hint=_AGAIN) from error
    model = read_model(header.get("model")) if isinstance(header, dict) else None
    if model is None:
        raise MoestreamError(f"{path}: its header names no model", hint=_AGAIN)
    n_used, layers = header.get("n_expert_used"), header.get("layers")
    if not _is_count(n_used, 1, MAX_EXPERTS):
        raise MoestreamError(f"{path}: n_expert_used is {n_used!r} in its header", hint=_AGAIN)
    if not isinstance(layers, list) or not layers:
        raise MoestreamError(f"{path}: its header names no layers", hint=_AGAIN)
    found: dict[int, int] = {}
    for entry in layers:
        layer, n_expert = (entry.get("layer"), entry.get("n_expert")) if isinstance(entry, dict) else (None, None)
        if not _is_count(layer, 0, 1 << 20) or not _is_count(n_expert, 1, MAX_EXPERTS):
            raise MoestreamError(f"{path}: its header has the impossible layer {entry!r}", hint=_AGAIN)
        if layer in found:
            raise MoestreamError(f"{path}: its header has layer {layer} twice", hint=_AGAIN)
        found[layer] = n_expert
    return model, n_used, list(found.items()), end


def check_replaceable(path: Path) -> None:
    """Refuse to record over something else than a trace, or over one that is being recorded.

    Raises:
        MoestreamError: says what it is.
    """
    if not os.path.exists(path):
        return
    with files.open_regular(path, "trace") as file:
        beginning = file.read(len(MAGIC))
        if beginning and beginning != MAGIC:
            raise MoestreamError(f"{path}: the file exists and holds no trace", hint="choose another name, or remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the engine's writer holds an exclusive one
        except BlockingIOError as error:
            raise MoestreamError(f"{path}: another model records in it", hint="choose another name") from error
        except OSError:  # file systems without locks have to do without
            pass


def read(path: Path, without: Sequence[tuple[int, int]] = ()) -> Trace:
    """Read a trace. It is mapped: what is no trace is refused after a few bytes, whatever its size.

    Args:
        without: tokens to leave out, as first and end of ranges, counted from 0 in the first layer; batches that have one of them are.

    Raises:
        MoestreamError: it cannot be read, is no trace or of another version, its header is damaged or cut short, or a record has a
            layer or an expert that there is not, or an expert twice for a token.
    """
    with files.open_regular(path, "trace") as file:
        try:
            size_bytes = os.fstat(file.fileno()).st_size
            model, n_used_most, layers, start = _header(path, file, size_bytes)
            data = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
        except OSError as error:
            raise MoestreamError(f"cannot read the trace {path}: {error.strerror}", hint="check the path") from error

    # Batches of one shape are looked at together: one by one they would take a minute where this takes seconds.
    places: dict[tuple[int, int, int], array[int]] = defaultdict(lambda: array("q"))
    prefix = struct.Struct("<HHI")
    pos, n_records, truncated = start, 0, False
    n_seen, left_out = 0, False
    while pos < len(data):
        if len(data) - pos < prefix.size:
            truncated = True
            break
        index, n_used, n_tokens = prefix.unpack_from(data, pos)
        if index >= len(layers):
            raise MoestreamError(f"{path}: record {n_records} is of layer {index} of {len(layers)}", hint=_AGAIN)
        n_expert = layers[index][1]
        if not 1 <= n_used <= n_expert or n_tokens < 1:
            raise MoestreamError(
                f"{path}: record {n_records} has {n_tokens} tokens that use {n_used} of {n_expert} experts", hint=_AGAIN
            )
        end = pos + prefix.size + n_used * n_tokens * (1 if n_expert <= 256 else 2)
        if end > len(data):
            truncated = True
            break
        if index == 0:  # the first record of a batch: the others follow
            left_out = any(first < n_seen + n_tokens and n_seen < last for first, last in without)
            n_seen += n_tokens
        if not left_out:
            places[index, n_used, n_tokens].append(pos + prefix.size)
        pos = end
        n_records += 1

    counts = [np.zeros(n, np.int64) for _, n in layers]
    accesses = [np.zeros(n, np.int64) for _, n in layers]
    tokens = [0] * len(layers)
    raw = np.frombuffer(data, np.uint8)
    for (index, n_used, n_tokens), starts in places.items():
        layer, n_expert = layers[index]
        tokens[index] += n_tokens * len(starts)
        for ids in _ids(raw, starts, n_used * n_tokens, 1 if n_expert <= 256 else 2):
            if ids.max() >= n_expert:
                raise MoestreamError(f"{path}: layer {layer} has a choice of expert {ids.max()} of {n_expert}", hint=_AGAIN)
            by_token = np.sort(ids.reshape(-1, n_used), axis=1)
            if (by_token[:, 1:] == by_token[:, :-1]).any():
                raise MoestreamError(f"{path}: layer {layer} has an expert twice for one token", hint=_AGAIN)
            counts[index] += np.bincount(ids.ravel(), minlength=n_expert)
            by_batch = np.sort(ids, axis=1)
            first = np.ones_like(by_batch, bool)
            first[:, 1:] = by_batch[:, 1:] != by_batch[:, :-1]
            accesses[index] += np.bincount(by_batch[first], minlength=n_expert)

    first_layer = [(n_tokens, len(starts)) for (index, _, n_tokens), starts in places.items() if index == 0]
    return Trace(
        path=path,
        size_bytes=len(data),
        model=model,
        n_expert_used=n_used_most,
        layers=tuple(
            LayerTrace(layer, n_expert, counts[i], accesses[i], tokens[i]) for i, (layer, n_expert) in enumerate(layers)
        ),
        n_records=n_records,
        n_batches=sum(n for _, n in first_layer),
        n_tokens=tokens[0],
        n_single=sum(n for n_tokens, n in first_layer if n_tokens == 1),
        truncated=truncated,
    )


def _ids(raw: np.ndarray, starts: array[int], n_ids: int, id_bytes: int):
    """The ids of batches of one shape, ``[batch, n_ids]``, some megabytes at a time."""
    step = max(1, (4 << 20) // (n_ids * id_bytes))
    inside = np.arange(n_ids * id_bytes)
    for i in range(0, len(starts), step):
        block = raw[np.asarray(starts[i : i + step])[:, None] + inside]
        yield block.astype(np.int64) if id_bytes == 1 else block.view("<u2").astype(np.int64)
