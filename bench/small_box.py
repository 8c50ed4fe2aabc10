"""Stock mmap against moestream on the same engine and model, in a box with too little memory.

    python bench/small_box.py models/qwen3moe-30b-a3b-hit75.gguf --memory-gib 8 --slots 32 --json result.json

First logits are compared byte for byte (llama-results) with those of stock and the same kernels; no speed is printed when they differ. Then
the sides run in turn: page cache of the model emptied, read-ahead 128 KiB, memory capped by a cgroup. Each run is one llama-bench process that
decodes the same random tokens twice: the first pass fills slots and page cache, the second is the one that counts.
docs/measuring.md says what the figures mean. Linux, root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import box, routing
from moestream import gguf_facts
from moestream.errors import MoestreamError
from moestream.result import Result, emit
from moestream.upstream import engines

STATS_SCHEMA = "moestream/stats/1"
# Short: a byte-level vocabulary makes a token of each character, and a model that does not fit is slow.
IDENTITY_PROMPT = "The lighthouse keeper counted the ships twice, wrote 41 in the book, and went down to the harbour."
N_LAP = 2  # by default: the first one warms up


# --- the two sides ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        args: added to every program's command line.
        streams: whether it is moestream, and so reports statistics.
        repack: with the kernels that llama.cpp prefers, which want weights in another order than the file's.
    """

    name: str
    args: tuple[str, ...]
    streams: bool = False
    repack: bool = False

    def kernels(self, program: str) -> tuple[str, ...]:
        """The arguments of ``program`` that choose them."""
        if self.repack:
            return ()
        return ("--repack", "0") if program == "llama-bench" else ("--no-repack",)


def stock_side(load_mode: str, repack: bool = False) -> Side:
    """mmap never repacks here: that is an anonymous copy of the model, for which the cap would have the process killed."""
    return Side(f"stock {load_mode}", ("-lm", load_mode), repack=repack and load_mode != "mmap")


def moestream_side(a: argparse.Namespace, slots: str, also: str = "") -> Side:
    """also: more arguments, which come last and so win over the others; they are in the side's name."""
    args = ["--moe-slots", slots, "--moe-io", a.moe_io, "--moe-policy", a.moe_policy, "--moe-overlap", a.moe_overlap]
    if a.moe_io_threads:
        args += ["--moe-io-threads", str(a.moe_io_threads)]
    name = f"moestream {slots} slots" + (f" {also.replace('--moe-', '')}" if also else "")
    return Side(name, (*args, *a.moe_arg, *shlex.split(also)), streams=True, repack=a.kernels == "default")


# --- what came out ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One measured process. None: not known, or the process was killed (``failure`` says so).

    Attributes:
        tok_per_s: speed of the counted lap.
        bytes_per_token: what the disk delivered in the counted lap.
        stall_share: time compute waited for experts, of the time of all laps.
        hit_rate: uses of an expert that found it in its slot, all laps.
        read_share: expert bytes read from files, of the expert bytes used (hits included); all laps.
        predicted_bytes: memory that the engine said it would take.
    """

    side: str
    phase: str
    tok_per_s: float | None = None
    bytes_per_token: float | None = None
    stall_share: float | None = None
    hit_rate: float | None = None
    read_share: float | None = None
    peak_rss_bytes: int | None = None
    peak_anon_bytes: int | None = None
    peak_cgroup_bytes: int | None = None
    predicted_bytes: int | None = None
    failure: str | None = None
    stats: dict[str, Any] | None = field(default=None, repr=False)


class LapWatch:
    """Notes the bytes read when the counted lap of a llama-bench starts and when its result is out."""

    MARK = re.compile(r"benchmark \d+/\d+: (?:prompt|generation) run (\d+)/(\d+)")

    def __init__(self) -> None:
        self.process: box.Process | None = None
        self.ready = threading.Event()
        self.start_bytes: int | None = None
        self.end_bytes: int | None = None
        self.record: dict[str, Any] | None = None

    def line(self, stream: str, text: str) -> None:
        if stream == "err" and (m := self.MARK.search(text)) and m[1] == m[2]:
            self.ready.wait(5)
            self.start_bytes = self.process.read_bytes() if self.process else None
        elif stream == "out" and text.startswith("{"):
            self.ready.wait(5)
            self.end_bytes = self.process.read_bytes() if self.process else None
            self.record = json.loads(text)

    @property
    def lap_bytes(self) -> int | None:
        if self.start_bytes is None or self.end_bytes is None:
            return None
        return self.end_bytes - self.start_bytes


def read_stats(path: Path) -> dict[str, Any] | None:
    """The engine's statistics as written at exit; None when it wrote none.

    Raises:
        MoestreamError: it wrote something else.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        stats = json.loads(path.read_text())
    except ValueError as e:
        raise MoestreamError(f"the engine's statistics are not JSON: {e}", hint="is the engine of another version?") from e
    if not isinstance(stats, dict) or stats.get("schema") != STATS_SCHEMA:
        got = stats.get("schema") if isinstance(stats, dict) else type(stats).__name__
        raise MoestreamError(
            f"the engine's statistics have schema {got!r}, not {STATS_SCHEMA!r}", hint="rebuild the engine: moestream build"
        )
    return stats


def add_stats(run: Run, stats: dict[str, Any] | None, wall_us: float | None) -> None:
    """Fill in what follows from the statistics; ``wall_us`` is the time that the stall is a share of."""
    if not stats:
        return
    run.stats = stats
    t = stats.get("totals", {})
    uses = t.get("hits", 0) + t.get("misses", 0)
    if uses:
        run.hit_rate = t["hits"] / uses
    if t.get("bytes_needed"):
        run.read_share = t.get("bytes_read", 0) / t["bytes_needed"]
    if wall_us and "stall_us" in t:
        run.stall_share = t["stall_us"] / wall_us
    run.predicted_bytes = stats.get("memory", {}).get("total_bytes")


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """Everything that the runs have in common."""

    bin_dir: Path
    files: tuple[Path, ...]
    threads: int
    layout: box.CgroupLayout | None
    memory_bytes: int | None
    disk_bytes_per_s: int | None
    disk: box.Disk | None
    timeout_s: float
    drop: bool = True
    laps: int = N_LAP

    @property
    def model(self) -> Path:
        return self.files[0]

    def program(self, name: str) -> str:
        path = self.bin_dir / name
        if not path.is_file():
            raise MoestreamError(f"no {name} in {self.bin_dir}", hint=f"moestream build --target {name}, or give --bin")
        return str(path)

    def cgroup(self) -> box.Cgroup | None:
        if not self.layout:
            return None
        return box.Cgroup(self.layout, self.memory_bytes, self.disk_bytes_per_s, self.disk.device if self.disk else None)

    def fresh(self) -> None:
        if self.drop:
            box.drop_cache(self.files)

    # one llama-bench: decode, or prompt

    def llama_bench(self, side: Side, phase: str, n_tokens: int) -> Run:
        """``phase``: "tg" decodes ``n_tokens`` one at a time, "pp" evaluates a prompt of that length."""
        run = Run(side.name, f"{phase}{n_tokens}")
        sizes = ["-p", str(n_tokens), "-n", "0"] if phase == "pp" else ["-p", "0", "-n", str(n_tokens)]
        command = [
            self.program("llama-bench"), "-m", str(self.model), "-t", str(self.threads), *side.kernels("llama-bench"), *side.args, *sizes,
            "-r", str(self.laps), "--no-warmup", "--progress", "-o", "jsonl",
        ]  # fmt: skip
        self.fresh()
        watch = LapWatch()
        with tempfile.TemporaryDirectory() as tmp, _optional(self.cgroup()) as group:
            stats_file = Path(tmp) / "stats.json"
            with box.Process(command, group, watch.line, {"MOESTREAM_STATS_FILE": str(stats_file)}) as p:
                watch.process = p
                watch.ready.set()
                usage = p.wait(self.timeout_s)
            stats = read_stats(stats_file) if side.streams else None
        _add_usage(run, usage)
        if usage.killed:
            run.failure = "killed (out of memory)"
            return run
        if usage.exit_code or not watch.record:
            raise MoestreamError(
                f"llama-bench ({side.name}) ended with {usage.exit_code}: {_last(p.err)}",
                hint=f"run it by hand: {shlex.join(command)}",
            )
        laps_ns = watch.record["samples_ns"]
        run.tok_per_s = n_tokens / (laps_ns[-1] / 1e9)
        if watch.lap_bytes is not None:
            run.bytes_per_token = watch.lap_bytes / n_tokens
        add_stats(run, stats, sum(laps_ns) / 1e3)
        return run

    # the server with several sequences at once

    def server(self, side: Side, n_parallel: int, n_tokens: int) -> Run:
        """``n_parallel`` clients at once, each has ``n_tokens`` sampled; tok/s is the sum of all."""
        run = Run(side.name, f"np{n_parallel}")
        port = _free_port()
        base = f"http://127.0.0.1:{port}"
        command = [
            self.program("llama-server"), "-m", str(self.model), "-t", str(self.threads), *side.kernels("llama-server"), *side.args,
            "--host", "127.0.0.1", "--port", str(port), "-np", str(n_parallel), "-c", str(n_parallel * (n_tokens + 32)),
            "--no-warmup", "--metrics",
        ]  # fmt: skip
        self.fresh()

        def ask(seed: int) -> int:
            body = {
                "prompt": [random.Random(seed).randrange(1, 200) for _ in range(4)], "n_predict": n_tokens, "ignore_eos": True,
                "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed, "cache_prompt": False,
            }  # fmt: skip
            r = httpx.post(f"{base}/completion", json=body, timeout=self.timeout_s)
            r.raise_for_status()
            return int(r.json()["tokens_predicted"])

        def totals() -> dict[str, Any] | None:
            r = httpx.get(f"{base}/moe/stats", timeout=30)
            return r.json() if r.status_code == 200 else None

        with _optional(self.cgroup()) as group, box.Process(command, group) as p:
            self._until_healthy(base, p, side)
            with ThreadPoolExecutor(n_parallel) as pool:
                for lap in range(self.laps):
                    before, read_before, start = (totals() if side.streams else None), p.read_bytes(), time.monotonic()
                    n = sum(pool.map(ask, range(lap * n_parallel + 1, (lap + 1) * n_parallel + 1)))
                    wall_s, read_after = time.monotonic() - start, p.read_bytes()
            run.tok_per_s = n / wall_s
            if read_before is not None and read_after is not None:
                run.bytes_per_token = (read_after - read_before) / n
            after = totals() if side.streams else None
            if after and before:
                lap_totals = {
                    k: v - before["totals"].get(k, 0) for k, v in after["totals"].items() if isinstance(v, int | float)
                }
                add_stats(run, {**after, "totals": lap_totals}, wall_s * 1e6)
            p.popen.terminate()
            _add_usage(run, p.wait(60))
        return run

    def _until_healthy(self, base: str, p: box.Process, side: Side) -> None:
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if p.popen.poll() is not None:
                why = "killed (out of memory)" if p.popen.returncode == -9 else _last(p.err)
                raise MoestreamError(
                    f"llama-server ({side.name}) ended with {p.popen.returncode}: {why}",
                    hint=f"run it by hand: {shlex.join(p.popen.args)}",
                )
            try:
                if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise MoestreamError(
            f"llama-server ({side.name}) was not ready within {self.timeout_s:.0f} s", hint="raise --timeout-s"
        )

    # identity

    def logits(self, side: Side, ubatch: int) -> bytes:
        """All logits of the fixed prompt, evaluated ``ubatch`` tokens at a time (1: the decode path). Outside the box."""
        with tempfile.TemporaryDirectory() as tmp:
            out = Path(tmp) / "logits.gguf"
            command = [
                self.program("llama-results"), "-m", str(self.model), "-t", str(self.threads), *side.kernels("llama-results"), *side.args,
                "-c", "512", "-b", "512", "-ub", str(ubatch), "-p", IDENTITY_PROMPT, "-o", str(out),
            ]  # fmt: skip
            with box.Process(command, None) as p:
                usage = p.wait(self.timeout_s)
            if usage.exit_code or not out.exists():
                raise MoestreamError(
                    f"llama-results ({side.name}) ended with {usage.exit_code}: {_last(p.err)}",
                    hint=f"run it by hand: {shlex.join(command)}",
                )
            return logits_of(out)


def logits_of(path: Path) -> bytes:
    """The bytes of the tensor "logits" that llama-results writes."""
    for t in gguf.GGUFReader(path).tensors:
        if t.name == "logits":
            return t.data.tobytes()
    raise MoestreamError(f"no logits in {path}", hint="llama-results of this engine writes another format")


def first_difference(a: bytes, b: bytes) -> int | None:
    """Index of the first byte that differs, or of the shorter one's end; None when they are the same."""
    if a == b:
        return None
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def check_identity(bench: Bench, reference: Side, others: Sequence[Side], n_parallel: int = 0) -> dict[str, Any]:
    """Reference against itself, then against the others: one token at a time, ``n_parallel`` at a time, all at once.

    Raises:
        MoestreamError: any byte differs.
    """
    n_bytes = {}
    ubatches = {"decode": 1, "prompt": 512} | ({f"np{n_parallel}": n_parallel} if n_parallel > 1 else {})
    for name, ubatch in ubatches.items():
        want = bench.logits(reference, ubatch)
        for side in (reference, *others):
            at = first_difference(want, bench.logits(side, ubatch))
            if at is not None:
                raise MoestreamError(
                    f"outputs differ, {reference.name} against {side.name}, {name}: byte {at} of {len(want)} of the logits",
                    hint="a speed from other output means nothing; find the difference first",
                )
        n_bytes[name] = len(want)
    return {"equal": True, "logits_bytes": n_bytes, "sides": [reference.name, *(side.name for side in others)]}


class _optional:
    """``with`` for something that may be None."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __enter__(self) -> Any:
        return self.inner.__enter__() if self.inner else None

    def __exit__(self, *exc: object) -> None:
        if self.inner:
            self.inner.__exit__(*exc)


def _add_usage(run: Run, usage: box.Usage) -> None:
    run.peak_rss_bytes = usage.peak_rss_bytes
    run.peak_anon_bytes = usage.peak_anon_bytes
    run.peak_cgroup_bytes = usage.peak_cgroup_bytes


def _last(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "no message")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# --- report ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "side",
    "phase",
    "runs",
    "tok/s",
    "range",
    "MB/token",
    "stall",
    "hits",
    "RSS GiB",
    "anon GiB",
    "cgroup GiB",
    "of plan",
)


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """Medians of each side and phase, in the order of first appearance; ``failure`` where any run of it failed."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for r in runs:
        groups.setdefault((r.phase, r.side), []).append(r)
    out = []
    for (phase, side), rs in groups.items():
        row: dict[str, Any] = {
            "side": side,
            "phase": phase,
            "runs": len(rs),
            "failure": next((r.failure for r in rs if r.failure), None),
        }
        for key in (
            "tok_per_s", "bytes_per_token", "stall_share", "hit_rate", "read_share", "peak_rss_bytes", "peak_anon_bytes",
            "peak_cgroup_bytes", "predicted_bytes",
        ):  # fmt: skip
            values = [v for r in rs if (v := getattr(r, key)) is not None]
            row[key] = statistics.median(values) if values and not (row["failure"] and key == "tok_per_s") else None
        speeds = [r.tok_per_s for r in rs if r.tok_per_s is not None]
        row["tok_per_s_min"], row["tok_per_s_max"] = (min(speeds), max(speeds)) if speeds else (None, None)
        out.append(row)
    return out


def ratios(rows: list[dict[str, Any]], reference: str) -> dict[str, float]:
    """Speed of each other side over the reference, by "phase side"."""
    base = {r["phase"]: r["tok_per_s"] for r in rows if r["side"] == reference}
    return {
        f"{r['phase']} {r['side']}": r["tok_per_s"] / base[r["phase"]]
        for r in rows
        if r["side"] != reference and r["tok_per_s"] and base.get(r["phase"])
    }


def table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None, fmt: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value / scale, fmt)

    lines = [COLUMNS]
    for r in rows:
        peak = r["peak_cgroup_bytes"] or r["peak_rss_bytes"]
        of_plan = peak / r["predicted_bytes"] if peak and r["predicted_bytes"] else None
        spread = f"{number(r['tok_per_s_min'], '.2f')}-{number(r['tok_per_s_max'], '.2f')}" if r["tok_per_s_min"] else "-"
        lines.append((
            r["side"], r["phase"], str(r["runs"]), r["failure"] or number(r["tok_per_s"], ".2f"), spread,
            number(r["bytes_per_token"], ".1f", 1e6), number(r["stall_share"], ".0%"), number(r["hit_rate"], ".1%"),
            number(r["peak_rss_bytes"], ".2f", 2**30), number(r["peak_anon_bytes"], ".2f", 2**30),
            number(r["peak_cgroup_bytes"], ".2f", 2**30), number(of_plan, ".3f"),
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [
        tuple(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in text)


# --- command line ----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description="Stock mmap against moestream in a box with too little memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("model", type=Path)
    p.add_argument("--bin", type=Path, help="folder with the llama-* programs; the engine in use when left out")
    p.add_argument("--json", type=Path, help="write everything to this file too")
    p.add_argument("--runs", type=int, default=3, help="runs of each side, in turn")
    p.add_argument(
        "--laps", type=int, default=N_LAP, help="times that a process does its work; the last counts (default: %(default)s)"
    )
    p.add_argument(
        "--no-identity", action="store_true", help="logits were compared by a run before this one, with the same settings"
    )
    p.add_argument("--tokens", type=int, default=32, help="tokens decoded in a lap")
    p.add_argument("--prompt", type=int, default=512, help="length of the prompt phase, 0 leaves it out")
    p.add_argument("--np", type=int, default=0, help="also decode this many sequences at once, by llama-server")
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--timeout-s", type=float, default=3600.0, help="of one run")

    g = p.add_argument_group("the box")
    g.add_argument("--memory-gib", type=float, help="cap, page cache included; half of the model when left out")
    g.add_argument("--disk-mb-s", type=float, help="throttle reads; not when left out")
    g.add_argument(
        "--read-ahead-kib", default=str(box.USUAL_READ_AHEAD_KIB), help="of the model's disk during the runs, or: keep"
    )
    g.add_argument("--all-slots", action="store_true", help="no cap, all experts in slots, against stock without mmap")

    g = p.add_argument_group("moestream's side")
    g.add_argument("--slots", default="32", help="per MoE layer: a number, all, auto")
    g.add_argument(
        "--kernels", choices=("default", "plain"), default="default",
        help="default: as llama.cpp prefers, repacked; logits are then compared with stock's that is not capped",
    )  # fmt: skip
    g.add_argument("--moe-io-threads", type=int, default=0, help="0: the engine's own choice")
    g.add_argument("--moe-io", choices=("auto", "direct", "buffered"), default="auto")
    g.add_argument("--moe-policy", choices=("lru", "lfu", "heat"), default="lru")
    g.add_argument("--moe-overlap", choices=("on", "off"), default="on")
    g.add_argument(
        "--moe-arg", action="append", default=[], metavar="ARG", help="one more argument for that side; may be repeated"
    )
    g.add_argument(
        "--also", action="append", default=[], metavar="ARGS",
        help="one more moestream side, with these arguments too: '--moe-policy heat'; may be repeated",
    )  # fmt: skip
    g.add_argument("--without-stock", action="store_true", help="compare moestream's sides; logits with stock's all the same")
    g.add_argument("--stock-only", action="store_true", help="only the stock side: an engine without the patches")
    return p


def engine_bin(given: Path | None) -> Path:
    if given:
        if not given.is_dir():
            raise MoestreamError(f"no such folder: {given}", hint="give the folder with llama-bench in it")
        return given.resolve()
    return engines.in_use().bin_dir


def has_flag(program: str, flag: str) -> bool:
    with box.Process([program, "--help"], None) as p:
        p.wait(60)
    return any(flag in line for line in p.out + p.err)


def measure(a: argparse.Namespace) -> Result:
    """Everything the command line asks for."""
    facts = gguf_facts.read(a.model)
    if not facts.is_moe:
        raise MoestreamError(f"{a.model} has no expert tensors: nothing to stream", hint="give a MoE model")
    bin_dir = engine_bin(a.bin)
    memory_bytes = None
    if not a.all_slots:
        memory_bytes = int(a.memory_gib * 2**30) if a.memory_gib else facts.total_bytes // 2
    disk = box.disk_of(facts.files[0])
    bench = Bench(
        bin_dir=bin_dir,
        files=facts.files,
        threads=a.threads,
        layout=box.cgroup_layout(Path("/proc/mounts").read_text()),
        memory_bytes=memory_bytes,
        disk_bytes_per_s=int(a.disk_mb_s * 1e6) if a.disk_mb_s else None,
        disk=disk,
        timeout_s=a.timeout_s,
        drop=not a.all_slots,
        laps=a.laps,
    )
    stock = stock_side("none" if a.all_slots else "mmap", a.kernels == "default")
    sides = [stock]
    if not a.stock_only:
        if not has_flag(bench.program("llama-bench"), "--moe-slots"):
            raise MoestreamError(
                f"the llama-bench in {bin_dir} has no --moe-slots: it is not a patched engine",
                hint="moestream build, or --stock-only for stock alone",
            )
        sides += [moestream_side(a, "all" if a.all_slots else a.slots, also) for also in ("", *a.also)]

    kib = None if a.read_ahead_kib == "keep" else int(a.read_ahead_kib)
    runs: list[Run] = []
    with box.signals_as_exceptions(), box.read_ahead(disk, kib) as kib_in_force:
        if not a.no_identity:
            _say("comparing logits")
        # bits depend on the kernels: the same ones on both sides, in the box or out of it
        reference = stock if a.stock_only or sides[1].repack == stock.repack else stock_side("none", repack=True)
        identity = None if a.no_identity else check_identity(bench, reference, sides[1:], a.np)
        if a.without_stock:
            sides = sides[1:]
        for i in range(a.runs):
            for side in sides:
                _say(f"run {i + 1} of {a.runs}: {side.name}")
                runs.append(bench.llama_bench(side, "tg", a.tokens))
                if a.prompt:
                    runs.append(bench.llama_bench(side, "pp", a.prompt))
                if a.np:
                    runs.append(bench.server(side, a.np, a.tokens))

    rows = summarise(runs)
    speedups = ratios(rows, sides[0].name)
    curve = routing.load(facts.files[0])
    setting = {
        "model": facts.files[0].name,
        "model_bytes": facts.total_bytes,
        "expert_bytes": facts.expert_bytes,
        "memory_cap_bytes": memory_bytes,
        "disk_bytes_per_s": bench.disk_bytes_per_s,
        "read_ahead_kib": kib_in_force,
        "threads": a.threads,
        "n_cpu": os.cpu_count(),
        "cgroup_version": bench.layout.version if bench.layout else None,
        "sides": {s.name: list(s.args) for s in sides},
        "command": ["small_box.py", *sys.argv[1:]],
    }
    cap = f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes else "none"
    text = [
        f"model {facts.files[0].name}, {facts.total_bytes / 2**30:.2f} GiB, experts {facts.expert_bytes / 2**30:.2f} GiB",
        f"memory cap {cap}, read-ahead {kib_in_force} KiB, {a.threads} threads, logits {'not compared in this run' if a.no_identity else 'equal'}",
        "",
        table(rows),
        "",
        *(f"{name}: {value:.2f}x {sides[0].name}" for name, value in speedups.items()),
        *([""] if speedups else []),
        curve.text() if curve else f"hit rate by slots: not measured; run bench/routing.py {a.model}",
    ]
    data = {
        "setting": setting,
        "identity": identity,
        "summary": rows,
        "speedup": speedups,
        "curve": asdict(curve) if curve else None,
        "runs": [asdict(r) for r in runs],
    }
    return Result("small-box", data, "\n".join(text))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    a = parser().parse_args(argv)
    try:
        if a.json and not os.access(a.json.parent, os.W_OK):
            raise MoestreamError(f"cannot write {a.json}", hint="choose another folder for --json")
        result = measure(a)
        if a.json:  # complete or not at all
            part = a.json.with_suffix(a.json.suffix + ".part")
            with part.open("w") as f:
                emit(result, as_json=True, stream=f)
            shutil.move(part, a.json)
        emit(result, as_json=False)
    except MoestreamError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
