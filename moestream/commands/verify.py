"""``moestream verify``: proves on this machine that streaming changes no bit of what a model says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import gguf_facts, model_names, paths
from moestream.commands import options
from moestream.commands.start import check_model
from moestream.commands.trace import text_table
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.result import Result
from moestream.server import report
from moestream.server.arguments import parse_slots
from moestream.server.supervise import notice
from moestream.upstream import engines
from moestream.verify import plan
from moestream.verify.compare import Difference, Logits, first_difference
from moestream.verify.memory import available_bytes
from moestream.verify.plan import Reference
from moestream.verify.results import Run, Runner
from moestream.verify.text import TEXT

EXIT_DIFFERENT = 3
EXIT_NOT_PROVEN = 4
EXIT_CODES = {
    0: "equal",
    1: "it could not be compared",
    EXIT_DIFFERENT: "a logit differs",
    EXIT_NOT_PROVEN: "nothing is proven, since no expert lost its slot",
}


class ReferenceKind(str, Enum):
    auto = "auto"
    loaded = "loaded"
    mapped = "mapped"


def slot_counts(facts: GgufFacts, text: str | None) -> list[str]:
    """The values of ``--slots``; by default as few as a token uses, and as many as a few tokens use.

    Raises:
        MoestreamError: one is no number of slots of this model.
    """
    if text is None:
        fewest = facts.n_expert_used
        return list(dict.fromkeys(str(n) for n in (fewest, min(plan.FEW_TOKENS * fewest, facts.n_expert))))
    counts = list(dict.fromkeys(parse_slots(part, ("auto", "all")) for part in text.split(",")))
    for count in counts:
        check_model(facts, count)
    return counts


def verify(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As for start: a name of moestream.yaml, a pulled model, a file or directory."),
    ],
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="N|all|auto,…", help="Expert slots to compare with.", show_default="what one token uses, and what four do"
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=plan.MIN_TOKENS, max=plan.MAX_TOKENS, metavar="N", help="About so many tokens of the text.")
    ] = 64,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to compute.", show_default="one that is built in")
    ] = None,
    reference: Annotated[
        ReferenceKind,
        typer.Option(help="What to compare with: loaded into memory, or mapped from the file, which any memory is enough for."),
    ] = ReferenceKind.auto,
    backend: options.Backend = None,
    extra: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- LLAMA ARGS…", help="Passed on to llama-results: --moe-… when streaming, others to both sides."
        ),
    ] = None,
) -> Iterator[Result]:
    """Compare streamed logits with those of the same engine without streaming, bit for bit."""
    both, streamed = plan.split_extra(extra or ())
    facts = gguf_facts.read(model_names.find(model))
    if not facts.is_moe:
        raise MoestreamError(
            f"{facts.files[0].name} ({facts.architecture}) is not a mixture-of-experts model: there is nothing to stream",
            hint="name a model that has experts",
        )
    counts = slot_counts(facts, slots)
    text = plan.cut(_text_of(file), plan.CHARS_PER_TOKEN * tokens)
    side = plan.choose_reference(reference.value, facts.tensor_bytes, available_bytes())
    engine = engines.in_use(backend)
    with tempfile.TemporaryDirectory(prefix="moestream-verify-") as folder:
        text_file = Path(folder, "text")
        runner = Runner(
            program=paths.absolute(engine.tool("llama-results")), model=paths.absolute(facts.files[0]), text=text_file,
            folder=Path(folder), n_ctx=plan.room(text), args=(*side.kernel_args, *both),
        )  # fmt: skip
        found = _Comparison(runner, side, streamed, counts).run(text, tokens, file)
    data = {
        "model": str(facts.files[0]),
        "engine": engine.id,
        "reference": {"kind": side.kind, "reason": side.reason, "repack": side.kind == "loaded"},
        "text": str(file) if file else None,
        **found,
    }
    yield Result("verify", data, _text(facts, side, data))
    if found["verdict"] == "different":
        where = found["difference"]
        raise MoestreamError(
            f"{facts.files[0].name}: streamed logits differ, {where['slots']} slots, {_wide(where['width'])}",
            hint="keep this output, the model's sha256 and moestream engines, and report it: this must never happen",
            exit_code=EXIT_DIFFERENT,
        )
    if found["verdict"] == "not proven":
        raise MoestreamError(found["why"], hint=found["next"], exit_code=EXIT_NOT_PROVEN)


def _text_of(file: Path | None) -> str:
    if file is None:
        return TEXT
    paths.check_file("--file", file, hint="name a text file, or leave --file out for the text that is built in")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MoestreamError(f"--file {file}: it is not UTF-8 text: {error.reason}", hint="name a text file") from error
    except OSError as error:
        raise MoestreamError(f"--file {file}: {error.strerror}", hint="check the path and its permissions") from error


class _Comparison:
    """The runs of one command, and what follows from them."""

    def __init__(self, runner: Runner, side: Reference, streamed: tuple[str, ...], counts: list[str]) -> None:
        self.runner = runner
        self.side = side
        self.streamed = streamed
        self.counts = counts
        self.n_run = 0

    def run(self, text: str, n_wanted: int, file: Path | None) -> dict[str, Any]:
        """All comparisons up to the first difference, as fields of the result."""
        text, first = self._fitting(text, n_wanted, file)
        n_tokens = first.logits.n_tokens
        widths = (plan.FEW_TOKENS, n_tokens, 1)
        rows: list[dict[str, Any]] = []
        found = {"tokens": n_tokens, "widths": list(widths), "logits": 0, "comparisons": rows, "difference": None}
        for width in widths:
            want = first if width == plan.FEW_TOKENS else self._reference(width)
            if not want.logits.says_something():
                return {
                    **found, "verdict": "not proven", "next": "is the model's file damaged? compare its sha256 with its source",
                    "why": f"nothing is proven: without streaming, {_wide(width)}, the logits are no numbers, or all the same",
                }  # fmt: skip
            for count in self.counts:
                what = f"{count} slots, {_wide(width)}"
                got = self._say(what, width, self._streaming(count))
                if got.stats is None:
                    raise MoestreamError(f"{what}: the engine did not stream", hint="moestream build")
                if count.isdigit() and got.stats["slots"] != int(count):
                    raise MoestreamError(f"{what}: the engine computed with {got.stats['slots']} slots", hint="moestream build")
                different = first_difference(want.logits, got.logits)
                rows.append(_row(count, width, got.stats, different is None))
                found["logits"] += want.logits.values.size
                if different is not None:
                    return {**found, **self._explain(different, want.logits, count, width)}
        return {**found, **_proven(rows, n_tokens)}

    def _streaming(self, count: str) -> tuple[str, ...]:
        return ("--moe-slots", count, *self.streamed)

    def _say(self, what: str, width: int, args: tuple[str, ...]) -> Run:
        self.n_run += 1
        total = (1 + len(self.counts)) * 3
        notice(f"{min(self.n_run, total)}/{total} {what}")
        return self.runner(what, width, args)

    def _reference(self, width: int) -> Run:
        run = self._say(f"without streaming, {_wide(width)}", width, self.side.args)
        if run.stats is not None:
            raise MoestreamError(
                "the reference streamed: it would be compared with itself", hint="leave out what makes it stream"
            )
        return run

    def _fitting(self, text: str, n_wanted: int, file: Path | None) -> tuple[str, Run]:
        """The text cut to about so many tokens, and the reference of it in narrow batches.

        Raises:
            MoestreamError: the text has too few tokens.
        """
        self.runner.text.write_text(text, encoding="utf-8")
        run = self._reference(plan.FEW_TOKENS)
        n = run.logits.n_tokens
        if n > 2 * n_wanted:  # a vocabulary of letters, or a script whose letters are words
            text = plan.cut(text, max(1, len(text) * n_wanted // n))
            self.runner.text.write_text(text, encoding="utf-8")
            self.n_run -= 1
            run = self._reference(plan.FEW_TOKENS)
            n = run.logits.n_tokens
        if n < max(plan.MIN_TOKENS, n_wanted // 2):
            where = f"--file {file}" if file else "the text that is built in"
            fewer = f", or --tokens {n}" if n >= plan.MIN_TOKENS else ""
            raise MoestreamError(
                f"{where} has {n} tokens, about {n_wanted} are needed", hint=f"give a longer text: --file FILE{fewer}"
            )
        return text, run

    def _explain(self, different: Difference, want: Logits, count: str, width: int) -> dict[str, Any]:
        """What is known of a difference: whether the reference has it too, and which expert it comes from."""
        notice("a logit differs; looking for the cause")
        again = first_difference(want, self.runner(f"without streaming again, {_wide(width)}", width, self.side.args).logits)
        if again is not None:
            return {
                "verdict": "not proven", "next": "is the memory sound? compare again with -- --threads 1",
                "why": f"nothing is proven: without streaming, {_wide(width)}, this machine gives other logits each time",
            }  # fmt: skip
        expert = self.runner.changed_expert(f"{count} slots, {_wide(width)}", width, self._streaming(count))
        place = {"slots": count, "width": width, "layer": expert and expert[0], "expert": expert and expert[1]}
        return {"verdict": "different", "difference": {**place, **different.as_json()}}


def _row(count: str, width: int, stats: dict[str, Any], equal: bool) -> dict[str, Any]:
    totals = stats["totals"]
    scarce = [layer for layer in stats["layers"] if layer["slots"] < layer["n_expert"]]
    names = ("hits", "misses", "evictions", "tokens_decode", "tokens_prefill", "bytes_read", "read_errors")
    return {
        "slots": stats["slots"], "slots_requested": count, "width": width, "equal": equal, "scarce": bool(scarce),
        **{name: totals[name] for name in names}, "kernels": stats["kernels"]["experts"], "staging": stats["staging"],
    }  # fmt: skip


def _proven(rows: list[dict[str, Any]], n_tokens: int) -> dict[str, Any]:
    """Equal bits prove something where experts were read, and lost their slots where these are scarce."""
    for row in rows:
        if not row["misses"]:
            return _nothing(
                f"with {row['slots_requested']} slots, {_wide(row['width'])}, no expert was read", "another model or text"
            )
    for count in dict.fromkeys(row["slots_requested"] for row in rows):
        of_count = [row for row in rows if row["slots_requested"] == count]
        if not of_count[0]["scarce"]:
            continue
        single = next(row for row in of_count if row["width"] == 1)
        more = f"--tokens {min(4 * n_tokens, plan.MAX_TOKENS)}, with --file FILE for a longer text, or fewer slots"
        if not single["tokens_decode"]:
            return _nothing(f"with {count} slots no token went through slots", more)
        if not single["evictions"]:
            return _nothing(f"no expert lost its slot with {count} slots and {n_tokens} tokens", more)
        if not any(row["tokens_prefill"] for row in of_count):
            return _nothing(f"{n_tokens} tokens at once did not go through staging with {count} slots", more)
    if not any(row["scarce"] for row in rows):
        return _nothing("every expert had a slot, and none lost it", "fewer slots: leave out --slots")
    return {"verdict": "equal"}


def _nothing(why: str, then: str) -> dict[str, Any]:
    return {"verdict": "not proven", "why": f"nothing is proven: {why}", "next": then}


def _wide(width: int) -> str:
    return "1 token at a time" if width == 1 else f"{width} tokens at a time"


def _text(facts: GgufFacts, side: Reference, data: dict[str, Any]) -> str:
    n = data["tokens"]
    rows: list[tuple[str, str | None]] = [
        ("model", f"{facts.files[0].name}, {report.size(facts.total_bytes)}"),
        ("reference", f"{side.text}; {side.reason}"),
        ("text", f"{n} tokens of {data['text'] or 'the text that is built in'}"),
        ("engine", data["engine"]),
    ]
    table = [["slots", "at a time", "through slots", "hits", "misses", "evictions", "result"]]
    table += [
        [
            row["slots_requested"] if row["slots_requested"] == str(row["slots"]) else f"{row['slots_requested']} ({row['slots']})",
            str(row["width"]), f"{row['tokens_decode']} of {row['tokens_decode'] + row['tokens_prefill']}", str(row["hits"]),
            str(row["misses"]), str(row["evictions"]), "equal" if row["equal"] else "DIFFERENT",
        ]
        for row in data["comparisons"]
    ]  # fmt: skip
    lines = [report.table(rows), "", text_table(table)]
    if data["verdict"] == "equal":
        n_compared = len(data["comparisons"])
        lines += ["", f"equal: all {data['logits']:,} logits of {n_compared} comparisons have the same bits"]
    elif data["difference"]:
        lines += ["", *_difference(data["difference"])]
    return "\n".join(lines)


def _difference(d: dict[str, Any]) -> list[str]:
    def value(number: float | None, bits: str) -> str:
        return f"{'not a number' if number is None else format(number, '.9g')} ({bits})"

    expected, got = value(d["expected"], d["expected_bits"]), value(d["got"], d["got_bits"])
    lines = [
        f"the first difference: {d['slots']} slots, {_wide(d['width'])}, behind token {d['token']} at position {d['position']}",
        f"  the logit of token {d['vocab']} is {got}, without streaming it is {expected}",
        f"  {d['n_different']:,} of {d['n_logits']:,} logits differ"
        + (f", by {d['max_abs']:.3g} at most" if d["max_abs"] is not None else "")
        + f"; at {d['n_choices']} positions another token is the likeliest",
    ]
    if d["layer"] is not None:
        lines.append(f"  expert {d['expert']} of layer {d['layer']} changed while it was in memory")
    else:
        lines.append("  no expert changed while it was in memory (the same run with MOESTREAM_CHECK=1)")
    return lines
