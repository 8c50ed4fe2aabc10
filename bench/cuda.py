"""Slots on an NVIDIA card against stock llama.cpp on the same card: decode, prompts, memory of the card; a table and JSON.

python bench/cuda.py models/qwen3moe-30b-a3b-hit75.gguf --bin DIR

Logits are compared first (moe-identity, byte for byte); when they differ no speed is printed. Then each side is one llama-bench process a
round, in turn. The last of its repetitions counts: by then slots and RAM tier are warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream.errors import MoestreamError

SCHEMA = "moestream/cuda/1"
WARM = ("--moe-warm", "120")


@dataclass(frozen=True)
class Side:
    """One setting. ``args`` are llama-bench's; what it measures is added to them."""

    name: str
    args: tuple[str, ...]
    prompts: bool = False  # measured too


def sides_for(slots: Sequence[str], threads: int) -> list[Side]:
    """Stock in memory of the card, with all and with some experts on the processor, and moestream's settings."""
    cpu = ("-t", str(threads), "-lm", "none")
    found = [
        Side("stock, all on the card", ("-t", "8"), True),
        Side("stock, -ncmoe 99", ("-ncmoe", "99", *cpu), True),
        Side("stock, mapped", ("-ncmoe", "99", "-t", str(threads), "-lm", "mmap"), True),
        Side("stock, -ncmoe 36", ("-ncmoe", "36", *cpu)),
        Side("stock, -ncmoe 34", ("-ncmoe", "34", *cpu)),
    ]
    for n in slots:
        found.append(Side(f"{n} slots", ("-t", "8", "--moe-slots", n, *(WARM if n != "all" else ())), n in ("32", "all")))
    found += [
        Side("32 slots, no prefetch", ("-t", "8", "--moe-slots", "32", *WARM, "--moe-prefetch", "off")),
        Side("32 slots, looked after by the host", ("-t", "8", "--moe-slots", "32", "--moe-gpu-path", "copy")),
    ]
    drive = ("--moe-ram", "none", "--moe-io", "direct")
    found += [Side(f"{n} slots, from the drive", ("-t", "8", "--moe-slots", n, *drive)) for n in slots if n != "all"]
    return found


def chosen(sides: Sequence[Side], parts: Sequence[str]) -> list[Side]:
    """Those of which a part is the name, or in the name where it is nobody's whole name; all without parts."""
    names = {s.name for s in sides}
    return [s for s in sides if not parts or any(p == s.name or (p not in names and p in s.name) for p in parts)]


@dataclass
class Run:
    """One process of llama-bench."""

    side: str
    tok_per_s: dict[str, float] = field(default_factory=dict)  # by "tg128", "pp512"
    card_mib: int = 0  # the most memory of the card that was taken, all of its processes
    stats: dict | None = None


def smi(query: str) -> str:
    return subprocess.run(
        ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"), capture_output=True, text=True, check=True
    ).stdout.strip()


@contextlib.contextmanager
def watch_card(run: Run) -> Iterator[None]:
    """Keep the largest ``memory.used`` of the first card in ``run`` meanwhile."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.25):
            run.card_mib = max(run.card_mib, int(smi("memory.used").splitlines()[0]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(bench: Path, model: Path, side: Side, a: argparse.Namespace) -> Run:
    """One process; raises MoestreamError when it fails."""
    run = Run(side.name)
    prompts = [str(n) for n in a.prompts] if side.prompts else ["0"]
    repetitions = 2 if "drive" in side.name else 3
    tokens = a.tokens if "drive" not in side.name else min(a.tokens, 64)
    argv = [bench, "-m", model, "-ngl", "99", "--no-warmup", "-o", "jsonl", "-r", repetitions, "-n", tokens, *side.args]
    argv += ["-ub", max(a.prompts), "-p", ",".join(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stats.json")
        with watch_card(run):
            done = subprocess.run(
                [str(x) for x in argv],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=a.timeout_s,
                env={**os.environ, "MOESTREAM_STATS_FILE": str(file)},
            )
        if done.returncode:
            raise MoestreamError(
                f"llama-bench ({side.name}) ended with {done.returncode}: {done.stderr.strip()[-300:]}",
                hint=f"run it by hand: {shlex.join(map(str, argv))}",
            )
        if file.is_file():
            run.stats = json.loads(file.read_text())
    for line in done.stdout.splitlines():
        r = json.loads(line)
        run.tok_per_s[f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}"] = r["samples_ts"][-1]
    return run


def identity(program: Path, model: Path, slots: str) -> list[str]:
    """What moe-identity says of one token at a time and of a batch that goes through staging; MoestreamError when bits differ."""
    argv = [program, "-m", model, "--gpu-layers", "99", "--slots", slots, "--ubatch", "1,8,128", "--tokens", "128"]
    done = subprocess.run(
        [str(x) for x in (*argv, "--moe-prefetch", "on")], capture_output=True, text=True, errors="replace", timeout=1800
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    if done.returncode or len(lines) != 3 or not all(line.startswith("ok") for line in lines):
        raise MoestreamError(
            f"logits were not shown to be equal: {(done.stdout + done.stderr).strip()[-500:]}", hint=shlex.join(map(str, argv))
        )
    return lines


def link_bytes_per_s() -> float | None:
    """Copies of page-locked memory to the card by its copy engine, the best of five; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, (1 << 30) / (time.perf_counter() - begin))
    return best


def summarise(runs: Sequence[Run]) -> list[dict]:
    """Medians by side and phase, in the order of first appearance."""
    rows = []
    for name in dict.fromkeys(r.side for r in runs):
        mine = [r for r in runs if r.side == name]
        phases = {p: statistics.median(r.tok_per_s[p] for r in mine) for p in mine[0].tok_per_s}
        row = {"side": name, "tok_per_s": phases, "card_mib": max(r.card_mib for r in mine)}
        if stats := mine[-1].stats:
            t = stats["totals"]
            used = t["hits"] + t["misses"]
            row |= {
                "gpu_path": (stats.get("gpu_path") or {}).get("in_force"),
                "hit_rate": t["hits"] / used if used else None,
                "from_ram_bytes_per_token": t["bytes_from_ram"] / t["tokens_decode"] if t["tokens_decode"] else None,
                "guess_hits": t["guess_hits"],
                "guesses": t["guesses"],
                "locked_bytes": stats["memory"]["ram_bytes"] + stats["memory"]["bounce_bytes"],
            }
        rows.append(row)
    return rows


def table(rows: Sequence[dict]) -> str:
    phases = list(dict.fromkeys(p for row in rows for p in row["tok_per_s"]))
    lines = [f"| | {' | '.join(phases)} | card, MiB | hits | page-locked, GiB |", "| --- |" + " --- |" * (len(phases) + 3)]
    for row in rows:
        cells = [f"{row['tok_per_s'][p]:.1f}" if p in row["tok_per_s"] else "" for p in phases]
        hits = f"{100 * row['hit_rate']:.1f} %" if row.get("hit_rate") is not None else ""
        locked = f"{row['locked_bytes'] / 2**30:.1f}" if row.get("locked_bytes") else ""
        lines.append(f"| {row['side']} | {' | '.join(cells)} | {row['card_mib']} | {hits} | {locked} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument(
        "--bin", type=Path, help="folder with llama-bench and moe-identity; that of the cuda engine in use when left out"
    )
    p.add_argument("--slots", default="8,16,32,64,96,all", help="of each layer, each a side (default: %(default)s)")
    p.add_argument(
        "--only", default="", help="sides of these names, or whose names contain one of these, separated by semicolons"
    )
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--prompts", type=lambda s: [int(n) for n in s.split(",")], default=[512, 2048])
    p.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of stock's experts on the processor (default: %(default)s)"
    )
    p.add_argument("--timeout-s", type=float, default=300)
    p.add_argument("--json", type=Path)
    p.add_argument("--no-identity", action="store_true", help="logits were compared by a run before this one")
    a = p.parse_args(argv)
    try:
        if a.bin is None:
            from moestream.upstream import engines

            a.bin = engines.in_use("cuda").bin_dir
        only = [part.strip() for part in a.only.split(";") if part.strip()]
        sides = chosen(sides_for(a.slots.split(","), a.threads), only)
        numbers = [n for n in a.slots.split(",") if n != "all"]
        compared = "32" if "32" in numbers or not numbers else numbers[0]
        equal = [] if a.no_identity else identity(a.bin / "moe-identity", a.model, compared)
        for line in equal:
            print(line, file=sys.stderr, flush=True)
        runs: list[Run] = []
        for i in range(a.rounds):
            for side in sides:
                runs.append(measure(a.bin / "llama-bench", a.model, side, a))
                speeds = ", ".join(f"{phase} {value:.1f}" for phase, value in runs[-1].tok_per_s.items())
                print(f"round {i + 1}, {side.name}: {speeds}", file=sys.stderr, flush=True)
    except MoestreamError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return 1
    rows = summarise(runs)
    link = link_bytes_per_s()
    text = [
        f"{datetime.now(UTC).isoformat(timespec='seconds')}, {smi('name,driver_version')}, {os.cpu_count()} processors, {a.model.name}",
        f"copies of page-locked memory to the card: {link / 1e9:.1f} GB/s"
        if link
        else "the link was not measured (no PyTorch)",
        "",
        table(rows),
    ]
    print("\n".join(text))
    if a.json:
        data = {
            "schema": SCHEMA, "command": ["cuda.py", *(sys.argv[1:] if argv is None else argv)], "link_bytes_per_s": link, "identity": equal,
            "summary": rows, "runs": [asdict(r) for r in runs],
        }  # fmt: skip
        a.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
