"""Router maps: how often each expert of each layer was chosen, and, where asked for, how many slots each layer should have.

The format is in docs/traces.md. The engine reads them too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moestream.errors import MoestreamError
from moestream.routing import files
from moestream.routing.trace import MAX_EXPERTS, ModelName, Trace, read_model

FORMAT = "moestream.map"
VERSION = 1
_MAX_COUNT = 1 << 62
_MAX_BYTES = 256 << 20
_AGAIN = "make it again: moestream map make"


@dataclass(frozen=True)
class MapLayer:
    """One layer: its block number, and how often each of its experts was chosen."""

    layer: int
    counts: tuple[int, ...]

    @property
    def n_expert(self) -> int:
        return len(self.counts)

    def by_use(self) -> list[int]:
        """The experts, the most used first; of equals the first."""
        return sorted(range(self.n_expert), key=lambda e: (-self.counts[e], e))

    def share_of_top(self, k: int) -> float:
        """How much of all choices the k most used experts have; 0 when nothing was chosen."""
        total = sum(self.counts)
        return sum(self.counts[e] for e in self.by_use()[:k]) / total if total else 0.0


@dataclass(frozen=True)
class RouterMap:
    """A map.

    Attributes:
        tokens: that chose.
        n_expert_used: experts that a token uses, in the layer with the most.
        slots: by layer, as ``map make --budget`` chose them; None without.
    """

    model: ModelName
    tokens: int
    n_expert_used: int
    layers: tuple[MapLayer, ...]
    slots: Mapping[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model.as_json(),
            "tokens": self.tokens,
            "n_expert_used": self.n_expert_used,
            "layers": [{"layer": m.layer, "n_expert": m.n_expert, "counts": list(m.counts)} for m in self.layers],
        }
        if self.slots is not None:
            data["slots"] = {str(layer): n for layer, n in sorted(self.slots.items())}
        return data


def check_same_model(path: Path, model: ModelName, other_path: Path, other: ModelName) -> None:
    """Refuse to put together what belongs to different models.

    Raises:
        MoestreamError: names both fingerprints.
    """
    if model.fingerprint != other.fingerprint:
        raise MoestreamError(
            f"{other_path} is of another model: {other.name} ({other.fingerprint}), and {path} is of {model.name} "
            f"({model.fingerprint})",
            hint="use traces and maps of one model; its quantised versions count as the same, its fine-tunes do not",
        )


def from_traces(traces: Sequence[Trace]) -> RouterMap:
    """Add up the choices of traces of one model.

    Raises:
        MoestreamError: they are of different models or layers, or nothing was recorded.
    """
    first = traces[0]
    for trace in traces[1:]:
        check_same_model(first.path, first.model, trace.path, trace.model)
        if [(t.layer, t.n_expert) for t in trace.layers] != [(t.layer, t.n_expert) for t in first.layers]:
            raise MoestreamError(
                f"{trace.path} has other layers than {first.path}",
                hint="record both in the same way: with or without MTP layers",
            )
    tokens = sum(trace.n_tokens for trace in traces)
    if tokens == 0:
        raise MoestreamError(
            f"nothing was recorded in {', '.join(str(t.path) for t in traces)}", hint="moestream trace record records"
        )
    counts = [np.sum([trace.layers[i].counts for trace in traces], axis=0) for i in range(len(first.layers))]
    layers = tuple(MapLayer(t.layer, tuple(int(n) for n in counts[i])) for i, t in enumerate(first.layers))
    return RouterMap(first.model, tokens, max(t.n_expert_used for t in traces), layers)


def check_replaceable(path: Path) -> None:
    """Refuse to write a map over something else than a map.

    Raises:
        MoestreamError: says why it is none.
    """
    if os.path.exists(path):
        read(path, hint="choose another name, or remove it")


def write(router_map: RouterMap, path: Path) -> None:
    """Write a map whole or not at all; one that is there is replaced.

    Raises:
        MoestreamError: it cannot be written, or the file is there and is no map.
    """
    check_replaceable(path)
    with files.replacing(path, "map") as fresh:
        try:
            fresh.write_text(json.dumps(router_map.as_json()) + "\n", encoding="utf-8")
        except OSError as error:
            raise MoestreamError(f"cannot write the map {path}: {error.strerror}", hint="is the disk full?") from error


def read(path: Path, *, hint: str = _AGAIN) -> RouterMap:
    """Read a map, strictly.

    Raises:
        MoestreamError: it cannot be read, is none or of another version, or says something impossible.
    """
    try:
        with files.open_regular(path, "map") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > _MAX_BYTES:
                raise MoestreamError(
                    f"{path} is not a map: it has {size_bytes / 2**20:.0f} MiB, and no map has more than {_MAX_BYTES >> 20}",
                    hint=hint,
                )
            data = json.loads(file.read())
    except OSError as error:
        raise MoestreamError(f"cannot read the map {path}: {error.strerror}", hint="check the path") from error
    except (ValueError, RecursionError) as error:
        raise MoestreamError(f"{path} is not a map: it is no JSON ({error})", hint=hint) from error

    def fail(what: str) -> MoestreamError:
        return MoestreamError(f"{path}: {what}", hint=hint)

    def count(value: Any, what: str, least: int = 0, most: int = _MAX_COUNT) -> int:
        if type(value) is not int or not least <= value <= most:
            raise fail(f"{what} is {value!r}: expected a number from {least}")
        return value

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise MoestreamError(f'{path} is not a map: its "format" is not "{FORMAT}"', hint=hint)
    if data.get("version") != VERSION:
        raise MoestreamError(f"{path} is a map of version {data.get('version')!r}: expected {VERSION}", hint=hint)
    model = read_model(data.get("model"))
    if model is None:
        raise fail("it names no model")
    entries = data.get("layers")
    if not isinstance(entries, list) or not entries:
        raise fail("it has no layers")
    layers: list[MapLayer] = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("counts"), list):
            raise fail(f"a layer has no counts: {str(entry)[:80]}")
        layer = count(entry.get("layer"), "the number of a layer")
        if any(layer == known.layer for known in layers):
            raise fail(f"layer {layer} is there twice")
        n_expert = count(entry.get("n_expert"), f"n_expert of layer {layer}", 1, MAX_EXPERTS)
        if len(entry["counts"]) != n_expert:
            raise fail(f"layer {layer} has {len(entry['counts'])} counts for {n_expert} experts")
        layers.append(MapLayer(layer, tuple(count(n, f"a count of layer {layer}") for n in entry["counts"])))
    slots = _slots(data["slots"], layers, fail, count) if "slots" in data else None
    tokens, n_used = count(data.get("tokens"), "tokens"), count(data.get("n_expert_used"), "n_expert_used", 1, MAX_EXPERTS)
    return RouterMap(model, tokens, n_used, tuple(layers), slots)


def _slots(value: Any, layers: list[MapLayer], fail: Any, count: Any) -> dict[int, int]:
    known = {str(layer.layer): layer for layer in layers}
    if not isinstance(value, dict) or set(value) != set(known):
        raise fail("its slots are not of its layers")
    found = {}
    for name, n in value.items():
        found[known[name].layer] = count(n, f"slots of layer {name}", 1)
        if n > known[name].n_expert:
            raise fail(f"slots of layer {name} is {n}: it has {known[name].n_expert} experts")
    return found


@dataclass(frozen=True)
class LayerDifference:
    """How two maps differ in a layer.

    Attributes:
        common: of the k most used experts, how many are the same.
        distance: half the sum of the differences of shares: 0 alike, 1 nothing in common.
    """

    layer: int
    common: int
    distance: float


def difference(a: RouterMap, b: RouterMap, k: int) -> list[LayerDifference]:
    """Compare two maps of one shape, layer by layer.

    Raises:
        MoestreamError: their layers differ.
    """
    if [(m.layer, m.n_expert) for m in a.layers] != [(m.layer, m.n_expert) for m in b.layers]:
        raise MoestreamError("the maps have different layers", hint="compare maps of one model, recorded in the same way")
    found = []
    for x, y in zip(a.layers, b.layers, strict=True):
        share_x, share_y = (np.array(m.counts) / max(1, sum(m.counts)) for m in (x, y))
        common = len(set(x.by_use()[:k]) & set(y.by_use()[:k]))
        found.append(LayerDifference(x.layer, common, float(np.abs(share_x - share_y).sum() / 2)))
    return found


def coverage(router_map: RouterMap, held_out: Trace, k: int) -> float:
    """How many of the accesses of a trace are of one of the k experts that the map has most of, over all layers.

    An access is one expert wanted by one batch, as in docs/stats.md, so that it can be held against a hit rate.

    Raises:
        MoestreamError: a layer of the trace is not in the map, or has another number of experts there.
    """
    of_top = total = 0
    by_layer = {m.layer: m for m in router_map.layers}
    for layer in held_out.layers:
        known = by_layer.get(layer.layer)
        if known is None or known.n_expert != layer.n_expert:
            there = "no such layer" if known is None else f"{known.n_expert} there"
            raise MoestreamError(
                f"{held_out.path}: layer {layer.layer} has {layer.n_expert} experts, and the map has {there}",
                hint="record both in the same way: with or without MTP layers",
            )
        of_top += int(layer.accesses[known.by_use()[:k]].sum())
        total += int(layer.accesses.sum())
    return of_top / total if total else 0.0
