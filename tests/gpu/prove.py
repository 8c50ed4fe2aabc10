"""Identity on an NVIDIA card: with slots in its memory every logit has the bits it has without streaming, same card, same build.

For each model and number of sequences ``moe-identity`` compares all logits by memcmp, in batches of every width that takes other
kernels. Writes a report, ``gpu-identity.md`` and ``gpu-identity.json``, and ends with 0 only if everything was equal and went the way it
should have. Needs an engine built with ``moestream build --backend cuda --target moe-identity`` and models (by default those that
``fixtures.py`` made).

    python tests/gpu/prove.py --models build/gpu-models --out build/gpu-report
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = "moestream/gpu-identity/1"
# Widths of batches and how many tokens are computed in them. 8 is the most that go through slots on any card; behind it comes staging.
WIDTHS = (((1, 4, 8, 9, 128), 256), ((512,), 1100))
# Where a layer has more experts, the last are enough for 8 tokens of 6 experts, and fewer than all; where not, all: then there is no streaming.
SLOTS = ("used", "used+4", "used+42")
TIMEOUT_S = 200
# Evicted slots and reused staging hold 0xff, and what is used must still be what was filled in.
STRICT = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
LINE = re.compile(
    r"(?P<verdict>ok|FAIL.*?) T=(?P<ubatch>\d+) slots=(?P<slots>\d+)/(?P<n_expert>\d+) pool_bytes=(?P<pool_bytes>\d+)"
    r" evictions=(?P<evictions>\d+) misses=(?P<misses>\d+) hits=(?P<hits>\d+) via_slots=(?P<via_slots>\d+) via_staging=(?P<via_staging>\d+)( ram_hits=\d+ guess_hits=\d+)?"
)


@dataclass(frozen=True)
class Comparison:
    """All logits of one run against those of the same run without streaming."""

    model: str
    sequences: int
    variant: str
    verdict: str
    ubatch: int
    slots: int
    n_expert: int
    evictions: int
    misses: int
    hits: int
    via_slots: int
    via_staging: int


@dataclass
class Report:
    """What was run, where and on what."""

    date: str
    card: str
    commit: str
    command: str
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    def as_markdown(self) -> str:
        equal = sum(c.verdict == "ok" for c in self.comparisons)
        lines = [
            "# Identity on a card",
            "",
            f"{self.date}, {self.card}, commit {self.commit}: {equal} of {len(self.comparisons)} comparisons equal.",
            "",
            "```sh",
            self.command,
            "```",
            "",
            "| model | sequences | variant | equal | through slots | through staging | evictions |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        groups: dict[tuple[str, int, str], list[Comparison]] = {}
        for c in self.comparisons:
            groups.setdefault((c.model, c.sequences, c.variant), []).append(c)
        for (model, sequences, variant), found in groups.items():
            n = sum(c.verdict == "ok" for c in found)
            numbers = [sum(values) for values in zip(*((c.via_slots, c.via_staging, c.evictions) for c in found), strict=True)]
            lines.append(f"| {model} | {sequences} | {variant} | {n} of {len(found)} | {' | '.join(map(str, numbers))} |")
        lines += ["", *(f"- {problem}" for problem in self.problems)]
        return "\n".join(lines).rstrip() + "\n"


def parse(text: str, model: str, sequences: int, variant: str) -> list[Comparison]:
    """The comparisons in what moe-identity printed."""
    found = []
    for line in text.splitlines():
        if match := LINE.fullmatch(line):
            values = {name: int(value) for name, value in match.groupdict().items() if name not in ("verdict", "pool_bytes")}
            found.append(Comparison(model, sequences, variant, match["verdict"], **values))
    return found


def ways_of(comparisons: list[Comparison]) -> set[str]:
    """Which of "slots" and "staging" were gone through."""
    return {way for c in comparisons for way, n in (("slots", c.via_slots), ("staging", c.via_staging)) if n}


def card() -> str:
    """Name and driver of the cards; CalledProcessError or FileNotFoundError where there is none."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return "; ".join(subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n")).strip(
        "; "
    )


VARIANTS = {
    "as upstream chooses": {},
    "without CUDA graphs": {"GGML_CUDA_DISABLE_GRAPHS": "1"},
    "without fusion": {"GGML_CUDA_DISABLE_FUSION": "1"},
}


def environment(variant: str) -> dict[str, str]:
    return {**os.environ, **STRICT, **VARIANTS[variant]}


@dataclass(frozen=True)
class Run:
    """One process of moe-identity."""

    model: Path
    sequences: int
    variant: str
    ubatch: tuple[int, ...]
    tokens: int

    @property
    def expected(self) -> int:
        return len(self.ubatch) * len(SLOTS)

    @property
    def ways(self) -> set[str]:
        is_quantized = not re.search(r"-(f32|f16|bf16)$", self.model.stem)
        # a recurrent state takes a token of every sequence at once: too many for the slots of 8 experts
        fits = min(self.ubatch) == 1 and (self.sequences == 1 or not self.model.stem.startswith("qwen35moe"))
        return {"slots", "staging"} if is_quantized and fits else {"staging"}

    def __str__(self) -> str:
        return f"{self.model.stem}, {self.sequences} sequences, T={'/'.join(map(str, self.ubatch))}, {self.variant}"


def compare(program: Path, run: Run) -> tuple[list[Comparison], list[str]]:
    """What one run compared, and what is wrong with it."""
    argv = [program, "-m", run.model, "--gpu-layers", "99", "--sequences", run.sequences, "--tokens", run.tokens]
    argv += ["--ubatch", ",".join(map(str, run.ubatch)), "--slots", ",".join(SLOTS)]
    try:
        done = subprocess.run(
            [str(a) for a in argv],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=environment(run.variant),
        )
    except subprocess.TimeoutExpired:
        return [], [f"{run}: no end in {TIMEOUT_S} s"]
    found = parse(done.stdout, run.model.stem, run.sequences, run.variant)
    problems = [f"{run}, T={c.ubatch}, {c.slots} slots: {c.verdict}" for c in found if c.verdict != "ok"]
    expected = run.expected
    if len(found) != expected or (done.returncode != 0 and not problems):
        said = " ".join((done.stdout + done.stderr).split())[-600:]
        problems.append(f"{run}: ended with {done.returncode} after {len(found)} of {expected}: {said}")
    elif not run.ways <= ways_of(found):
        problems.append(f"{run}: went through {sorted(ways_of(found))} only")
    return found, problems


def prove(program: Path, runs: Sequence[Run], report: Report, jobs: int, limit_s: float) -> None:
    """Run all comparisons into the report; those that have not begun after ``limit_s`` are a problem."""
    end_s = time.monotonic() + limit_s

    def one(run: Run) -> tuple[list[Comparison], list[str]]:
        return compare(program, run) if time.monotonic() < end_s else ([], [f"{run}: not run, the time was over"])

    with ThreadPoolExecutor(jobs) as pool:
        for run, (found, problems) in zip(runs, pool.map(one, runs), strict=True):
            print(f"{run}: {sum(c.verdict == 'ok' for c in found)} of {run.expected} equal", flush=True)
            report.comparisons += found
            report.problems += problems


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", type=Path, help="folder with moe-identity; that of the cuda engine in use when left out")
    p.add_argument("--models", type=Path, default=ROOT / "build" / "gpu-models")
    p.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report")
    p.add_argument("--commit", help="what the report names; git is asked when left out")
    p.add_argument("--match", default="", help="only models whose name this expression finds")
    p.add_argument("--variants", default=",".join(VARIANTS), help="of CUDA's graphs and fusion (default: %(default)s)")
    p.add_argument("--jobs", type=int, default=2, help="processes at a time on the card (default: %(default)s)")
    p.add_argument("--limit-s", type=float, default=3600, help="begin nothing after so many seconds (default: %(default)s)")
    a = p.parse_args(argv)
    bin_dir = a.bin
    if bin_dir is None:
        sys.path.insert(0, str(ROOT))
        from moestream.upstream import engines

        bin_dir = engines.in_use("cuda").bin_dir
    models = [
        path
        for path in [ROOT / "demo" / "moestream-demo-q4_0.gguf", *sorted(a.models.glob("*.gguf"))]
        if re.search(a.match, path.stem)
    ]
    commit = (
        a.commit
        or subprocess.run(
            ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"), capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    command = shlex.join(["python", "tests/gpu/prove.py", *(sys.argv[1:] if argv is None else argv)])
    report = Report(datetime.now(UTC).isoformat(timespec="seconds"), card(), commit, command)
    variants = a.variants.split(",")
    if unknown := set(variants) - VARIANTS.keys():
        p.error(f"--variants: {', '.join(sorted(unknown))} is none of {', '.join(VARIANTS)}")
    runs = [
        Run(model, sequences, variant, ubatch, tokens)
        for variant in variants
        for model in models
        for sequences in (1, 4)
        for ubatch, tokens in WIDTHS
    ]
    prove(bin_dir / "moe-identity", runs, report, a.jobs, a.limit_s)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "gpu-identity.md").write_text(report.as_markdown(), encoding="utf-8")
    (a.out / "gpu-identity.json").write_text(report.as_json(), encoding="utf-8")
    print(report.as_markdown())
    return 0 if report.comparisons and not report.problems else 1


if __name__ == "__main__":
    sys.exit(main())
