"""Which nodes a card's kernels compute together, with slots in its memory and without streaming: by upstream's own log, for one token.

Needs an engine that logs it, and a model whose decoding fits on the card without streaming:

    moestream build --backend cuda --no-ui --cmake-arg=-DCMAKE_CUDA_FLAGS=-DGGML_CUDA_DEBUG
    python tests/gpu/fusions.py MODEL [--slots N] [--bin DIR]

Ends with 0 if streaming loses none. With slots for all experts of a layer its graph is stock's. What is lost need not be streaming's doing: upstream
fuses nothing whose result would lie where something is still read, and where results lie is another matter in a graph with more nodes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

FUSED = re.compile(r"nodes_fused: (\d+), first: (\w+) \((.*?)\), last: (\w+) \((.*?)\)")
LAYER = re.compile(r"(?:-|(?<=cache_[kvsr]_l))\d+\b.*")
NUMBER = re.compile(r"(?<=^node_)\d+$")


def fused(log: str) -> Counter[str]:
    """In how many places of the graph which nodes are computed together. However often the graph was: CUDA graphs log once what they repeat."""
    places: dict[str, set[tuple[str, str]]] = {}
    for n, first, first_name, last, last_name in FUSED.findall(log):
        names = (first_name, last_name)
        if any(
            LAYER.search(name) for name in names
        ):  # a place is known by its layer; numbers of nodes differ where there are more nodes
            names = tuple(NUMBER.sub("", name) for name in names)
        a, b = (NUMBER.sub("", LAYER.sub("", name)) for name in names)
        places.setdefault(f"{n} nodes, {first} {a} to {last} {b}", set()).add(names)
    return Counter({what: len(found) for what, found in places.items()})


def lost(stock: Counter[str], streamed: Counter[str]) -> list[str]:
    """What stock fuses and streaming does not, or in fewer places."""
    return [f"{what}: {streamed[what]} instead of {n}" for what, n in sorted(stock.items()) if streamed[what] < n]


def run(program: Path, model: Path, *flags: str) -> Counter[str]:
    """The fusions in the graph of one token; RuntimeError where it fails or logs none."""
    one_by_one = ("-ngl", "99", "-p", "Once", "-n", "4", "--temp", "0", "-no-cnv", "-c", "256", "-ub", "1", "-lv", "4")
    argv = [program, "-m", model, *one_by_one, *flags]
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=600
    )
    found = fused(done.stdout + done.stderr)
    if done.returncode or not found:
        said = (done.stdout + done.stderr).strip()[-400:]
        raise RuntimeError(
            f"{program.name} {' '.join(flags)} ended with {done.returncode} and named {len(found)} fusions: {said}"
        )
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--slots", default="16", help="(default: %(default)s)")
    p.add_argument("--bin", type=Path, help="folder with llama-completion; that of the cuda engine in use when left out")
    a = p.parse_args()
    if a.bin is None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from moestream.upstream import engines

        a.bin = engines.in_use("cuda").bin_dir
    program = a.bin / "llama-completion"
    stock = run(program, a.model)
    streamed = run(program, a.model, "--moe-slots", a.slots)
    missing = lost(stock, streamed)
    for what, n in sorted(stock.items()):
        print(f"{n:5} {streamed[what]:5}  {what}")
    for what in sorted(streamed.keys() - stock.keys()):
        print(f"{0:5} {streamed[what]:5}  {what}")
    print("\n".join(["", "lost:", *missing]) if missing else "\nnone is lost")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
