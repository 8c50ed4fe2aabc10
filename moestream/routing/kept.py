"""The router map that is kept of each model: what its servers have chosen so far, use of long ago counting less.

One file a model, ``DATA/maps/FINGERPRINT.json``, in the format of every router map. It is read and replaced under a lock, since several
servers of one model may end at once. ``take_in`` is the only thing that adds to it.

Ageing is that of TinyLFU's reset (Einziger, Friedman, Manes: TinyLFU, 2017): when the counts stand for enough tokens, all are halved. It
needs no clock, keeps whole numbers, and bounds the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moestream import paths
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.routing import maps
from moestream.routing import trace as traces
from moestream.routing.maps import MapLayer, RouterMap

# A map of more tokens than this is halved, as often as it takes, before more are added.
AGED_TOKENS = 50_000
# Whoever holds the lock needs some milliseconds.
LOCK_TIMEOUT_S = 3.0
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_DAMAGED = ".damaged"


def path_of(fingerprint: str) -> Path:
    """Where the map of a model is kept, whether there is one or not.

    Raises:
        MoestreamError: it is no fingerprint; it may come from a damaged file, and becomes part of a path.
    """
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise MoestreamError(f"{fingerprint[:40]!r} is no fingerprint of a model: expected 16 hex digits")
    return paths.maps_dir() / f"{fingerprint}.json"


def aged(router_map: RouterMap) -> RouterMap:
    """The same map, of at most ``AGED_TOKENS`` tokens: all counts are halved, rounded down, as often as it takes."""
    tokens, n = router_map.tokens, 0
    while tokens > AGED_TOKENS:
        tokens, n = tokens // 2, n + 1
    layers = tuple(MapLayer(m.layer, tuple(count >> n for count in m.counts)) for m in router_map.layers)
    return replace(router_map, tokens=tokens, layers=layers)


def added(old: RouterMap, new: RouterMap) -> RouterMap:
    """Both together, with the model's name as the newer one has it. Layers that one alone has stay.

    Raises:
        MoestreamError: a layer has other numbers of experts in the two.
    """
    layers = {m.layer: m for m in old.layers}
    for m in new.layers:
        known = layers.get(m.layer)
        if known is not None and known.n_expert != m.n_expert:
            raise MoestreamError(f"layer {m.layer} has {known.n_expert} experts in the kept map, and {m.n_expert} now")
        counts = m.counts if known is None else tuple(a + b for a, b in zip(known.counts, m.counts, strict=True))
        layers[m.layer] = MapLayer(m.layer, counts)
    return RouterMap(
        new.model,
        old.tokens + new.tokens,
        max(old.n_expert_used, new.n_expert_used),
        tuple(layers[il] for il in sorted(layers)),
    )


def read_for(facts: GgufFacts, fingerprint: str) -> RouterMap | None:
    """The kept map of a model, with every layer that the model has; None where none is kept.

    A layer that no server has used yet, such as an MTP layer, has counts of 0: the engine wants all that it uses.

    Raises:
        MoestreamError: it cannot be read, is damaged, or is not of this model.
    """
    path = path_of(fingerprint)
    if not os.path.lexists(path):
        return None
    hint = "moestream map forget removes it"
    router_map = maps.read(path, hint=hint)
    if router_map.model.fingerprint != fingerprint:
        raise MoestreamError(f"{path} is a map of another model: {router_map.model.fingerprint}", hint=hint)
    n_experts = {il: facts.layer_tensors(il)[0].n_expert for il in facts.moe_layers}
    layers = {il: MapLayer(il, (0,) * n) for il, n in n_experts.items()}
    for m in router_map.layers:
        if n_experts.get(m.layer) != m.n_expert:
            raise MoestreamError(f"{path}: the model has not {m.n_expert} experts in layer {m.layer}", hint=hint)
        layers[m.layer] = m
    return replace(router_map, layers=tuple(layers[il] for il in sorted(layers)), slots=None)


def skip_of(trace_path: Path) -> Path:
    """Beside a trace: tokens that are not to be added, a line for each range, its first and its end."""
    return trace_path.with_suffix(".skip")


def _left_out(trace_path: Path) -> list[tuple[int, int]]:
    try:
        lines = [line.split() for line in skip_of(trace_path).read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    return [(int(w[0]), int(w[1])) for w in lines if len(w) == 2 and all(x.isascii() and x.isdigit() for x in w)]


def _remove_trace(trace_path: Path) -> None:
    _remove(trace_path)
    _remove(skip_of(trace_path))


def take_in(trace_path: Path) -> tuple[Path, int, str | None]:
    """Add what a server has recorded to the kept map of its model, and delete the trace.

    A kept map that cannot be understood is moved aside, to ``FINGERPRINT.json.damaged``, and a new one begun. The caller sees to it
    that nobody writes the trace any more.

    Returns:
        the kept map, tokens that were added (0: nothing was recorded), and what was wrong with the map that was there, if anything.

    Raises:
        MoestreamError: the trace is damaged, and gone; or the map cannot be written, and the trace is still there.
    """
    with locked():
        if (
            not trace_path.exists() or not trace_path.stat().st_size
        ):  # another process was faster; or the engine never came to it
            _remove_trace(trace_path)
            return paths.maps_dir(), 0, None
        try:
            trace = traces.read(trace_path, _left_out(trace_path))
            path = path_of(trace.model.fingerprint)
            new = maps.from_traces([trace]) if trace.n_tokens else None
        except MoestreamError:
            _remove_trace(trace_path)
            raise
        if new is None:
            _remove_trace(trace_path)
            return path, 0, None
        complaint = None
        try:
            together = added(aged(maps.read(path)), new) if os.path.lexists(path) else new
        except MoestreamError as error:
            aside = path.with_name(path.name + _DAMAGED)
            complaint = f"{error.message}; it is moved to {aside}, and a new map is begun"
            together = new
            try:
                os.replace(path, aside)
            except OSError as failure:
                raise MoestreamError(f"cannot move {path} to {aside}: {failure.strerror}") from failure
        maps.write(together, path)
        _remove_trace(trace_path)
        return path, trace.n_tokens, complaint


def forget(fingerprint: str | None, recorded: Sequence[Path] = ()) -> list[Path]:
    """Remove the kept map of a model, or of every model (None), and what waits to be added to it.

    Args:
        recorded: traces that wait; those of other models stay.

    Returns:
        what was removed.

    Raises:
        MoestreamError: something cannot be removed.
    """
    folder = paths.maps_dir()
    with locked():
        if fingerprint is not None:
            kept = [path_of(fingerprint)]
        else:
            kept = [p.with_suffix("") if p.suffix == _DAMAGED else p for p in folder.iterdir()]
            kept = [p for p in set(kept) if p.suffix == ".json" and _FINGERPRINT.fullmatch(p.stem)]
        found = sorted(p for one in kept for p in (one, one.with_name(one.name + _DAMAGED)) if os.path.lexists(p))
        found += [p for p in recorded if fingerprint is None or _is_of(p, fingerprint)]
        failures: list[MoestreamError] = []
        for one in found:  # one that cannot be removed does not save the others
            try:
                _remove(one)
                if one in recorded:
                    _remove(skip_of(one))
            except MoestreamError as error:
                failures.append(error)
        if failures:
            raise MoestreamError("\n".join(error.message for error in failures), hint=failures[0].hint)
        return found


def _is_of(trace_path: Path, fingerprint: str) -> bool:
    with contextlib.suppress(MoestreamError):
        return traces.read(trace_path).model.fingerprint == fingerprint
    return False


def check_writable() -> None:
    """Find out beforehand whether a map could be kept.

    Raises:
        MoestreamError: the folder cannot be made or written.
    """
    folder = paths.maps_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> MoestreamError:
    return MoestreamError(
        f"cannot write to {folder}: {error.strerror or error}", hint="set MOESTREAM_HOME to a folder that can be written"
    )


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Nobody else reads, replaces or removes kept maps meanwhile.

    Raises:
        MoestreamError: the folder cannot be made, or another process does not let go of the lock.
    """
    folder = paths.maps_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise MoestreamError(
                        f"another process holds {folder / '.lock'}", hint="it lets go when it ends; try again then"
                    ) from error
                time.sleep(0.05)
            except OSError:  # file systems without locks have to do without
                break
        yield
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise MoestreamError(
            f"cannot remove {path}: it is a folder, and no router map", hint="look at it and remove it by hand"
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise MoestreamError(f"cannot remove {path}: {error.strerror}", hint="look at it and remove it by hand") from error
