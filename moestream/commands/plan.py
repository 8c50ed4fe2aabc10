"""``moestream plan``: what a start would do with a model on this machine, before it is pulled or started; and whether that came true."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import config, gguf_facts, model_names, paths, proc
from moestream.commands import options
from moestream.commands.start import DEFAULT_CTX_TOKENS, check_map, settings_of
from moestream.commands.trace import check_fingerprint, text_table
from moestream.config import Merged
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.models import names
from moestream.models.store import ModelStore
from moestream.planning import card, card_rates, fit, hardware, hits, memory, remote, speed
from moestream.planning import check as checking
from moestream.planning.fit import Chosen, check_cache_type
from moestream.planning.hits import HitModel
from moestream.planning.memory import Wishes
from moestream.planning.plan import Machine, Plan, make_plan, speed_json
from moestream.planning.speed import Rates
from moestream.result import Result
from moestream.routing import kept, maps
from moestream.routing import replay as replaying
from moestream.routing import trace as traces
from moestream.routing.fingerprint import fingerprint
from moestream.server import learning, report
from moestream.server.arguments import build_argv, parse_slots
from moestream.server.client import ServerClient, Stats
from moestream.server.planned import budget_of
from moestream.server.records import RecordStore, ServerRecord
from moestream.sizes import parse_size
from moestream.upstream import engines

_REPLAY_POINTS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
# A check asks for this many tokens where the server has not written as many yet.
CHECK_TOKENS = 48
EXIT_CODES = {0: "it can work; with --check: the plan holds", 1: "it cannot work, or the plan does not hold; or another error"}
_CHECK_PROMPT = "The purpose of this manual is to describe"
_COMPLETION_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Subject:
    """The model that is planned for.

    Attributes:
        name: as ``start`` takes it.
        fetched_bytes: of its header, over the network; None for a model that is here.
    """

    name: str
    facts: GgufFacts
    fetched_bytes: int | None = None

    @property
    def is_remote(self) -> bool:
        return self.fetched_bytes is not None


@dataclass(frozen=True)
class Measured:
    """What was found out about this machine."""

    memory: proc.Memory | None
    cores: int
    gpus: list[hardware.Gpu]
    drive: hardware.Drive
    memory_bytes_s: float
    flops: float
    cache_bytes_s: float
    prompt_flops: float
    load: float

    @property
    def busy(self) -> str | None:
        """What to say when others compute: speeds then are those of what is left, and vary."""
        if self.load <= self.cores / 2:
            return None
        n = f"{self.load:.1f} threads wanted to compute in the last minute, on {self.cores} cores"
        return f"the machine is busy: {n}; neither what is measured nor what a server reports is what it can do alone"

    @property
    def rates(self) -> Rates:
        return Rates(self.drive.bytes_s, self.memory_bytes_s, self.flops, self.cache_bytes_s, self.prompt_flops)

    def as_json(self) -> dict[str, Any]:
        return {
            "cores": self.cores,
            "available_bytes": self.memory.available_bytes if self.memory else None,
            "limited_by": self.memory.limited_by if self.memory else None,
            "gpus": [vars(gpu) for gpu in self.gpus],
            "drive": {**vars(self.drive), "rates": {str(n): rate for n, rate in self.drive.rates.items()}},
            "memory_bytes_s": self.memory_bytes_s,
            "flops": self.flops,
            "page_cache_bytes_s": self.cache_bytes_s,
            "prompt_flops": self.prompt_flops,
            "load": self.load,
        }


def subject_of(merged: Merged) -> Subject:
    """Read the header of a model that is here, or of one on a hub that is not pulled.

    Raises:
        MoestreamError: see ``gguf_facts.read``, ``model_names.locate`` and ``remote.read``.
    """
    text = merged["model"]
    if text is not None and text.startswith(names.PREFIX):
        reference = names.parse(text)
        if ModelStore().find(reference) is None:
            found = remote.read(reference)
            return Subject(names.PREFIX + found.name, found.facts, found.fetched_bytes)
    return Subject(str(text), gguf_facts.read(model_names.locate(merged)))


def measure(subject: Subject) -> Measured:
    """Measure this machine, in about a second."""
    facts = subject.facts
    n_core, load = hardware.cores(), hardware.load()
    if not facts.is_moe:
        drive = hardware.Drive(None, note="the model has no experts")
    elif subject.is_remote:
        drive = hardware.probe_folder(paths.models_dir(), hardware.request_bytes(facts))
    else:
        drive = hardware.probe_model(facts)
    size = hardware.request_bytes(facts) if facts.is_moe else memory.CHUNK_BYTES
    columns = hardware.prompt_columns(facts, speed.PROMPT_TOKENS) if facts.is_moe else 1
    return Measured(
        proc.available_memory(), n_core, hardware.gpus(), drive, hardware.memory_rate(n_core), hardware.matmul_flops(n_core),
        hardware.page_cache_rate(size), hardware.matmul_flops(n_core, columns), load,
    )  # fmt: skip


def hit_model(
    subject: Subject, map_path: Path | None, trace_path: Path | None, wishes: Wishes, available: int, notices: list[str]
) -> HitModel:
    """From the best that is known of the model's routing: a trace, a map that is given, the kept one, or nothing.

    Args:
        notices: gets why the kept map is left out, if it is.

    Raises:
        MoestreamError: the map or trace that is given cannot be read, or is of another model.
    """
    facts = subject.facts
    if not facts.is_moe:
        return HitModel("assumed", "", {})
    model = hits.assumed(facts)
    router_map, name = None, ""
    if map_path is not None:
        router_map, name = maps.read(map_path), str(map_path)
        _check_map(subject, map_path, router_map)
    elif not subject.is_remote:
        own = fingerprint(facts)
        name = str(kept.path_of(own))
        try:
            router_map = kept.read_for(facts, own)
        except MoestreamError as error:  # start goes on without it, too
            notices.append(f"the kept router map is not used: {error.message} ({error.hint})")
    if router_map is not None and router_map.tokens > 0:
        model = hits.of_map(facts, router_map, name)
    if trace_path is None:
        return model
    trace = traces.read(trace_path)
    if subject.is_remote:
        raise MoestreamError(
            f"--trace {trace_path}: the model is not here to be compared with it", hint="pull it first, or use --map"
        )
    check_fingerprint(facts, trace_path, trace.model, ((layer.layer, layer.n_expert) for layer in trace.layers))
    around = memory.decide(facts, wishes, available).slots
    counts = {min(max(round(around * f), facts.n_expert_used), facts.n_expert) for f in _REPLAY_POINTS}
    runs = replaying.replay(trace_path, sorted(counts | {facts.n_expert_used, facts.n_expert}), policies=["lru"])
    return hits.of_replay(model, runs, str(trace_path))


def _check_map(subject: Subject, path: Path, router_map: maps.RouterMap) -> None:
    layers = ((m.layer, m.n_expert) for m in router_map.layers)
    if not subject.is_remote:
        check_fingerprint(subject.facts, path, router_map.model, layers)
        return
    known = {il: subject.facts.layer_tensors(il)[0].n_expert for il in subject.facts.moe_layers}
    if any(known.get(layer) != n for layer, n in layers):
        raise MoestreamError(f"--map {path} is of another model: its layers differ", hint="leave it out")


def _engine_uses_gpu(backend: str | None) -> bool:
    """Args: backend: None for the engine in use."""
    try:
        return engines.in_use(backend).backend != "cpu"
    except MoestreamError:
        return False  # none is built


def machine_of(measured: Measured, ram: int | None, vram: int | None, *, uses_gpu: bool) -> Machine:
    """What was measured, with what was given instead.

    Args:
        uses_gpu: the engine that will be started, or was, computes on one.

    Raises:
        MoestreamError: this system does not say how much memory there is.
    """
    if vram is None and measured.gpus and uses_gpu:
        vram = sum(gpu.free_bytes for gpu in measured.gpus)
    budget = budget_of(measured.memory, measured.cores, vram, ram)
    return Machine(budget.available_bytes, budget.limited_by, budget.cores, measured.rates, budget.vram_bytes)


def _command(
    subject: Subject,
    merged: Merged,
    chosen: Chosen,
    wishes: Wishes,
    types: tuple[str | None, str | None],
    *,
    on_card: bool = False,
) -> str:
    """What to start with: the plan's decisions, and what was asked for beside them.

    A budget that ``start`` will find where this plan has found it, in a file or the environment, says there where everything goes.
    """
    words = ["moestream", "start", "--model", merged.name or subject.name, "--slots", chosen.slots]
    words += ["--ctx", str(wishes.context.n_ctx)]
    if merged["parallel"] is not None:
        words += ["--parallel", str(merged["parallel"])]
    ram_tier = chosen.ram_tier or merged["ram_tier"]
    if ram_tier is not None and (on_card or ram_tier != "none") and chosen.slots != "all":
        words += ["--ram-tier", ram_tier]
    more = [*_type_flags(types), *chosen.arguments]
    if _is_set_elsewhere(merged, "vram") or _is_set_elsewhere(merged, "ram"):
        words += ["--pool", "device"] if on_card else []
        more = _type_flags(types)
    return shlex.join([*words, *(["--", *more] if more else [])])


def _is_set_elsewhere(merged: Merged, option: str) -> bool:
    return merged[option] is not None and merged.settings[option].source not in (config.COMMAND_LINE, config.DEFAULT)


def _type_flags(types: tuple[str | None, str | None]) -> list[str]:
    """The types of the KV cache that were asked for, as arguments of llama-server."""
    more = []
    for flag, name in zip(("--cache-type-k", "--cache-type-v"), types, strict=True):
        more += [flag, name.lower()] if name is not None else []
    return more


def as_json(
    subject: Subject, measured: Measured, machine: Machine, wishes: Wishes, made: Plan, target_tps: float | None
) -> dict[str, Any]:
    """The fields of ``moestream/plan/1``, without the command."""
    facts, decided, context = subject.facts, made.memory, wishes.context
    served = facts.moe_layers_served
    in_slots = sum(min(decided.slots, facts.layer_tensors(il)[0].n_expert) for il in served)
    all_experts = sum(facts.layer_tensors(il)[0].n_expert for il in served)
    on_disk = max(0, all_experts - in_slots - made.ram_tier_experts)
    served_bytes = sum(facts.layer_tensors(il)[0].n_expert * facts.bytes_per_slot(il) for il in served)
    tier_bytes = decided.sizes.ram_bytes
    return {
        "model": {
            "name": subject.name, "architecture": facts.architecture, "files": [str(f) for f in facts.files],
            "remote": subject.is_remote, "header_bytes_fetched": subject.fetched_bytes, "total_bytes": facts.total_bytes,
            "dense_bytes": facts.dense_bytes, "expert_bytes": facts.expert_bytes, "n_layer_moe": len(served),
            "n_expert": facts.n_expert, "n_expert_used": facts.n_expert_used,
            "layers": [{"layer": il, "n_expert": facts.layer_tensors(il)[0].n_expert, "expert_bytes": facts.bytes_per_slot(il)} for il in served],
            "active_bytes_per_token": speed.active_bytes(facts),
        },
        "settings": {
            "ctx_tokens": context.n_ctx, "parallel": context.n_seq, "unified_kv": context.unified,
            "cache_type_k": context.type_k.lower(), "cache_type_v": context.type_v.lower(),
            "ubatch": min(context.n_ubatch, context.n_ctx), "threads": fit.threads(wishes, machine.budget),
        },
        "hardware": measured.as_json(),
        "memory": {
            "available_bytes": machine.available_bytes, "limited_by": machine.limited_by, "usable_bytes": decided.usable_bytes,
            "budgeted_bytes": decided.budgeted_bytes, "fits": decided.fits, "expected": decided.sizes.as_json(),
            "vram_bytes": machine.vram_bytes, "dense_on_gpu": made.on_gpu,
        },
        "slots": decided.slots,
        "staging": decided.staging,
        "tiers": [
            {"tier": "slots", "experts": in_slots, "bytes": decided.sizes.pool_bytes},
            {"tier": "ram", "experts": made.ram_tier_experts, "bytes": tier_bytes},
            {"tier": "page cache" if decided.cached else "disk", "experts": on_disk,
             "bytes": max(0, served_bytes - decided.sizes.pool_bytes - tier_bytes)},
        ],
        "hit_rate_source": made.hits.source,
        "hit_rate_words": made.hits.words,
        "prediction": speed_json(made.speed),
        "table": [row.as_json() for row in made.rows],
        "target_tokens_per_s": target_tps,
        "target_slots": made.target_slots,
        "notices": list(made.notices),
    }  # fmt: skip


_USES = (
    ("pool_bytes", "slots"), ("staging_bytes", "staging"), ("ram_bytes", "RAM tier"), ("guess_bytes", "guesses"),
    ("bounce_bytes", "read buffers"), ("dense_bytes", "dense weights"), ("kv_bytes", "KV cache"), ("compute_bytes", "compute"),
)  # fmt: skip
_LIMITS = {
    "disk": "the drive", "ram": "copies from memory to slots", "memory": "memory bandwidth", "compute": "arithmetic", "": "unknown",
}  # fmt: skip


def _rate(bytes_s: float | None) -> str:
    return "not measured" if bytes_s is None else f"{bytes_s / 1e9:.2f} GB/s"


def _tps(s: speed.Speed) -> str:
    return "-" if s.tokens_per_s is None else f"{s.tokens_per_s:.2f}" if s.tokens_per_s < 100 else f"{s.tokens_per_s:.0f}"


def as_text(data: dict[str, Any], made: Plan, measured: Measured) -> str:
    """The plan for a person."""
    model, mem, sizes, drive = data["model"], data["memory"], made.memory.sizes, measured.drive
    experts = [layer["expert_bytes"] for layer in model["layers"]]
    each = (
        report.size(experts[0])
        if min(experts) == max(experts)
        else f"{report.size(min(experts))} to {report.size(max(experts))}"
    )
    where = (
        f"{_rate(drive.bytes_s)} with {drive.in_flight} reads of {report.size(drive.request_bytes)} at a time"
        if drive.bytes_s
        else f"not measured: {drive.note}"
    )
    gpus = ", ".join(
        f"{gpu.name} with {report.size(gpu.free_bytes)} of {report.size(gpu.total_bytes)} free" for gpu in measured.gpus
    )
    settings = data["settings"]
    tiers = ", ".join(f"{tier['tier']} {tier['experts']} experts ({report.size(tier['bytes'])})" for tier in data["tiers"])
    parts = ", ".join(f"{label} {report.size(getattr(sizes, key))}" for key, label in _USES if getattr(sizes, key))
    s = made.speed
    first = "-" if s.prompt_s is None else f"{s.prompt_s:.1f} s, limited by {_LIMITS[s.prompt_limit]}"
    rows = [
        ("model", f"{model['name']} ({model['architecture']}), {report.size(model['total_bytes'])}"),
        ("experts", f"{model['n_expert']} in each of {model['n_layer_moe']} layers, {model['n_expert_used']} used per token, {each} each"),
        ("header", f"{report.size(model['header_bytes_fetched'])} fetched" if model["remote"] else None),
        ("memory", f"{report.size(mem['available_bytes'])} available ({mem['limited_by']}), {report.size(mem['usable_bytes'])} with a margin"),
        ("GPUs", gpus or None),
        ("drive", where),
        ("speeds", f"memory copies {_rate(measured.memory_bytes_s)}, page cache {_rate(measured.cache_bytes_s)}, {measured.flops / 1e9:.0f} GFLOP/s, {measured.prompt_flops / 1e9:.0f} with a prompt's tokens an expert, on {measured.cores} cores"),
        ("slots", f"{data['slots']} of {model['n_expert']} in each layer" + ("" if mem["fits"] else ", which do not fit")),
        ("tiers", tiers),
        ("takes", f"{report.size(sizes.total_bytes)}{_on_card_bytes(mem, sizes)}: {parts}"),
        ("staging", f"{data['staging']}, ubatch {settings['ubatch']}, {settings['threads']} threads"),
        ("context", f"{settings['ctx_tokens']} tokens, {settings['parallel']} at a time, KV {settings['cache_type_k']}/{settings['cache_type_v']}"),
        ("hit rate", f"{s.hit_rate:.1%} ({made.hits.words})"),
        ("decode", f"{'at most ' if s.limit in ('memory', 'compute') else ''}{_tps(s)} tok/s, limited by {_LIMITS[s.limit]}; {report.size(s.read_bytes)} read per token"),
        ("first token", f"{first} (prompt of {speed.PROMPT_TOKENS})"),
        ("on the card", _card_text(data["card"])),
        *((("notice" if i == 0 else ""), text) for i, text in enumerate(made.notices)),
    ]  # fmt: skip
    head = ["slots", "memory", "hit rate", "MiB/token", "tok/s", "512 tokens", "limit", "fits"]
    table = [
        [
            f"{row.slots}{' *' if row.slots == made.memory.slots else ''}", report.size(row.total_bytes), f"{row.speed.hit_rate:.1%}",
            f"{row.speed.read_bytes / 2**20:.1f}", _tps(row.speed), "-" if row.speed.prompt_s is None else f"{row.speed.prompt_s:.1f} s",
            row.speed.limit or "-", "yes" if row.fits else "no",
        ]
        for row in made.rows
    ]  # fmt: skip
    text = f"{report.table(rows)}\n\n{text_table([head, *table])}\n\n"
    on_card = data["card"]
    if not on_card or not on_card["command"]:
        return f"{text}start with: {data['command']}"
    in_ram = f"with slots in RAM: {data['command']}"
    return f"{text}on the card\n\n{_card_table(on_card)}\n\nstart with: {on_card['command']}\nor {in_ram}"


_CARD_LIMITS = {"disk": "the drive", "link": "the link to the card", "compute": "what the card computes"}


def _on_card_bytes(mem: dict[str, Any], sizes: Any) -> str:
    """Of the layout with slots in RAM, what of it is not in RAM."""
    if not mem["dense_on_gpu"]:
        return ""
    return f", {report.size(sizes.dense_bytes + sizes.kv_bytes + sizes.compute_bytes)} of it (dense weights, KV cache, compute) on the card"


def _card_text(on_card: dict[str, Any] | None) -> str | None:
    if on_card is None:
        return None
    can = f"{report.size(on_card['usable_bytes'])} of the {report.size(on_card['free_bytes'])} free there may be used"
    if on_card["slots"] < on_card["least_slots"]:
        return f"no: {on_card['least_slots']} slots, what one token uses, do not fit; {can}"
    text = f"{on_card['slots']} of {on_card['n_expert']} slots in each layer, {report.size(on_card['budgeted_bytes'])}; {can}"
    if not on_card["fits"]:
        most = on_card["most_slots"]
        text += f": they do not fit, {f'{most} do' if most >= on_card['least_slots'] else 'and no number does'}"
    if on_card["slots"] >= on_card["n_expert"]:
        text += "; nothing is streamed then"
    else:
        text += f"; {report.size(on_card['ram_tier_bytes'])} of locked RAM below; hit rate {on_card['hit_rate']:.1%}, {report.size(round(on_card['missed_bytes']))} a token over the link"
        text += f" ({_rate(on_card['link_bytes_s'])})"
        if on_card["read_bytes"]:
            text += f", {report.size(round(on_card['read_bytes']))} of it from the drive first"
    predicted, most = on_card["tokens_per_s"], on_card["tokens_per_s_at_most"]
    if predicted:
        return f"{text}: {predicted:.0f} tok/s, limited by {_CARD_LIMITS[on_card['limit']]}"
    return f"{text}: at most {most:.1f} tok/s, however fast the card computes" if most else text


def _card_table(on_card: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['slots']}{' *' if row['slots'] == on_card['slots'] else ''}", report.size(row["budgeted_bytes"]), f"{row['hit_rate']:.1%}",
            f"{row['missed_bytes'] / 2**20:.1f}", "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f}", row["limit"] or "-",
            "yes" if row["fits"] else "no",
        ]
        for row in on_card["table"]
    ]  # fmt: skip
    return text_table([["slots", "memory", "hit rate", "MiB/token", "tok/s", "limit", "fits"], *rows])


def plan_command(
    subject: Subject, merged: Merged, *, types: tuple[str | None, str | None], trace_path: Path | None, target_tps: float | None
) -> Result:
    """Measure, plan, report.

    Args:
        merged: all that ``start`` would be asked for.
        types: of the K and the V cache, where they are given.

    Raises:
        MoestreamError: see ``plan.make_plan`` and what reads the arguments.
    """
    facts, notices = subject.facts, []
    ctx = merged["ctx"]
    if ctx is None:
        ctx = min(DEFAULT_CTX_TOKENS, facts.n_ctx_train or DEFAULT_CTX_TOKENS)
    slots = parse_slots(merged["slots"])
    if slots in ("map", "off"):
        notices.append(f"slots: {slots} of {merged.settings['slots'].source} is not planned, auto is")
        slots = "auto"
    if facts.is_moe:
        fit.check_most_slots(slots, facts, subject.name)
    if subject.is_remote:
        notices.append(f"it is not here: moestream pull {subject.name}")
    settings = settings_of(merged, _type_flags(types), model=Path(subject.name))
    settings = replace(settings, slots=slots, ctx=ctx or facts.n_ctx_train)
    argv = build_argv(Path("llama-server"), settings)
    wishes = fit.wishes_of(argv, os.environ, facts, repacked=hardware.repacked_types())
    if slots == "auto" and facts.is_moe and (why := fit.unplanned(argv, os.environ, facts)) is not None:
        notices.append(f"start leaves --slots auto to the engine: {why}")
    ram, vram = merged["ram"], merged["vram"]
    measured, uses_gpu = measure(subject), _engine_uses_gpu(merged["backend"])
    machine = machine_of(
        measured,
        None if ram is None else parse_size("--ram", ram),
        None if vram is None else parse_size("--vram", vram),
        uses_gpu=uses_gpu,
    )
    if machine.vram_bytes is not None and not uses_gpu:
        notices.append(
            "the commands below need an engine for the card: moestream build --backend cuda; the one in use computes on the CPU alone"
        )
    if machine.vram_bytes is None and vram is None and uses_gpu:
        notices.append(
            "the engine in use is for a GPU, and none is planned with: nvidia-smi names none with memory of its own that CUDA_VISIBLE_DEVICES shows"
        )
    if facts.is_moe and facts.expert_bytes >= memory.PROBE_BYTES_MIN:
        wishes = replace(wishes, in_flight_expected=memory.in_flight_chosen(measured.drive.rates))
    model = hit_model(subject, settings.map, trace_path, wishes, machine.available_bytes, notices)
    made = make_plan(facts, machine, wishes, model, target_tps=target_tps)
    on_card = _card_json(subject, merged, measured, machine, wishes, made, types)
    if slots == "auto" and on_card and on_card["command"] and not settings.has_budget:
        notices.append("start leaves --slots auto to the engine, in the memory of the card, as the first command has it")
        if len(measured.gpus) > 1:
            notices.append(
                f"the engine's auto is for one card: with {len(measured.gpus)} give --slots N, or CUDA_VISIBLE_DEVICES=0"
            )
    made = replace(made, notices=(*made.notices, *notices, *filter(None, [measured.busy])))
    data = as_json(subject, measured, machine, wishes, made, target_tps)
    chosen = fit.choose(wishes, made.settled, machine.budget, default_threads=hardware.default_threads())
    data["command"] = _command(subject, merged, chosen, wishes, types)
    data["card"] = on_card
    return Result("plan", data, as_text(data, made, measured))


def _card_json(
    subject: Subject, merged: Merged, measured: Measured, machine: Machine, wishes: Wishes, made: Plan,
    types: tuple[str | None, str | None],
) -> dict[str, Any] | None:  # fmt: skip
    """The other layout where there is a card: slots in its memory. With its command; None without a card."""
    if machine.vram_bytes is None:
        return None
    rates = card_rates.measure_apart() if measured.gpus else card_rates.CardRates()
    free = machine.vram_bytes
    if merged["vram"] is None and len(measured.gpus) == 1 and rates.free_bytes is not None:
        free = min(free, rates.free_bytes)  # what a program finds, which takes some itself
    on_card = card.decide(
        subject.facts, wishes, made.hits, free_bytes=free, available_bytes=machine.available_bytes, rates=rates,
        disk_bytes_s=measured.drive.bytes_s,
    )  # fmt: skip
    # start then has slots in RAM, whatever a card has
    with_ram_alone = merged["vram"] is None and _is_set_elsewhere(merged, "ram")
    command = None
    if on_card.fits and not with_ram_alone:
        slots = "all" if on_card.slots >= on_card.n_expert else str(on_card.slots)
        command = _command(subject, merged, fit.Chosen(slots, placement=("-ngl", "99")), wishes, types, on_card=True)
    return {**on_card.as_json(), "command": command}


# --- whether it came true --------------------------------------------------------------------------------------------


def _record(port: int | None) -> ServerRecord:
    store = RecordStore()
    running = [r for r in store.all() if isinstance(r, ServerRecord) and r.server_alive and port in (None, r.port)]
    if not running:
        where = "" if port is None else f" on port {port}"
        raise MoestreamError(f"no server{where} runs that moestream has started", hint="moestream start --model NAME --detach")
    if len(running) > 1:
        ports = ", ".join(str(r.port) for r in running)
        raise MoestreamError(
            f"{len(running)} servers run, on the ports {ports}", hint=f"name one of them: --port {running[0].port}"
        )
    return running[0]


def _settings_of(record: ServerRecord, facts: GgufFacts, stats: Stats) -> Wishes:
    """What a running server was started with."""
    requested = str((stats.raw or {}).get("slots_requested"))
    if requested == "map":
        raise MoestreamError(
            "the server's slots are those of a router map, other ones in each layer, which is not planned",
            hint="start it with --slots N",
        )
    return fit.wishes_of(record.argv, {}, facts, repacked=hardware.repacked_types(), slots=requested)


def check_command(port: int | None, map_path: Path | None) -> Iterator[Result]:
    """Hold a plan against a running server.

    Raises:
        MoestreamError: no server, one that does not stream, or a deviation beyond what counts as held.
    """
    record = _record(port)
    subject = Subject(record.model, gguf_facts.read(Path(record.model)))
    facts = subject.facts
    with ServerClient(record.url, api_key=record.api_key, timeout_s=_COMPLETION_TIMEOUT_S) as client:
        stats = client.stats()
        if not stats.available or not stats.streaming:
            raise MoestreamError(
                f"the server on port {record.port} cannot be compared: {stats.reason or 'it streams no experts, or sleeps'}",
                hint="start it with --slots auto, or send it a request first",
            )
        wishes = _settings_of(record, facts, stats)
        load = hardware.load()  # the completion below is load, too
        before = stats
        rate, how, asked = _decode_rate(client, may_ask=learning.can_leave_out(record, RecordStore(), os.environ))
        stats = client.stats()
        if asked:  # nobody's use of the model
            learning.leave_out(record, RecordStore(), _tokens(before), _tokens(stats))
    raw = stats.raw or {}
    measured = replace(measure(subject), load=load)
    machine = machine_of(measured, None, None, uses_gpu=_engine_uses_gpu(record.backend))
    # What was available to the server when it started, which may have a limit of its own; else what there is now, and what it has taken.
    now = machine.available_bytes + stats.memory.get("total_bytes", 0)
    machine = replace(machine, available_bytes=record.available_bytes or now)
    notices: list[str] = []
    model = hit_model(subject, map_path, None, wishes, machine.available_bytes, notices)
    real = int(raw["slots"])
    made = make_plan(facts, machine, replace(wishes, slots=real), model)
    known = replace(model, measured={real: dict.fromkeys(facts.moe_layers_served, stats.hit_rate or 0.0)})
    cached = raw["io"]["mode"] == "buffered"
    path = card.looks_after(raw)
    if path:
        rates = card_rates.measure_apart()
        free = sum(gpu.free_bytes for gpu in measured.gpus) + stats.memory.get("device_bytes", 0)
        disk_bytes_s = measured.cache_bytes_s if cached else measured.drive.bytes_s
        on_card = card.decide(
            facts, replace(wishes, slots=real), model, free_bytes=free, available_bytes=machine.available_bytes, rates=rates,
            disk_bytes_s=disk_bytes_s,
        )  # fmt: skip
        wanted = on_card.most_slots if wishes.slots is None else min(wishes.slots, on_card.n_expert)
        with_real_hits = card.predict(
            facts, known, rates, slots=on_card.slots, ram_tier_bytes=on_card.ram_tier_bytes, disk_bytes_s=disk_bytes_s
        )
        expected, own, read = card.expected(made.memory.sizes.as_json(), on_card, path), on_card.speed, on_card.speed.read_bytes
        staging, limits = "full width" if on_card.staging_bytes else "none", path != "copy"
    else:
        wanted = memory.decide(facts, wishes, machine.available_bytes).slots
        with_real_hits = speed.predict(
            facts, known, machine.rates, slots=real, ram_bytes=made.memory.sizes.ram_bytes, ubatch=wishes.context.n_ubatch, cached=cached,
        )  # fmt: skip
        expected, own, read = made.memory.sizes.as_json(), made.speed, made.speed.read_bytes
        staging, limits = made.memory.staging, False
    n_token = _tokens(stats)
    deviations = [
        checking.Deviation("slots", wanted, real, None if wishes.slots is None else 0.0),
        *checking.memory(expected, stats.memory),
        checking.Deviation("hit_rate", own.hit_rate, stats.hit_rate, None),
        checking.Deviation("read_bytes_per_token", read, stats.total("bytes_read") / n_token if n_token else None, None),
        # what memory or arithmetic of the processor limits is a bound, which kernels do not reach; a card's hit rate is often a mere assumption
        checking.Deviation("tokens_per_s", own.tokens_per_s, rate, checking.SPEED_TOLERANCE if not path and own.limit == "disk" else None),
        checking.Deviation("tokens_per_s_at_reported_hits", with_real_hits.tokens_per_s, rate, checking.SPEED_TOLERANCE if limits else None),
    ]  # fmt: skip
    wrong = checking.failed(deviations)
    data = {
        "port": record.port, "model": record.model, "held": not wrong, "hit_rate_source": model.source, "tokens_per_s_from": how,
        "notices": list(filter(None, [*notices, measured.busy])), "staging_predicted": staging, "staging_reported": raw.get("staging"),
        "deviations": [d.as_json() for d in deviations],
    }  # fmt: skip
    busy = f"\nnotice: {measured.busy}" if measured.busy else ""
    head = ["figure", "predicted", "reported", "deviation", "held"]
    lines = [[d.name, _figure(d.name, d.predicted), _figure(d.name, d.reported), _percent(d), _held(d)] for d in deviations]
    yield Result("plan-check", data, f"{text_table([head, *lines])}\n\nspeed from {how}; hit rate {model.words}{busy}")
    if wrong:
        raise MoestreamError(
            f"the plan does not hold: {', '.join(d.name for d in wrong)}",
            hint="docs/planning.md says what is assumed; a router map of your use (--map) makes hit rates real",
        )


def _tokens(stats: Stats) -> int:
    """That the server has computed so far."""
    return stats.total("tokens_decode") + stats.total("tokens_prefill")


def _decode_rate(client: ServerClient, *, may_ask: bool) -> tuple[float | None, str, bool]:
    """Tokens a second, what says so, and whether the server was asked for them.

    Args:
        may_ask: whether what it is asked stays out of the kept router map.
    """
    counters = client.metrics()
    tokens = counters.get("llamacpp:tokens_predicted_total", 0.0)
    seconds = counters.get("llamacpp:tokens_predicted_seconds_total", 0.0)
    if tokens >= CHECK_TOKENS and seconds > 0:
        return tokens / seconds, f"/metrics, {tokens:.0f} tokens", False
    if not may_ask:
        return None, f"fewer than {CHECK_TOKENS} tokens: it records for the kept map, and sleeps, so it is not asked", False
    rate = client.decode_rate(_CHECK_PROMPT, CHECK_TOKENS)
    return rate, f"a completion of {CHECK_TOKENS} tokens", True


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes") or name.startswith("read_bytes"):
        return report.size(value)
    return f"{value:.1%}" if name == "hit_rate" else f"{value:.0f}" if name == "slots" else f"{value:.2f}"


def _percent(d: checking.Deviation) -> str:
    return "-" if d.relative is None or d.relative == float("inf") else f"{d.relative:+.1%}"


def _held(d: checking.Deviation) -> str:
    return {True: "yes", False: f"no, beyond {d.tolerance or 0:.0%}", None: "-"}[d.held]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As for start; or hf:OWNER/REPO[:QUANT], of which the header alone is fetched."),
    ] = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|all",
            help="Expert slots in each layer.",
            show_default="auto",
            autocompletion=lambda: ["auto", "all"],
        ),
    ] = None,
    ctx: options.Ctx = None,
    parallel: Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests served at a time.")] = None,
    cache_type_k: Annotated[str | None, typer.Option(metavar="TYPE", help="Type of the K cache.", show_default="f16")] = None,
    cache_type_v: Annotated[str | None, typer.Option(metavar="TYPE", help="Type of the V cache.", show_default="f16")] = None,
    ram_tier: options.RamTier = None,
    map_: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="Hit rates from this router map.", show_default="the kept one")
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Hit rates by replay of this trace.")] = None,
    target_tps: Annotated[
        float | None, typer.Option(metavar="X", help="Say from how many slots on so many tokens a second are reached.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold the plan against a server that runs.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="N", help="With --check: which server.")] = None,
) -> Iterator[Result]:
    """Say what a start would do: slots, memory, speed, and what limits it. Reads headers, measures for a second, starts nothing."""
    if check:
        given = [("MODEL", model), ("--ram", ram), ("--vram", vram), ("--slots", slots), ("--ctx", ctx), ("--parallel", parallel),
                 ("--ram-tier", ram_tier), ("--cache-type-k", cache_type_k), ("--cache-type-v", cache_type_v), ("--trace", trace), ("--target-tps", target_tps)]  # fmt: skip
        if wrong := [flag for flag, value in given if value is not None]:
            raise MoestreamError(
                f"--check cannot be combined with {', '.join(wrong)}: the server's own settings count",
                hint="leave them out",
                exit_code=2,
            )
        yield from check_command(port, None if map_ is None else check_map(map_))
        return
    if port is not None:
        raise MoestreamError(f"--port {port} does nothing without --check", hint="add --check, or leave it out", exit_code=2)
    if model is None:
        raise MoestreamError("no model is given", hint="moestream plan FILE, or moestream plan hf:OWNER/REPO", exit_code=2)
    if target_tps is not None and not 0 < target_tps < float("inf"):
        raise MoestreamError(f"--target-tps {target_tps:g}: expected a number above 0", hint="for example --target-tps 5")
    for flag, value in (("--cache-type-k", cache_type_k), ("--cache-type-v", cache_type_v)):
        if value is not None:
            check_cache_type(flag, value)
    if slots is not None:
        slots = parse_slots(slots, ("auto", "all"))
    given = options.given(model=model, slots=slots, ram=ram, vram=vram, ctx=ctx, parallel=parallel, ram_tier=ram_tier, map=map_)
    merged = config.merge(given, os.environ, config.load())
    types = (cache_type_k, cache_type_v)
    try:
        result = plan_command(subject_of(merged), merged, types=types, trace_path=trace, target_tps=target_tps)
    except MoestreamError as error:
        raise config.explained(error, merged.settings) from error
    yield result
