"""``moestream trace``: record which experts a model chooses, and what slots would make of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import gguf_facts, model_names, paths
from moestream.commands import options
from moestream.commands.start import DEFAULT_CTX_TOKENS, check_model
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.result import Result
from moestream.routing import files
from moestream.routing import replay as replaying
from moestream.routing import trace as traces
from moestream.routing.fingerprint import fingerprint
from moestream.server import report
from moestream.server.arguments import MAX_DIGITS, flag_of, parse_slots
from moestream.server.process import guarded
from moestream.server.progress import progress
from moestream.server.supervise import in_our_words, stop_on_signals
from moestream.upstream import engines

EXIT_CODES = {130: "interrupted; nothing was recorded, and a trace that was there before is still there"}
HELP = "Record which experts a model chooses, and see what slots would make of it."
_SHOWN_LINES = 12
# Arguments of llama-completion that are set here, and what to use instead.
_OWNED = {
    "-m": "MODEL", "--model": "MODEL", "-f": "--prompt", "--file": "--prompt", "-p": "--text", "--prompt": "--text", "-n": "--tokens",
    "--predict": "--tokens", "--n-predict": "--tokens", "-c": "--ctx", "--ctx-size": "--ctx", "--moe-slots": "--slots",
    "--moe-trace": "--out", "--moe-trace-limit": "--limit",
}  # fmt: skip
_FLAGS = ("--moe-slots",)  # what is given here, and not after --
_DEFAULT_SLOTS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def check_fingerprint(facts: GgufFacts, path: Path, model: traces.ModelName, layers: Iterable[tuple[int, int]]) -> None:
    """Refuse a trace or a map of another model than this one.

    Args:
        layers: those of the trace or map, and how many experts they have there.

    Raises:
        MoestreamError: names both fingerprints, or the layer that the model does not have.
    """
    own = fingerprint(facts)
    if own != model.fingerprint:
        raise MoestreamError(
            f"{path} is of another model: {model.name} ({model.fingerprint}), and {facts.files[0].name} is {own}",
            hint="use what was recorded of this model; its quantised versions count as the same, its fine-tunes do not",
        )
    known = {layer: facts.layer_tensors(layer)[0].n_expert for layer in facts.moe_layers}
    for layer, n_expert in layers:
        if known.get(layer) != n_expert:
            has = f"has {known[layer]} there" if layer in known else "has no experts there"
            raise MoestreamError(
                f"{path} has {n_expert} experts in layer {layer}, and {facts.files[0].name} {has}",
                hint="the file is damaged; record it again: moestream trace record",
            )


def parse_list(flag: str, text: str) -> list[int]:
    """``16,32`` as numbers, ascending.

    Raises:
        MoestreamError: something in it is no number from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < MAX_DIGITS and 0 < int(part) < 1 << 20):
            raise MoestreamError(f"{flag} {text}: '{part}' is no number from 1", hint=f"for example {flag} 16,32")
    return sorted({int(part) for part in parts})


def record(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As for start: a name of moestream.yaml, a pulled model, a file or directory."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The trace; one that is there is replaced.")],
    slots: Annotated[str, typer.Option(metavar="N|auto|all", help="Expert slots; they do not change what is chosen.")] = "auto",
    prompt: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to go on from.")] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="The same, given here.")] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to write; fewer when the text ends.")] = 256,
    ctx: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Context in tokens. Default: 8192, or the model's if less."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1 << 30, metavar="MIB", help="The most the trace may have.")] = 1024,
    backend: options.Backend = None,
    extra: Annotated[list[str] | None, typer.Argument(metavar="-- LLAMA ARGS…", help="Passed on to llama-completion.")] = None,
) -> Result:
    """Record a trace while a model goes on from a text. Servers record too: -- --moe-trace FILE."""
    if (prompt is None) == (text is None):
        raise MoestreamError(
            "a text to go on from is needed, from one place", hint='--prompt FILE or --text "The command grep"'
        )
    if text is not None and not text:
        raise MoestreamError("--text is empty", hint="give some words to go on from")
    if prompt is not None:
        paths.check_file("--prompt", prompt, hint='the text itself is given with --text "…"')
    for argument in extra or ():
        if ours := _OWNED.get(flag_of(argument)):
            raise MoestreamError(
                f"{argument} after -- collides with moestream's own {ours}", hint=f"use moestream trace record {ours} …"
            )
    slots = parse_slots(slots, ("auto", "all", "off"))
    if slots == "off":
        raise MoestreamError("--slots off: without streaming nothing is recorded", hint="--slots auto")
    traces.check_replaceable(out)
    facts = gguf_facts.read(model_names.find(model))
    if not facts.is_moe:
        raise MoestreamError(
            f"{facts.files[0].name} ({facts.architecture}) is not a mixture-of-experts model: there is nothing to record",
            hint="name a model that has experts",
        )
    check_model(facts, slots)
    context = ctx if ctx is not None else min(DEFAULT_CTX_TOKENS, facts.n_ctx_train or DEFAULT_CTX_TOKENS)
    program = [
        str(paths.absolute(engines.in_use(backend).tool("llama-completion"))), "-m", str(paths.absolute(facts.files[0])), "-no-cnv",
        *(["-f", str(prompt)] if prompt is not None else ["-p", text or ""]), "-n", str(tokens), "-c", str(context),
        "--moe-slots", slots, "--moe-trace-limit", str(limit), *(extra or ()),
    ]  # fmt: skip
    with files.replacing(out, "trace") as fresh:  # until there is a new one, the old one stays
        stats, log = _run([*program, "--moe-trace", str(fresh)])
        trace = replace(traces.read(fresh), path=out)
        log = log.replace(str(fresh), str(out))
        notices = [line.partition("moestream: ")[2] or line for line in log.splitlines() if "recording the trace" in line]
        notice = notices[0] if notices else None
        if trace.n_tokens == 0:
            raise MoestreamError(
                f"nothing was recorded: {notice or 'no token was computed'}",
                hint="another place for --output, or free space there",
            )
    totals = stats["totals"]
    data = {**_facts(trace), "slots": stats["slots"], "policy": stats["policy"], "stats": stats, "notice": notice}
    n = totals["hits"] + totals["misses"]
    rows = [
        ("trace", f"{out}, {report.size(trace.size_bytes)}"),
        ("model", f"{trace.model.name} ({trace.model.fingerprint})"),
        ("tokens", f"{trace.n_tokens}, of them {trace.n_single} one at a time"),
        ("hit rate", f"{totals['hits'] / n:.1%} with {stats['slots']} slots, policy {stats['policy']}" if n else None),
        ("notice", notice),
        ("next", _next(model, out)),
    ]
    return Result("trace-record", data, report.table(rows))


def _next(model: str, out: Path) -> str:
    """What to do with a trace."""
    map_path = out.with_suffix(".map") if out.suffix != ".map" else out.with_name(f"{out.name}.map")
    trace, model_, map_ = (shlex.quote(str(path)) for path in (out, model, map_path))
    return f"moestream trace replay {trace} --model {model_}; moestream map make {trace} --out {map_}"


def _run(command: list[str]) -> tuple[dict[str, Any], str]:
    """Let llama-completion record; what it counted, and its log.

    Raises:
        MoestreamError: it failed, or was asked to stop: then the trace is not whole.
    """
    with tempfile.TemporaryDirectory(prefix="moestream-trace-") as folder:
        stats_path, log_path, text_path = Path(folder, "stats.json"), Path(folder, "log"), Path(folder, "text")
        environment = {**os.environ, "MOESTREAM_STATS_FILE": str(stats_path)}
        # A closing terminal or a SIGTERM to this process must not leave the program running, nor must a SIGKILL.
        with (
            log_path.open("wb") as log,
            text_path.open("wb") as written,
            stop_on_signals(lambda: None) as signals,
            guarded(command, stdin=subprocess.DEVNULL, stdout=written, stderr=log, env=environment) as process,
            progress("recording", text_path) as show,
        ):
            code = None
            while code is None:
                if len(signals) > 1:
                    break  # it is killed at the end of the block
                if signals:
                    process.terminate()
                try:
                    code = process.wait(0.2)
                except subprocess.TimeoutExpired:
                    show()
        if signals:
            raise MoestreamError("stopped before the trace was whole: nothing was recorded", exit_code=130)
        log_text = log_path.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            raise _record_error(f"llama-completion ended with {code}", log_text)
        try:
            stats = json.loads(stats_path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:  # an argument after -- that only prints something
            raise _record_error("llama-completion loaded no model", log_text) from error
        if not stats.get("streaming"):
            raise _record_error("llama-completion did not stream", log_text)
        return stats, log_text


def _record_error(why: str, log: str) -> MoestreamError:
    """What llama-completion said, as one message."""
    lines = [line for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error loading model: " in line:
            message, _, hint = in_our_words(line.split("error loading model: ", 1)[1], _FLAGS).partition("; hint: ")
            # without streaming nothing is recorded
            return MoestreamError(f"nothing was recorded: {message}", hint=hint if hint and "--slots off" not in hint else None)
    last = "\n  ".join(deque(lines, _SHOWN_LINES))
    return MoestreamError(
        f"nothing was recorded: {why}" + (f"; its last lines were:\n  {last}" if lines else ""),
        hint="what follows -- is passed on to llama-completion as it is",
    )


def _facts(trace: traces.Trace) -> dict[str, Any]:
    return {
        "trace": str(trace.path),
        "size_bytes": trace.size_bytes,
        "model": trace.model.as_json(),
        "n_expert_used": trace.n_expert_used,
        "records": trace.n_records,
        "batches": trace.n_batches,
        "tokens": trace.n_tokens,
        "tokens_single": trace.n_single,
        "truncated": trace.truncated,
    }


_TRUNCATED = "the last record was cut short, and is left out"


def info(file: Annotated[Path, typer.Argument(metavar="TRACE")]) -> Result:
    """Show what is in a trace."""
    trace = traces.read(file)
    layers = []
    for layer in trace.layers:
        shares = sorted((int(n) for n in layer.counts), reverse=True)
        total = sum(shares)
        half = next((i for i in range(len(shares) + 1) if 2 * sum(shares[:i]) >= total), 0)
        layers.append(
            {"layer": layer.layer, "n_expert": layer.n_expert, "chosen": sum(n > 0 for n in shares), "experts_for_half": half}
        )
    width = max(len(str(entry["layer"])) for entry in layers)
    rows = [
        ("model", f"{trace.model.name}, {trace.model.architecture} ({trace.model.fingerprint})"),
        ("size", report.size(trace.size_bytes)),
        ("tokens", f"{trace.n_tokens} in {trace.n_batches} batches, of them {trace.n_single} one at a time"),
        ("layers", f"{len(layers)}, a token uses up to {trace.n_expert_used} experts in each"),
        ("notice", _TRUNCATED if trace.truncated else None),
    ]
    lines = [
        f"layer {entry['layer']:>{width}}  {entry['chosen']} of {entry['n_expert']} experts were chosen, "
        f"half of the choices are of {entry['experts_for_half']}"
        for entry in layers
    ]
    return Result("trace-info", {**_facts(trace), "layers": layers}, "\n".join([report.table(rows), *lines]))


def replay(
    file: Annotated[Path, typer.Argument(metavar="TRACE")],
    slots: Annotated[
        str | None, typer.Option(metavar="N,…", help="Slots in each layer.", show_default="from what a token uses to all")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Policies of the engine, or opt, the optimum.", show_default="all"),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="NAME|FILE|DIR", help="For bytes a token.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="MB/S", help="What the drive reads in a second, in millions of bytes.")
    ] = None,
    compute_tps: Annotated[
        float | None, typer.Option(metavar="X", help="Tokens a second when all experts are in memory.")
    ] = None,
    backend: options.Backend = None,
) -> Result:
    """Show what slots and policies would make of a trace, and what to start with."""
    for flag, value in (("--bandwidth", bandwidth), ("--compute-tps", compute_tps)):
        if value is not None and not 0 < value < float("inf"):
            raise MoestreamError(f"{flag} {value:g}: expected a number above 0", hint=f"measure it, or leave {flag} out")
    speed = (bandwidth, compute_tps) if bandwidth is not None and compute_tps is not None else None
    if (bandwidth is not None or compute_tps is not None) and (speed is None or model is None):
        raise MoestreamError(
            "a speed is predicted from --model, --bandwidth and --compute-tps together",
            hint="give all three, or none of the last two",
        )
    trace = traces.read(file)
    facts = gguf_facts.read(model_names.find(model)) if model is not None else None
    if facts is not None:
        check_fingerprint(facts, file, trace.model, ((layer.layer, layer.n_expert) for layer in trace.layers))
    n_max = max(layer.n_expert for layer in trace.layers)
    counts = (
        parse_list("--slots", slots)
        if slots is not None
        else sorted({trace.n_expert_used, n_max, *(n for n in _DEFAULT_SLOTS if trace.n_expert_used < n < n_max)})
    )
    policies = [name.strip() for name in policy.split(",")] if policy is not None else []
    runs = replaying.replay(file, counts, policies=policies, backend=backend)

    sizes = replaying.expert_bytes(facts) if facts is not None else None
    rows: list[dict[str, Any]] = []
    value: dict[tuple[str, int], float] = {}
    for run in runs:
        assert run.slots is not None
        n_bytes = run.bytes_per_token(sizes) if sizes is not None else None
        tps = None
        if speed is not None and n_bytes is not None:
            tps = replaying.predicted_tps(n_bytes, speed[0] * 1e6, speed[1])
        if speed is None:
            value[run.policy, run.slots] = run.hit_rate
        elif tps is not None:  # a hit rate cannot be held against speeds
            value[run.policy, run.slots] = tps
        rows.append({
            "policy": run.policy, "slots": run.slots, "hits": run.hits, "misses": run.misses, "evictions": run.evictions,
            "hit_rate": round(run.hit_rate, 5), "misses_per_token": run.misses_per_token, "bytes_per_token": n_bytes,
            "predicted_tps": tps, "tokens_decode": run.tokens_decode, "tokens_prefill": run.tokens_prefill,
        })  # fmt: skip
    best = replaying.best_start(runs, value)
    command = None
    if best is not None:
        named = shlex.quote(model or trace.model.name)
        command = f"moestream start --model {named} --slots {min(best[1], n_max)} --policy {best[0]}"
    data = {**_facts(trace), "runs": rows, "start": command}
    return Result("trace-replay", data, _replay_text(rows, trace, command))


def _replay_text(rows: list[dict[str, Any]], trace: traces.Trace, command: str | None) -> str:
    def cell(value: Any, form: str) -> str:
        return "-" if value is None else form.format(value)

    head = ["policy", "slots", "hit rate", "misses/token"]
    table = [
        [row["policy"], str(row["slots"]), f"{row['hit_rate']:.1%}", cell(row["misses_per_token"], "{:.1f}")] for row in rows
    ]
    if any(row["bytes_per_token"] is not None for row in rows):
        head.append("MiB/token")
        for cells, row in zip(table, rows, strict=True):
            mib = None if row["bytes_per_token"] is None else row["bytes_per_token"] / 2**20
            cells.append(cell(mib, "{:.1f}"))
    if any(row["predicted_tps"] is not None for row in rows):
        head.append("tok/s")
        for cells, row in zip(table, rows, strict=True):
            cells.append(cell(row["predicted_tps"], "{:.2f}"))
    lines = [text_table([head, *table])]
    if trace.truncated:
        lines.append(f"notice: {_TRUNCATED}")
    if not any(row["tokens_decode"] for row in rows):
        lines.append("notice: no token went through slots: the trace has wide batches alone")
    if command is not None:
        lines += ["", f"start with: {command}"]
    return "\n".join(lines)


def text_table(rows: list[list[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


SUBCOMMANDS = {"record": record, "info": info, "replay": replay}
