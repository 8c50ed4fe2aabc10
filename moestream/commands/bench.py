"""``moestream bench``: how fast a model answers here, and against stock llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import config, gguf_facts
from moestream.commands import options
from moestream.commands.start import DEFAULT_CTX_TOKENS, make_plan, settings_of
from moestream.commands.trace import text_table
from moestream.config import BUILT_IN
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.measuring import figures, machine, plot
from moestream.measuring.runs import Bench, Failure, Outcome, OutputsDiffer, Side, Stopped
from moestream.result import Result
from moestream.server import report
from moestream.server.arguments import (
    DEFAULT_HOST,
    ServerSettings,
    flag_of,
    parse_slots,
    value_after,
)
from moestream.server.supervise import notice, stop_on_signals
from moestream.upstream import engines

EXIT_OUTPUTS_DIFFER = 3
EXIT_CODES = {
    0: "measured; stock may have failed, which is told",
    1: "a side of moestream could not be measured to its end, or another error",
    EXIT_OUTPUTS_DIFFER: "outputs differ",
    130: "interrupted; what there was by then is printed",
}
STOCK = "stock"


class Versus(StrEnum):
    stock = STOCK


def slot_counts(text: str) -> list[str]:
    """``8,32,auto`` as settings, in this order, each once.

    Raises:
        MoestreamError: one of them is neither a number nor a word that ``--slots`` takes, or turns streaming off.
    """
    found = [parse_slots(part, ("auto", "all", "map", "off")) for part in text.split(",")]
    if "off" in found:
        raise MoestreamError(
            f"--slots {text}: off is what stock llama.cpp does", hint="leave it out, and compare with --vs stock"
        )
    return list(dict.fromkeys(found))


def without_streaming(extra: Iterable[str]) -> tuple[str, ...]:
    """Arguments for llama-server without those of moestream's engine, each of which has a value."""
    kept: list[str] = []
    skip = False
    for argument in extra:
        if skip:
            skip = False
        elif flag_of(argument).startswith("--moe-"):
            skip = True
        else:
            kept.append(argument)
    return tuple(kept)


def make_sides(
    settings: ServerSettings, slots: Sequence[str], *, stock: bool, backend: str | None, ready_timeout_s: float
) -> list[Side]:
    """What is compared, stock last. All checks that need no process are made."""
    # One answer at a time on a free port of this machine alone; nothing is learned from it, nothing filled beforehand.
    base = replace(
        settings, host=DEFAULT_HOST, port=0, parallel=1, learn=None, warm="off", kept_map=None if settings.map else False
    )
    how: dict[str, Any] = {"backend": backend, "ready_timeout_s": ready_timeout_s, "tell": _nothing}
    sides = [
        Side(f"moestream {n}{' slots' if n.isdigit() else ''}", partial(make_plan, replace(base, slots=n), **how), streams=True)
        for n in slots
    ]
    plans = [make_plan(replace(base, slots=n), **{**how, "tell": notice}) for n in slots]  # said once, not in every round
    if stock:
        # Where a quota leaves fewer cores than llama.cpp would take, a plan says so, and stock is not to lose by that.
        own = value_after(base.extra, "-t", "--threads")
        threads = value_after(plans[0].argv, "-t") if own is None else None
        extra = without_streaming(base.extra)
        plain = replace(base.without_streaming(), extra=extra if threads is None else ("-t", threads, *extra))
        sides.append(Side(STOCK, partial(make_plan, plain, **how), streams=False))
        sides[-1].plan()
    return sides


def _nothing(line: str) -> None:
    """Tell nothing."""


def _check_room(settings: ServerSettings, facts: GgufFacts, n_prompt: int, n_tokens: int) -> None:
    trained = facts.n_ctx_train or DEFAULT_CTX_TOKENS
    ctx = min(DEFAULT_CTX_TOKENS, trained) if settings.ctx is None else settings.ctx or trained
    if n_prompt + n_tokens > ctx:
        raise MoestreamError(
            f"--prompt {n_prompt} and --tokens {n_tokens} do not fit into a context of {ctx} tokens",
            hint=f"--ctx {n_prompt + n_tokens}, or fewer",
        )


def bench(
    slots: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Expert slots, each a side: numbers, auto, all, map.", show_default=BUILT_IN["slots"]),
    ] = None,
    vs: Annotated[Versus | None, typer.Option(help="Also measure the same engine without streaming.")] = None,
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds; each side has its turn in each.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of each answer.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the prompt.")] = 128,
    cold: Annotated[
        bool | None,
        typer.Option("--cold/--warm", help="Only with the page cache emptied, or only a second answer.", show_default="both"),
    ] = None,
    plot_: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: FILE.png or FILE.svg.")] = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    ctx: options.Ctx = None,
    io_threads: options.IoThreads = None,
    io: options.IoMode = None,
    policy: options.PolicyName = None,
    overlap: options.Overlap = None,
    ram_tier: options.RamTier = None,
    prefetch: options.PrefetchMode = None,
    pool: options.PoolPlace = None,
    gpu_path: options.GpuPathName = None,
    require_gpu: options.RequireGpu = None,
    map_: Annotated[str | None, typer.Option("--map", metavar="FILE", help="A router map.")] = None,
    router_top_k: options.RouterTopK = None,
    backend: options.Backend = None,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For each answer.")] = 1800.0,
    ready_timeout: options.ReadyTimeout = None,
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL -- LLAMA ARGS…", help="File, directory or name; what to pass on to every llama-server."),
    ] = None,
) -> Generator[Result, None, None]:
    """Measure answers of a model, cold and warm, outputs compared first; against stock llama.cpp with --vs stock."""
    rest = list(extra or ())
    if not rest or rest[0].startswith("-"):
        raise MoestreamError("no model is given", hint="moestream bench FILE --vs stock", exit_code=2)
    # What a bench decides itself is not left to files: one that sets them is for servers.
    given = options.given(
        model=rest.pop(0), ram=ram, vram=vram, ctx=ctx, io_threads=io_threads, io=io, policy=policy, overlap=overlap, ram_tier=ram_tier,
        prefetch=prefetch, pool=pool, gpu_path=gpu_path, require_gpu=require_gpu, map=map_, router_top_k=router_top_k, backend=backend,
        ready_timeout=ready_timeout, slots=None if slots is None else slot_counts(slots)[0],
    )  # fmt: skip
    merged = config.merge(given, os.environ, config.load())
    try:
        counts = slot_counts(merged["slots"] if slots is None else slots)
        settings = settings_of(merged, rest)
        if plot_ is not None:
            plot.check(plot_)
        facts = gguf_facts.read(settings.model)
        _check_room(settings, facts, prompt, tokens)
        sides = make_sides(
            settings, counts, stock=vs is not None, backend=merged["backend"], ready_timeout_s=merged["ready_timeout"]
        )
    except MoestreamError as error:
        raise config.explained(error, merged.settings) from error
    caches = ("cold", "warm") if cold is None else ("cold",) if cold else ("warm",)
    work = Bench(sides, facts.files, caches=caches, n_rounds=runs, n_tokens=tokens, n_prompt=prompt, timeout_s=timeout)
    yield from _measure(work, facts, merged["backend"], plot_)


def _measure(work: Bench, facts: GgufFacts, backend: str | None, plot_path: Path | None) -> Generator[Result, None, None]:
    before = machine.conditions()
    outcome, differ, stopped, broken = work.outcome, None, False, None
    with stop_on_signals(work.stop):
        try:
            work.run()
        except OutputsDiffer as error:
            differ = error
        except Stopped:
            stopped = True
        except MoestreamError as error:  # no matter of a side; what was measured until then is shown all the same
            broken = error
    disturbed = machine.disturbances(before, machine.conditions(look_s=0), outcome.seen)
    data = _data(work, facts, backend, before, disturbed, differ)
    if differ is not None:
        yield Result("bench", data)
        raise MoestreamError(
            f"outputs differ, so no speed is shown: {differ.first} and {differ.second} part at {differ.difference}",
            hint="the same command with MOESTREAM_CHECK=1 in the environment finds slots that changed; report it",
            exit_code=EXIT_OUTPUTS_DIFFER,
        )
    if outcome.runs:
        yield Result("bench", data, _text(data, outcome))
        if plot_path is not None:
            plot.draw(plot_path, outcome.runs, f"{facts.files[0].name}, {work.n_tokens} tokens after {outcome.prompt_tokens}")
            notice(f"plot: {plot_path}")
    if stopped:
        what = f"{len(outcome.runs)} of {outcome.planned_runs} runs were measured" if outcome.runs else "nothing was measured"
        raise MoestreamError(f"stopped: {what}", exit_code=130)
    if broken is not None:
        raise broken
    if not outcome.runs:
        for failure in outcome.failures[1:]:
            notice(_failure_line(failure))
    for failure in outcome.failures:
        if failure.side != STOCK or not outcome.runs:
            raise MoestreamError(f"{failure.side} could not be measured: {failure.message}", hint=failure.hint)


def _data(
    work: Bench,
    facts: GgufFacts,
    backend: str | None,
    before: machine.Conditions,
    disturbed: list[str],
    differ: OutputsDiffer | None,
) -> dict[str, Any]:
    outcome = work.outcome
    engine = engines.in_use(backend)
    shown = [] if differ is not None else outcome.runs
    parted = None
    if differ is not None:
        at = differ.difference
        parted = {
            "first": differ.first, "second": differ.second, "token": at.token,
            "first_token": at.first and asdict(at.first), "second_token": at.second and asdict(at.second),
        }  # fmt: skip
    return {
        "model": {
            "path": str(facts.files[0]), "name": facts.files[0].name, "size_bytes": facts.total_bytes, "expert_bytes": facts.expert_bytes,
        },
        "engine": engine.id,
        "backend": engine.backend,
        "machine": asdict(before),
        "setting": {
            "tokens": work.n_tokens, "prompt_tokens": work.n_prompt, "rounds": work.n_rounds, "caches": list(work.caches),
            "sides": [side.name for side in work.sides],
        },
        "sides": outcome.engine_facts,
        "complete": differ is None and len(outcome.runs) == outcome.planned_runs,
        "output": {"equal": differ is None, "sha256": outcome.sha256 if differ is None else None, "answers": outcome.n_answers, "difference": parted},
        "summary": figures.summarise(shown),
        "versus": figures.paired_ratios(shown, STOCK),
        "failures": [asdict(failure) for failure in outcome.failures],
        "disturbances": disturbed,
        "runs": [asdict(run) for run in shown],
    }  # fmt: skip


_FIGURES = {"decode_tok_per_s": "decode", "prompt_tok_per_s": "prompt", "ttft_s": "time to the first token (less is better)"}


def _text(data: dict[str, Any], outcome: Outcome) -> str:
    model, setting = data["model"], data["setting"]
    rounds = f"{setting['rounds']} round{'' if setting['rounds'] == 1 else 's'}"
    head = [
        ("model", f"{model['name']}, {report.size(model['size_bytes'])}, experts {report.size(model['expert_bytes'])}"),
        ("engine", f"{data['engine']} ({data['backend']})"),
        (
            "runs",
            f"{setting['tokens']} tokens after a prompt of {setting['prompt_tokens']}, greedy; {rounds}, sides in turn",
        ),
        ("output", f"the same in all {data['output']['answers']} answers, sha256 {(outcome.sha256 or '')[:16]}"),
    ]
    if not data["complete"]:
        head.append(("notice", f"not complete: {len(outcome.runs)} of {outcome.planned_runs} runs"))
    lines = [report.table(head), "", text_table(_table(data["summary"]))]
    if data["versus"]:
        lines.append("")
    lines += [_ratio_line(ratio) for ratio in data["versus"]]
    lines += [_failure_line(failure) for failure in outcome.failures]
    if data["disturbances"]:
        lines += ["", "may have disturbed:", *(f"  {line}" for line in data["disturbances"])]
    return "\n".join(lines)


def _ratio_line(ratio: dict[str, Any]) -> str:
    pairs = f"{ratio['pairs']} pair{'' if ratio['pairs'] == 1 else 's'}"
    what = f"{_FIGURES[ratio['figure']]}, {ratio['cache']}: {ratio['side']}"
    span = f"{_times(ratio['ratio_min'])} to {_times(ratio['ratio_max'])}"
    if ratio["ratio_min"] < 1 < ratio["ratio_max"]:  # the middle of such pairs is chance
        return f"{what} against {STOCK}: no clear difference ({span} times, {pairs})"
    return f"{what} {_times(ratio['ratio'])}x {STOCK} ({span}, {pairs})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _failure_line(failure: Failure) -> str:
    """In one line, with what to do about stock's usual end."""
    had_runs = failure.kind in ("died", "timeout")
    text = f"{failure.side}: no {'more runs' if had_runs else 'speed'}, {failure.kind}: {failure.message.splitlines()[0]}"
    if failure.kind == "killed":
        text += "; the kernel does that to what uses too much memory"
        if failure.side == STOCK:
            text += " (repacked weights are a copy in memory: -- --no-repack measures the mapped file alone)"
    return text


def _table(rows: list[dict[str, Any]]) -> list[list[str]]:
    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value / scale, form)

    vram = any(row["peak_vram_bytes"] is not None for row in rows)
    head = ["side", "cache", "runs", "load s", "TTFT s", "prompt tok/s", "decode tok/s", "range", "p50 ms", "p95 ms", "hits",
            "disk MB/token", "experts MB/token", "stall", "RSS GiB", "anon GiB", *(["VRAM GiB"] if vram else [])]  # fmt: skip
    table = [head]
    for row in rows:
        low, high = row["decode_tok_per_s_min"], row["decode_tok_per_s_max"]
        table.append([
            row["side"], row["cache"], str(row["runs"]), cell(row["load_s"], ".1f"), cell(row["ttft_s"], ".3f"),
            cell(row["prompt_tok_per_s"], ".1f"), cell(row["decode_tok_per_s"], ".2f"), "-" if low is None else f"{low:.2f}-{high:.2f}",
            cell(row["token_p50_s"], ".2f", 1e-3), cell(row["token_p95_s"], ".2f", 1e-3), cell(row["hit_rate"], ".1%"),
            cell(row["decode_disk_bytes_per_token"], ".2f", 1e6), cell(row["decode_expert_bytes_per_token"], ".2f", 1e6),
            cell(row["decode_stall_share"], ".0%"), cell(row["peak_rss_bytes"], ".2f", 2**30), cell(row["peak_anon_bytes"], ".2f", 2**30),
            *([cell(row["peak_vram_bytes"], ".2f", 2**30)] if vram else []),
        ])  # fmt: skip
    return table
