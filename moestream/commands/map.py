"""``moestream map``: which experts are hot, from traces; and slots for each layer under a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import gguf_facts, model_names
from moestream.commands import options
from moestream.commands.options import Policy
from moestream.commands.trace import check_fingerprint, parse_list, text_table
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.result import Result
from moestream.routing import budget as budgets
from moestream.routing import kept, maps
from moestream.routing import replay as replaying
from moestream.routing import trace as traces
from moestream.routing.fingerprint import fingerprint
from moestream.server import learning, report
from moestream.server.records import RecordStore
from moestream.sizes import parse_size

HELP = "Router maps: which experts are chosen most, made of traces."
_CURVE_POINTS = 24  # of each layer's curve
_SHARES = (8, 16, 32)


def _curve_points(n_min: int, n_experts: set[int]) -> list[int]:
    """Slots to replay with, the ends included, closer together where there are few: that is where they differ."""
    n_max = max(n_experts)
    steps = range(1, _CURVE_POINTS)
    return sorted({n_min, *n_experts, *(round(n_min * (n_max / n_min) ** (i / _CURVE_POINTS)) for i in steps)})


def _replayed(files: list[Path], **how: Any) -> list[replaying.Run]:
    return [run for file in files for run in replaying.replay(file, **how)]


def _curves(
    files: list[Path], router_map: maps.RouterMap, facts: GgufFacts, policy: str, backend: str | None
) -> list[budgets.LayerCurve]:
    """What slots are worth in each layer, over all traces."""
    n_used = router_map.n_expert_used
    points = _curve_points(n_used, {layer.n_expert for layer in router_map.layers})
    misses: dict[int, dict[int, int]] = {layer.layer: {} for layer in router_map.layers}
    for run in _replayed(files, slots=points, policies=[policy], backend=backend):
        for counts in run.layers:
            if counts.slots == run.slots:  # not in a layer with fewer experts than that
                curve = misses[counts.layer]
                curve[counts.slots] = curve.get(counts.slots, 0) + counts.misses
    sizes = replaying.expert_bytes(facts)
    return [
        budgets.LayerCurve(layer.layer, n_used, layer.n_expert, sizes[layer.layer], misses[layer.layer])
        for layer in router_map.layers
    ]


def _missed_bytes(runs: list[replaying.Run], sizes: dict[int, int]) -> int:
    return sum(layer.misses * sizes[layer.layer] for run in runs for layer in run.layers)


def make(
    files: Annotated[list[Path], typer.Argument(metavar="TRACE…", help="Traces of one model.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The map; one that is there is replaced.")],
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for all slots, as 4GiB: also choose slots for each layer.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME|FILE|DIR", help="Needed for --budget.")] = None,
    policy: Annotated[
        Policy | None, typer.Option(help="Policy that the slots of --budget are chosen for.", show_default="lru")
    ] = None,
    backend: options.Backend = None,
) -> Result:
    """Make a map of traces: how often each expert was chosen."""
    if budget is not None and model is None:
        raise MoestreamError("--budget needs the sizes of the experts", hint="add --model FILE")
    if budget is None and (policy or backend):
        given = f"--policy {policy.value}" if policy else f"--backend {backend}"
        raise MoestreamError(
            f"{given} does nothing without --budget", hint=f"add --budget SIZE, or leave out {given.split()[0]}"
        )
    budget_bytes = parse_size("--budget", budget) if budget is not None else None
    maps.check_replaceable(out)
    recorded = [traces.read(file) for file in files]
    router_map = maps.from_traces(recorded)
    facts = gguf_facts.read(model_names.find(model)) if model is not None else None
    if facts is not None:
        check_fingerprint(facts, files[0], router_map.model, ((m.layer, m.n_expert) for m in router_map.layers))
    data: dict[str, Any] = {"map": str(out), "model": router_map.model.as_json(), "tokens": router_map.tokens}
    rows: list[tuple[str, str | None]] = [
        ("map", str(out)),
        ("model", f"{router_map.model.name} ({router_map.model.fingerprint})"),
        ("tokens", f"{router_map.tokens} in {len(files)} trace{'s' if len(files) > 1 else ''}"),
    ]
    if budget_bytes is not None:
        assert facts is not None
        name = (policy or Policy.lru).value
        curves = _curves(files, router_map, facts, name, backend)
        slots = budgets.divide(curves, budget_bytes)
        sizes = replaying.expert_bytes(facts)
        alike = budgets.same_for_all(curves, budget_bytes)
        own = _missed_bytes(_replayed(files, layer_slots=slots, policies=[name], backend=backend), sizes)
        same = _missed_bytes(_replayed(files, slots=[alike], policies=[name], backend=backend), sizes)
        better = own <= same
        if not better:  # what is chosen by curves may lose a little where they were not measured
            own, slots = same, {m.layer: min(alike, m.n_expert) for m in router_map.layers}
        router_map = replace(router_map, slots=slots)
        used = sum(slots[layer] * sizes[layer] for layer in slots)
        data |= {
            "budget_bytes": budget_bytes, "slots_bytes": used, "slots": {str(layer): n for layer, n in sorted(slots.items())},
            "policy": name, "missed_bytes": own, "slots_alike": alike, "missed_bytes_alike": same,
        }  # fmt: skip
        against = f"{alike} slots in every layer"
        if better and same:
            against = f"{1 - own / same:.1%} less than with {against}"
        elif better:
            against = f"as with {against}"
        else:
            against = f"with {against}: slots chosen by layer would read more"
        rows += [
            (
                "slots",
                f"{min(slots.values())} to {max(slots.values())} a layer, {report.size(used)} of {report.size(budget_bytes)}",
            ),
            ("to read", f"{report.size(own)} for these traces, {against} ({name})"),
        ]
    maps.write(router_map, out)
    return Result("map-make", data, report.table(rows))


def show(file: Annotated[Path, typer.Argument(metavar="MAP")]) -> Result:
    """Show which experts a map has most of."""
    router_map = maps.read(file)
    tops = [k for k in _SHARES if k < max(layer.n_expert for layer in router_map.layers)]
    layers, table = [], [["layer", "experts", *(f"top {k}" for k in tops), "slots", "most used"]]
    for layer in router_map.layers:
        slots = router_map.slots[layer.layer] if router_map.slots is not None else None
        shares = {str(k): round(layer.share_of_top(k), 5) for k in tops}
        layers.append(
            {
                "layer": layer.layer,
                "n_expert": layer.n_expert,
                "share_of_top": shares,
                "slots": slots,
                "most_used": layer.by_use()[:8],
            }
        )
        table.append([
            str(layer.layer), str(layer.n_expert), *(f"{share:.1%}" for share in shares.values()),
            "-" if slots is None else str(slots), " ".join(map(str, layer.by_use()[:8])),
        ])  # fmt: skip
    model = router_map.model
    head = f"{model.name}, {model.architecture} ({model.fingerprint}): {router_map.tokens} tokens\n"
    data = {
        "map": str(file), "model": model.as_json(), "tokens": router_map.tokens, "n_expert_used": router_map.n_expert_used,
        "layers": layers,
    }  # fmt: skip
    return Result("map-show", data, head + text_table(table))


def diff(
    first: Annotated[Path, typer.Argument(metavar="MAP")],
    second: Annotated[Path, typer.Argument(metavar="MAP")],
    top: Annotated[int, typer.Option(min=1, metavar="K", help="How many of the most used experts to compare.")] = 16,
) -> Result:
    """Show how two maps of one model differ: by text, language or task."""
    a, b = maps.read(first), maps.read(second)
    maps.check_same_model(first, a.model, second, b.model)
    found = maps.difference(a, b, top)
    layers = [{"layer": d.layer, "common": d.common, "distance": round(d.distance, 5)} for d in found]
    mean = sum(d.distance for d in found) / len(found)
    table = [
        ["layer", f"common of top {top}", "distance"],
        *([str(d.layer), str(d.common), f"{d.distance:.1%}"] for d in found),
    ]
    text = (
        f"{text_table(table)}\n{mean:.1%} of the choices would have to change on average (0%: alike, 100%: nothing in common)"
    )
    data = {"maps": [str(first), str(second)], "top": top, "distance": round(mean, 5), "layers": layers}
    return Result("map-diff", data, text)


def validate(
    file: Annotated[Path, typer.Argument(metavar="MAP")],
    trace: Annotated[Path, typer.Option(metavar="TRACE", help="A trace that the map was not made of.")],
    top: Annotated[
        str | None, typer.Option(metavar="K,…", help="Experts a layer.", show_default="from what a token uses to all")
    ] = None,
    backend: options.Backend = None,
) -> Result:
    """Show how much of another trace a map's most used experts cover, against LRU with as many slots."""
    router_map, held_out = maps.read(file), traces.read(trace)
    maps.check_same_model(file, router_map.model, trace, held_out.model)
    if missing := {layer.layer for layer in held_out.layers} - {layer.layer for layer in router_map.layers}:
        raise MoestreamError(
            f"{file} has no layer {min(missing)}, which {trace} has",
            hint="record both in the same way: with or without MTP layers",
        )
    n_max = max(layer.n_expert for layer in held_out.layers)
    ks = parse_list("--top", top) if top is not None else _curve_points(held_out.n_expert_used, {n_max})[::3]
    able = [k for k in ks if k >= held_out.n_expert_used]
    lru = {r.slots: r.hit_rate for r in replaying.replay(trace, able, policies=["lru"], backend=backend)} if able else {}
    rows = [{"top": k, "covered": round(maps.coverage(router_map, held_out, k), 5), "lru_hit_rate": lru.get(k)} for k in ks]
    table = [["top", "covered by map", "LRU hits"]]
    for row in rows:
        hits = row["lru_hit_rate"]
        table.append([str(row["top"]), f"{row['covered']:.1%}", "-" if hits is None else f"{hits:.1%}"])
    data = {"map": str(file), "trace": str(trace), "tokens": held_out.n_tokens, "rows": rows}
    return Result("map-validate", data, text_table(table))


def forget(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME|FILE|DIR", help="The model whose map is to be forgotten.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="The maps of all models.")] = False,
) -> Result:
    """Remove the map that moestream start keeps of a model, and what was recorded for it."""
    if (model is None) != all_:
        what = "--model and --all exclude each other" if all_ else "a model is needed"
        raise MoestreamError(what, hint="moestream map forget --model FILE, or --all")
    own = fingerprint(gguf_facts.read(model_names.find(model))) if model is not None else None
    store = RecordStore()
    for port in store.ports_with_traces():
        store.put_aside_trace(port)
    removed = [str(path) for path in kept.forget(own, store.recorded())]
    running = [r for r in learning.recording(store) if own is None or learning.kept_path_of(r) == str(kept.path_of(own))]
    lines = [f"removed {path}" for path in removed] or ["nothing was kept"]
    lines += [f"the server on port {r.port} goes on recording, and adds to a new map when it ends" for r in running]
    return Result("map-forget", {"removed": removed, "recording_ports": [r.port for r in running]}, "\n".join(lines))


SUBCOMMANDS = {"make": make, "show": show, "diff": diff, "validate": validate, "forget": forget}
