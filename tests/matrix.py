"""The identity matrix: streamed values are the bits of unstreamed ones, for every architecture, type, number of slots and width of a
batch. The tests run a part of it; ``make identity`` runs all of it, which takes about an hour on two cores.

    python tests/matrix.py [--jobs 2] [--architectures REGEX] [--types f32,q4_k] [--report FILE]

One line a model, then a table; exit code 0 only if everything was equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import fixture_architectures as architectures
from fixture_models import run, split, tool
from llama_server import environment

from moestream import gguf_facts

N_TOKENS = 600
ALL_UBATCH = (1, 2, 7, 8, 9, 64, 512)
LOAD_MODES = ("mmap", "none", "dio")
# Evicted slots are filled with 0xff, and so is staging before it is used again: a read of stale bytes cannot go unseen. What is
# used must still be what was filled in.
STRICT = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
LINE = re.compile(
    r"ok T=(?P<ubatch>\d+) slots=(?P<slots>\d+)/(?P<n_expert>\d+) pool_bytes=(?P<pool_bytes>\d+) evictions=(?P<evictions>\d+)"
    r" misses=\d+ hits=\d+ via_slots=(?P<via_slots>\d+) via_staging=(?P<via_staging>\d+)"
    r" ram_hits=(?P<ram_hits>\d+) guess_hits=(?P<guess_hits>\d+)"
)


@dataclass(frozen=True)
class Cell:
    """One model file and what is run with it."""

    architecture: str
    type_name: str
    slots: tuple[str, ...]  # "all" or a number
    ubatch: tuple[int, ...]
    n_shards: int = 1
    alignment: int = 32
    load_mode: str = "mmap"
    repack: bool = False  # the kernels that stock prefers, in place of plain ones
    staging: str = "full"  # or "ring"
    ram: bool = False  # a RAM tier too small for what has no slot, and guesses

    def __str__(self) -> str:
        kernels = "repacked, " if self.repack else ""
        ring = "ring, " if self.staging == "ring" else ""
        ram = "RAM tier, " if self.ram else ""
        return f"{self.architecture} {self.type_name} {kernels}{ring}{ram}{self.n_shards} files, alignment {self.alignment}, {self.load_mode}"


@dataclass
class Outcome:
    cell: Cell
    problem: str = ""  # "" when every comparison was equal and proved something
    n_equal: int = 0
    n_evicting: int = 0  # comparisons in which slots were scarce; each of them evicted
    seconds: float = 0
    ways: dict[str, int] = field(default_factory=lambda: {"slots": 0, "staging": 0})  # comparisons that went this way
    n_ram: int = 0  # comparisons in which the RAM tier had experts
    n_guessed: int = 0  # in which guesses were right


def full_matrix(names: list[str], types: list[str]) -> Iterator[Cell]:
    """Every architecture in every type; then each once more in Q4_0, in a file layout that differs from one to the next."""
    for name in names:
        used = architectures.n_used(name)
        for type_name in types:
            yield Cell(name, type_name, (str(used), str(used + 1), "all"), ALL_UBATCH)
            if type_name in architectures.REPACKED:
                yield Cell(name, type_name, (str(used), "all"), (1, 2, 9, 64), repack=True, ram=True)
                yield Cell(name, type_name, (str(used), str(used + 1)), (9, 64), staging="ring", ram=used % 2 == 0)
    if "q4_0" not in types:
        return
    for i, name in enumerate(names):
        used = architectures.n_used(name)
        yield Cell(
            name, "q4_0", (str(used), str(2 * used)), (1, 2, 9),
            n_shards=2 + i % 4, alignment=64 if i % 2 else 32, load_mode=LOAD_MODES[i % 3], staging="ring" if i % 5 % 2 else "full",
        )  # fmt: skip


def short_matrix(names: list[str]) -> Iterator[Cell]:
    """What every run of the tests can afford."""
    for name in names:
        for type_name in ("f32", "q4_0"):
            yield Cell(name, type_name, (str(architectures.n_used(name)),), (1, 9), ram=type_name == "q4_0")
        yield Cell(name, "q4_0", (str(architectures.n_used(name)),), (1, 9), repack=True, staging="ring", ram=True)


def check(cell: Cell, source: Path, folder: Path) -> Outcome:
    """Make the model of the cell in ``folder``, run it, remove it. ``source`` is its architecture in F32."""
    started = time.monotonic()
    outcome = Outcome(cell)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            compare(cell, _model(cell, source, Path(own)), outcome)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            outcome.problem = str(error)[-600:] or repr(error)
    outcome.seconds = time.monotonic() - started
    return outcome


def _model(cell: Cell, source: Path, folder: Path) -> Path:
    model = architectures.quantized(cell.architecture, source, folder / f"{source.stem}-{cell.type_name}.gguf", cell.type_name)
    assert model != source or (cell.n_shards, cell.alignment) == (1, 32), "only what was made here is taken apart"
    files = split(model, folder / model.stem, cell.n_shards) if cell.n_shards > 1 else [model]
    if cell.alignment != 32:
        for file in files:  # after the split: upstream's splitter writes every alignment as 32
            architectures.align(file, cell.alignment)
    return files[0]


def n_tokens(ubatch: int) -> int:
    """Enough batches that the experts of the last tokens change from one to the next."""
    return max(N_TOKENS, 4 * ubatch)


def compare(cell: Cell, model: Path, outcome: Outcome) -> None:
    """One process for all widths that have as many tokens."""
    for tokens in sorted({n_tokens(t) for t in cell.ubatch}):
        _compare(cell, model, outcome, tokens, [t for t in cell.ubatch if n_tokens(t) == tokens])


def _compare(cell: Cell, model: Path, outcome: Outcome, tokens: int, ubatch: list[int]) -> None:
    expert_bytes = gguf_facts.read(model).expert_bytes
    done = run(
        tool("moe-identity"), "-m", model, "--threads", "1", "--slots", ",".join(cell.slots),
        "--ubatch", ",".join(map(str, ubatch)), "--tokens", str(tokens), "--load-mode", cell.load_mode,
        *(["--embeddings"] if cell.architecture in architectures.EMBEDDINGS else []),
        *(["--repack"] if cell.repack else []),
        "--moe-staging", cell.staging, "--moe-prefetch", "on" if cell.ram else "off",
        *(["--moe-ram", str(expert_bytes // 3)] if cell.ram else []),
        env=environment(STRICT), ok=False, timeout_s=1800,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == len(cell.slots) * len(ubatch), done.stdout
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, line
        got = {key: int(value) for key, value in match.groupdict().items()}
        assert got["via_slots"] + got["via_staging"] == tokens, line
        assert got["pool_bytes"] * got["n_expert"] == expert_bytes * got["slots"], f"Python counts {expert_bytes} bytes: {line}"
        scarce = got["slots"] < got["n_expert"]
        assert not scarce or got["evictions"] > 0, line
        outcome.n_equal += 1
        outcome.n_evicting += scarce
        outcome.n_ram += got["ram_hits"] > 0
        outcome.n_guessed += got["guess_hits"] > 0
        assert cell.ram or not got["ram_hits"] + got["guess_hits"], line
        outcome.ways["slots"] += got["via_slots"] > 0
        outcome.ways["staging"] += got["via_staging"] > 0


def run_cells(cells: list[Cell], sources: dict[str, Path], folder: Path, jobs: int) -> Iterator[Outcome]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda cell: check(cell, sources[cell.architecture], folder), cells)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare streamed with unstreamed values, bit for bit.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models at a time, one thread each")
    parser.add_argument("--architectures", default="", metavar="REGEX")
    parser.add_argument("--types", default=",".join(architectures.TYPES), help="separated by commas")
    parser.add_argument("--report", type=Path, help="write what was compared as JSON")
    options = parser.parse_args()
    types = options.types.split(",")
    if unknown := set(types) - set(architectures.TYPES):
        parser.error(f"unknown types {sorted(unknown)}: expected some of {','.join(architectures.TYPES)}")

    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        sources = architectures.make_all(Path(folder))
        names = [name for name in sources if re.search(options.architectures, name)]
        if not names:
            parser.error(f"no architecture matches {options.architectures!r}: expected some of {', '.join(sources)}")
        for outcome in run_cells(list(full_matrix(names, types)), sources, Path(folder), options.jobs):
            outcomes.append(outcome)
            print(f"{outcome.problem or 'ok'}  {outcome.cell}  {outcome.n_equal} equal, {outcome.seconds:.0f} s", flush=True)
    failed = [o for o in outcomes if o.problem]
    equal, evicting = sum(o.n_equal for o in outcomes), sum(o.n_evicting for o in outcomes)
    ways = {way: sum(o.ways[way] for o in outcomes) for way in ("slots", "staging")}
    print(
        f"{len(outcomes)} models of {len(names)} architectures, {len(failed)} failed; {equal} comparisons of {N_TOKENS} tokens or more equal, "
        f"{evicting} of them with evictions, {ways['slots']} through slots, {ways['staging']} through staging, "
        f"{sum(o.n_ram for o in outcomes)} with hits in the RAM tier, {sum(o.n_guessed for o in outcomes)} with right guesses; "
        f"{(time.monotonic() - started) / 60:.1f} min"
    )
    if options.report:
        options.report.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
