"""The hit-rate-by-slots curve of a model, from the experts it really chooses.

``routing_dump.cpp`` is compiled against an engine's libllama, decodes one sequence and writes the chosen experts; here they are
replayed through an LRU of each size, one per layer.

    python bench/routing.py models/qwen3moe-30b-a3b-hit75.gguf
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream import gguf_facts, paths
from moestream.errors import MoestreamError
from moestream.upstream import engines

SLOTS = (8, 16, 24, 32, 48, 64, 96)
N_TOKENS = 512
# Not counted: the caches start empty, and the first tokens have no recent ones before them.
N_WARM_UP = 64
SCHEMA = "moestream/hit-curve/1"


@dataclass(frozen=True)
class Curve:
    """LRU hit rates by slots per layer.

    Attributes:
        slots, hits: hit rate in [0, 1] at each number of slots, mean over layers; None where a step's experts do not fit.
        hits_min, hits_max: of any layer.
        n_expert, n_used: of the model.
        n_tokens: tokens counted, after the warm-up.
        n_parallel: sequences decoded together.
        distinct: experts chosen at least once, mean over layers; far below ``n_expert`` means collapsed routing.
        overlap: share of a token's experts that the token before used, mean over layers.
    """

    slots: tuple[int, ...]
    hits: tuple[float | None, ...]
    hits_min: tuple[float | None, ...]
    hits_max: tuple[float | None, ...]
    n_expert: int
    n_used: int
    n_tokens: int
    n_parallel: int
    distinct: float
    overlap: float

    def text(self) -> str:
        head = "slots     " + "".join(f"{s:>8}" for s in self.slots)
        rows = [("LRU hits", self.hits), ("  lowest", self.hits_min), (" highest", self.hits_max)]
        body = [f"{name:<10}" + "".join(f"{'-':>8}" if h is None else f"{h:>8.1%}" for h in values) for name, values in rows]
        note = (
            f"of {self.n_expert} experts, {self.n_used} used; {self.n_tokens} tokens, {self.n_parallel} in parallel; "
            f"distinct {self.distinct:.0f}, overlap with the token before {self.overlap:.0%}"
        )
        return "\n".join([head, *body, note])

    def at(self, slots: int) -> float | None:
        return self.hits[self.slots.index(slots)] if slots in self.slots else None


def lru_hit_rate(steps: list[np.ndarray], n_slots: int, n_warm_up: int = N_WARM_UP) -> float:
    """Share of expert uses found in an LRU of ``n_slots``.

    Args:
        steps: per step the distinct experts it uses (of all sequences decoded together). What a step uses is pinned until
            the step is over: its own misses never evict it.
        n_warm_up: steps at the start that fill the cache and are not counted.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    n_hit = n_use = 0
    for i, experts in enumerate(steps):
        needed = [int(e) for e in experts]
        if len(needed) > n_slots:
            return float("nan")  # not legal: a step's experts do not fit
        found = [e for e in needed if e in cache]
        for e in needed:
            if e in cache:
                cache.move_to_end(e)
            else:
                cache[e] = None
        # All of this step's experts are at the recent end, so what goes is never one of them.
        while len(cache) > n_slots:
            cache.popitem(last=False)
        if i >= n_warm_up:
            n_hit += len(found)
            n_use += len(needed)
    return n_hit / n_use if n_use else float("nan")


def curve(ids: np.ndarray, n_expert: int, slots: tuple[int, ...] = SLOTS, n_warm_up: int = N_WARM_UP) -> Curve:
    """The curve of recorded routing.

    Args:
        ids: int array [n_step, n_layer, n_parallel, n_used].
    """
    n_step, n_layer, n_parallel, n_used = ids.shape
    if n_step <= n_warm_up + 1:
        raise MoestreamError(f"{n_step} tokens are too few: {n_warm_up} only warm up", hint="decode more tokens")
    rates = np.empty((n_layer, len(slots)))
    distinct, overlap = [], []
    for layer in range(n_layer):
        steps = [np.unique(ids[t, layer]) for t in range(n_step)]
        rates[layer] = [lru_hit_rate(steps, s, n_warm_up) for s in slots]
        distinct.append(len(np.unique(ids[:, layer])))
        shared = [len(np.intersect1d(steps[t - 1], steps[t])) / len(steps[t]) for t in range(n_warm_up, n_step)]
        overlap.append(np.mean(shared))
    return Curve(
        slots=tuple(slots),
        hits=_known(rates.mean(0)),
        hits_min=_known(rates.min(0)),
        hits_max=_known(rates.max(0)),
        n_expert=n_expert,
        n_used=n_used,
        n_tokens=n_step - n_warm_up,
        n_parallel=n_parallel,
        distinct=float(np.mean(distinct)),
        overlap=float(np.mean(overlap)),
    )


def _known(rates: np.ndarray) -> tuple[float | None, ...]:
    """NaN as None: JSON has no NaN. A layer in which the slots were too few makes the mean unknown."""
    return tuple(None if np.isnan(r) else float(r) for r in rates)


def read_dump(path: Path) -> np.ndarray:
    """Recorded routing as int array [n_step, n_layer, n_parallel, n_used]; layers in ascending order."""
    table = np.loadtxt(path, delimiter=",", dtype=np.int32, ndmin=2)
    if not len(table):
        raise MoestreamError(
            f"{path} has no routing in it", hint="the model has no expert layers that llama.cpp names ffn_moe_topk"
        )
    n_step, n_parallel = table[:, 0].max() + 1, table[:, 1].max() + 1
    layers = np.unique(table[:, 2])
    if len(table) != n_step * n_parallel * len(layers):
        raise MoestreamError(f"{path} is incomplete: {len(table)} lines, {n_step}x{n_parallel}x{len(layers)} expected")
    order = np.lexsort((table[:, 1], table[:, 2], table[:, 0]))
    return table[order, 3:].reshape(n_step, len(layers), n_parallel, -1)


def build_dump(bin_dir: Path, source_dir: Path, out: Path) -> Path:
    """Compile routing_dump.cpp against the libraries next to an engine's programs and the headers of its source."""
    if out.exists() and out.stat().st_mtime > Path(__file__).with_name("routing_dump.cpp").stat().st_mtime:
        return out
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise MoestreamError("no C++ compiler found for routing_dump.cpp", hint="install g++ or set CXX")
    if not (source_dir / "include" / "llama.h").is_file():
        raise MoestreamError(f"no llama.cpp headers in {source_dir}", hint="moestream build, or give its tree with --source")
    libs = next((d for d in (bin_dir, bin_dir.parent / "lib", bin_dir.parent / "bin") if (d / "libllama.so").exists()), None)
    if libs is None:
        raise MoestreamError(
            f"no libllama.so at {bin_dir}", hint="give the engine's folder with --bin; it must be a shared build"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [
        compiler, "-O2", "-std=c++17", str(Path(__file__).with_name("routing_dump.cpp")), "-o", str(out),
        f"-I{source_dir / 'include'}", f"-I{source_dir / 'ggml' / 'include'}", f"-L{libs}",
        "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libs.resolve()}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MoestreamError(
            f"routing_dump.cpp does not compile: {done.stderr.strip().splitlines()[0] if done.stderr else done.returncode}",
            hint="--source must be the tree that the engine was built from",
        )
    return out


def measure(
    model: Path,
    program: Path,
    *,
    n_tokens: int = N_TOKENS,
    seed: int = 1,
    n_threads: int = 1,
    n_parallel: int = 1,
    slots: tuple[int, ...] = SLOTS,
) -> Curve:
    """Decode ``n_tokens`` and replay what was chosen."""
    facts = gguf_facts.read(model)
    if not facts.is_moe:
        raise MoestreamError(f"{model} has no expert tensors", hint="give a MoE model")
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "routing.csv"
        args = [str(facts.files[0]), str(out), str(n_tokens), str(seed), str(n_threads or os.cpu_count() or 1), str(n_parallel)]
        done = subprocess.run([str(program), *args], capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise MoestreamError(
                f"routing of {model} could not be recorded: {last[0]}",
                hint=f"run it by hand: {shlex.join([str(program), *args])}",
            )
        ids = read_dump(out)
    return curve(ids, facts.n_expert, tuple(s for s in slots if s <= facts.n_expert))


def sidecar(model: Path) -> Path:
    """Where a model's measured curve is kept, beside the model."""
    return model.with_suffix(".curve.json")


def save(c: Curve, model: Path) -> Path:
    path = sidecar(model)
    path.write_text(json.dumps({"schema": SCHEMA, "model_bytes": model.stat().st_size, **c.__dict__}, indent=2) + "\n")
    return path


def load(model: Path) -> Curve | None:
    """The curve measured earlier; None when there is none, or when it is of a file of another size."""
    try:
        data = json.loads(sidecar(model).read_text())
    except (OSError, ValueError):
        return None
    if data.pop("schema", None) != SCHEMA or data.pop("model_bytes", None) != model.stat().st_size:
        return None
    return Curve(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Measure a model's hit rate by slots from the experts that it really chooses.")
    p.add_argument("model", type=Path)
    p.add_argument("--bin", type=Path, help="folder with libllama.so; the engine in use when left out")
    p.add_argument(
        "--source", type=Path, help="llama.cpp tree that it was built from (headers); vendor/llama.cpp when left out"
    )
    p.add_argument("--tokens", type=int, default=N_TOKENS)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=1, help="0: all cores; more than one is slow beside other work")
    p.add_argument("--np", type=int, default=1, help="sequences decoded together")
    p.add_argument("--json", action="store_true")
    a = p.parse_args(argv)
    try:
        cache = Path(tempfile.gettempdir()) / f"moestream-bench-{os.getuid()}"
        bin_dir = a.bin or engines.in_use().bin_dir
        source = a.source or paths.workspace_dir() / "vendor" / "llama.cpp"
        key = zlib.crc32(f"{bin_dir.resolve()} {source.resolve()}".encode())
        program = build_dump(bin_dir, source, cache / f"routing-dump-{key:08x}")
        c = measure(a.model, program, n_tokens=a.tokens, seed=a.seed, n_threads=a.threads, n_parallel=a.np)
        if a.np == 1:
            save(c, a.model)
    except MoestreamError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return e.exit_code
    print(json.dumps({"schema": SCHEMA, **c.__dict__}, indent=2) if a.json else c.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
