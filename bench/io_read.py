"""The engine's reader alone against fio: the same random reads of the same file, in turn; medians and their quotient.

python bench/io_read.py big.bin --make-gib 6
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream.errors import MoestreamError

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "bench" / "io_read.cpp", ROOT / "engine" / "reader.cpp", ROOT / "engine" / "uring.cpp")
SCHEMA = "moestream/io-read/1"
SLAB_BYTES = 768 * 2048 * 18 // 32  # one tensor of an expert of the 30B-A3B shape in Q4_0
BLOCK = 4096


@dataclass(frozen=True)
class Way:
    """How reads are kept under way: ``n`` threads with one each, or ``n`` of io_uring by ``workers`` threads."""

    backend: str
    n: int
    workers: int

    @property
    def name(self) -> str:
        return f"threads {self.n}" if self.backend == "threads" else f"io_uring {self.n} by {self.workers}"


@dataclass
class Row:
    """Samples in bytes per second, and processor seconds per 10^9 bytes."""

    way: Way
    ours: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    fio_cpu: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.fio)


def ways(threads: Sequence[int], depths: Sequence[int], workers: int) -> list[Way]:
    """Pure. A ring for each worker, of the same depth: the number of workers is the largest divisor of the depth up to ``workers``."""
    rings = [Way("uring", n, max(w for w in range(1, workers + 1) if n % w == 0)) for n in depths]
    return [*(Way("threads", n, n) for n in threads), *rings]


def ours_argv(program: Path, file: Path, slab_bytes: int, seconds: float, mode: str, way: Way, seed: int) -> list[str]:
    depth = way.n // way.workers
    return [str(program), str(file), str(slab_bytes), str(seconds), mode, way.backend, str(way.workers), str(depth), str(seed)]


def fio_argv(file: Path, slab_bytes: int, seconds: float, mode: str, way: Way, seed: int) -> list[str]:
    """Reads of whole blocks, at any block of the file: what a slab costs that begins anywhere."""
    engine = ["--ioengine=psync"] if way.backend == "threads" else ["--ioengine=io_uring", f"--iodepth={way.n // way.workers}"]
    return [
        "fio", "--name=read", f"--filename={file}", "--rw=randread", f"--bs={-(-slab_bytes // BLOCK) * BLOCK}", f"--blockalign={BLOCK}",
        "--norandommap", f"--direct={int(mode == 'direct')}", *engine, f"--numjobs={way.workers}", "--thread", "--group_reporting",
        "--time_based", f"--runtime={round(seconds * 1000)}ms", f"--randseed={seed}", "--output-format=json",
    ]  # fmt: skip


def parse_fio(text: str) -> tuple[float, float]:
    """(bytes per second, processor seconds per 10^9 bytes) of fio's JSON."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        rate = float(job["read"]["bw_bytes"])
        busy_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return rate, busy_s / (job["read"]["io_bytes"] / 1e9)
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as e:
        raise MoestreamError(f"fio's answer is not understood: {text[:200]!r}", hint="fio 3.x is wanted") from e


def parse_ours(text: str) -> tuple[float, float]:
    answer = json.loads(text)
    return float(answer["bytes_per_s"]), float(answer["cpu_s_per_gb"])


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| reads under way | reader, GB/s | fio, GB/s | ratio | processor s per GB: reader, fio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        ours, fio = (f"{statistics.median(s) / 1e9:.2f} ({min(s) / 1e9:.2f}-{max(s) / 1e9:.2f})" for s in (r.ours, r.fio))
        cpu = f"{statistics.median(r.ours_cpu):.2f}, {statistics.median(r.fio_cpu):.2f}"
        lines.append(f"| {r.way.name} | {ours} | {fio} | {r.ratio:.2f} | {cpu} |")
    return "\n".join(lines)


def build(folder: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise MoestreamError("no C++ compiler", hint="install g++")
    program = folder / "io_read"
    _run([compiler, "-O2", "-std=c++17", f"-I{ROOT / 'engine'}", "-o", str(program), *map(str, SOURCES), "-lpthread"])
    return program


def make_file(path: Path, size_bytes: int) -> None:
    """Random bytes, written past the page cache: not what some drives compress, nor what memory still holds."""
    _run([
        "fio", "--name=write", f"--filename={path}", "--rw=write", "--bs=1m", "--direct=1", "--refill_buffers", f"--size={size_bytes}",
        "--end_fsync=1", "--output-format=json",
    ])  # fmt: skip


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MoestreamError(
            f"{argv[0]} failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
        )
    return done.stdout


def measure(file: Path, args: argparse.Namespace) -> list[Row]:
    rows = [Row(way) for way in ways(args.threads, args.depths, args.workers)]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for run in range(args.runs):
            for row in rows:
                # in turn, and the other one first each time: a drive that gets slower meanwhile is nobody's fault
                for side in ("ours", "fio") if run % 2 == 0 else ("fio", "ours"):
                    seed = 1 + run
                    if side == "ours":
                        rate, cpu = parse_ours(_run(ours_argv(program, file, args.slab, args.seconds, args.io, row.way, seed)))
                        row.ours.append(rate)
                        row.ours_cpu.append(cpu)
                    else:
                        rate, cpu = parse_fio(_run(fio_argv(file, args.slab, args.seconds, args.io, row.way, seed)))
                        row.fio.append(rate)
                        row.fio_cpu.append(cpu)
                print(
                    f"run {run + 1}, {row.way.name}: {row.ours[-1] / 1e9:.2f} and fio {row.fio[-1] / 1e9:.2f} GB/s",
                    file=sys.stderr,
                )
    return rows


def as_json(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "slab_bytes": args.slab,
        "io": args.io,
        "rows": [
            {
                "backend": r.way.backend, "in_flight": r.way.n, "workers": r.way.workers, "ratio": r.ratio,
                "bytes_per_s": r.ours, "fio_bytes_per_s": r.fio, "cpu_s_per_gb": r.ours_cpu, "fio_cpu_s_per_gb": r.fio_cpu,
            }
            for r in rows
        ],
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",") if part]
    if min(values, default=0) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': expected numbers from 1, with commas between them")
    return values


def number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:30]) < 1 << 40):
        raise argparse.ArgumentTypeError(f"'{text}': expected a number from 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", type=Path, help="file to read from; larger than the page cache when --io buffered")
    p.add_argument("--make-gib", type=float, help="write it first, with random bytes, and remove it at the end")
    p.add_argument("--slab", type=number, default=SLAB_BYTES, help="bytes of one read (default: %(default)s)")
    p.add_argument("--io", choices=("direct", "buffered"), default="direct")
    p.add_argument("--threads", type=numbers, default=[1, 2, 4, 8], help="numbers of threads (default: 1,2,4,8)")
    p.add_argument("--depths", type=numbers, default=[1, 2, 4, 8, 16, 32], help="reads of io_uring (default: 1,2,4,8,16,32)")
    p.add_argument("--workers", type=number, default=2, help="threads that share the reads of io_uring, at most (default: 2)")
    p.add_argument("--runs", type=number, default=3)
    p.add_argument("--seconds", type=float, default=2, help="of one run of one side")
    p.add_argument("--json", type=Path, help="write all samples there")
    args = p.parse_args(argv)
    try:
        if not shutil.which("fio"):
            raise MoestreamError("fio is not installed", hint="apt-get install fio")
        with contextlib.ExitStack() as at_end:
            if args.make_gib:
                if args.file.exists():
                    raise MoestreamError(f"{args.file} exists already", hint="leave out --make-gib, or name another file")
                at_end.callback(args.file.unlink, missing_ok=True)
                make_file(args.file, int(args.make_gib * 2**30))
            elif not args.file.is_file():
                raise MoestreamError(f"{args.file} is no file", hint="--make-gib 6 writes one")
            if args.file.stat().st_size < 2 * args.slab:
                raise MoestreamError(
                    f"{args.file} must hold at least 2 slabs of {args.slab} bytes", hint="a larger file, or --slab N"
                )
            rows = measure(args.file, args)
    except MoestreamError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return 1
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(as_json(rows, args), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
