"""Serve for a long time among clients of which some go away: no wrong token, and memory, descriptors, threads and speed stay what they were.

    make soak                    ten minutes
    make soak SECONDS=3600       longer
    python tests/soak.py --seconds 600 --slots 8 --json soak.json

First a llama-server without streaming answers every prompt alone: the reference. Then four clients ask one with scarce slots at once,
cancel, drop connections and send nonsense, and every token they get must be the reference's (exact_answers.py says why that can be
asked). Linux.

Tolerances: between the first third of the time and the last (flatness.py) memory may grow by 8 MiB, and descriptors and threads by one a
client; when everybody is gone there may not be one more of those than before. Tokens for each second of processor time may fall by 25 %,
tokens a second by 50 %: other programs take the processor from us.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import clients
from clients import Held, held
from exact_answers import N_CLIENTS, N_TOKENS, PROMPTS, SETTINGS, Answers, answers_alone, is_right, write_model
from flatness import N_WINDOWS, Samples, Trend, rates, trend
from llama_server import LlamaServer
from waiting import until

SCHEMA = "moestream/soak/1"
DEMO = Path(__file__).resolve().parents[1] / "demo" / "moestream-demo-q4_0.gguf"

MEMORY_TOLERANCE_BYTES = 8 << 20
CPU_SPEED_TOLERANCE = 0.25
WALL_SPEED_TOLERANCE = 0.5

UNITS = {
    "memory": ("MiB", 2**20),
    "descriptors": ("", 1),
    "threads": ("", 1),
    "speed": ("tokens/s", 1),
    "speed per CPU second": ("tokens", 1),
}


@dataclass
class Seen:
    """What the clients saw; guarded by the lock."""

    actions: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0  # received
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, action: str, prompt: str, tokens: list[int], right: bool) -> None:
        with self.lock:
            self.actions[action] += 1
            self.n_tokens += len(tokens)
            if not right:
                self.problems.append(f"{action}: wrong tokens: {tokens} after '{prompt}'")

    def went_away(self, action: str) -> None:
        with self.lock:
            self.actions[action] += 1


def client(server: LlamaServer, alone: Answers, seen: Seen, seed: int, end: float) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end and not seen.problems:
        prompt = rng.choice(PROMPTS)
        n, cached = rng.randrange(8, N_TOKENS + 1), rng.random() < 0.3
        action = rng.choices(
            ["answer", "stream", "cancel", "reset", "reset unstreamed", "half a request", "no HTTP"], [6, 6, 6, 2, 2, 1, 1]
        )[0]
        try:
            match action:
                case "answer":
                    tokens = server.complete(prompt, n, cache_prompt=cached)
                    seen.answer(action, prompt, tokens, is_right(alone, prompt, tokens))
                case "stream":
                    tokens = clients.complete_streamed(server, prompt, n, cache_prompt=cached)
                    seen.answer(action, prompt, tokens, is_right(alone, prompt, tokens))
                case "cancel":
                    tokens = clients.cancel(server, prompt, 400, rng.randrange(1, N_TOKENS), cache_prompt=cached)
                    seen.answer(action, prompt, tokens, is_right(alone, prompt, tokens))
                case "reset" | "reset unstreamed":
                    clients.reset(server, prompt, 400, stream=action == "reset")
                    seen.went_away(action)
                case "half a request":
                    clients.half_request(server, prompt, rng)
                    seen.went_away(action)
                case "no HTTP":
                    clients.garbage(server, rng)
                    seen.went_away(action)
        except (AssertionError, OSError, httpx.HTTPError) as error:
            with seen.lock:
                seen.problems.append(f"{action}: {type(error).__name__}: {error}")


@dataclass
class Series:
    """Samples of the server, all taken at the same times."""

    memory_bytes: list[tuple[float, float]] = field(default_factory=list)
    descriptors: list[tuple[float, float]] = field(default_factory=list)
    threads: list[tuple[float, float]] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[tuple[float, float]] = field(default_factory=list)

    def add(self, t: float, pid: int, n_tokens: int) -> None:
        now = held(pid)
        cpu = psutil.Process(pid).cpu_times()
        self.memory_bytes.append((t, now.rss_bytes))
        self.descriptors.append((t, now.n_fds))
        self.threads.append((t, now.n_threads))
        self.cpu_s.append((t, cpu.user + cpu.system))
        self.tokens.append((t, n_tokens))


def at_rest(server: LlamaServer) -> Held:
    """What is held when the server has noticed that everybody is gone, has closed the connections, and ended the threads that it started
    for them (after 3 s)."""
    until(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()), "no request in flight", 60)
    seen = []
    for _ in range(60):
        time.sleep(0.1)
        seen.append(held(server.pid))
    return Held(seen[-1].rss_bytes, min(h.n_fds for h in seen), min(h.n_threads for h in seen))


def tokens_so_far(server: LlamaServer, seen: Seen) -> int:
    """Computed, prompts included; without streaming, received."""
    totals = server.stats().get("totals")
    return totals["tokens_decode"] + totals["tokens_prefill"] if totals else seen.n_tokens


@dataclass
class Report:
    seconds: float
    slots: str
    actions: dict[str, int]
    n_tokens_received: int
    n_tokens_computed: int
    before: Held
    after: Held
    trends: dict[str, Trend]
    totals: dict[str, int]
    problems: list[str]

    def text(self) -> str:
        def line(name: str, unit: str, scale: float) -> str:
            t = self.trends[name]
            return (
                f"  {name:<22}{t.first / scale:9.1f} ->{t.last / scale:9.1f} {unit:<14}"
                f"(windows {t.lowest / scale:.1f} to {t.highest / scale:.1f})"
            )

        t = self.totals
        streamed = (
            f"{100 * t['hits'] / (t['hits'] + t['misses']):.1f} % hits, {t['bytes_read'] / 2**30:.1f} GiB read, {t['read_errors']} read errors"
            if t
            else "without streaming"
        )
        return "\n".join([
            f"soak: {self.seconds:.0f} s, {N_CLIENTS} clients, {self.slots} slots",
            "  " + ", ".join(f"{n} {action}" for action, n in sorted(self.actions.items(), key=lambda a: -a[1])),
            f"  {self.n_tokens_received} tokens received and compared, {self.n_tokens_computed} computed",
            f"  {streamed}",
            "from the first third of the time to the last:",
            *(line(name, unit, scale) for name, (unit, scale) in UNITS.items() if name in self.trends),
            f"at rest: {self.before.n_fds} -> {self.after.n_fds} descriptors, {self.before.n_threads} -> {self.after.n_threads} threads,"
            f" {self.before.rss_bytes / 2**20:.1f} -> {self.after.rss_bytes / 2**20:.1f} MiB",
            *(f"PROBLEM: {problem}" for problem in self.problems),
            "flat, and no wrong token" if not self.problems else f"{len(self.problems)} problems",
        ])  # fmt: skip


def judge(trends: dict[str, Trend], before: Held, after: Held, *, judge_speed: bool) -> list[str]:
    """What is not flat."""
    problems = []
    for name, tolerance in (("memory", MEMORY_TOLERANCE_BYTES), ("descriptors", N_CLIENTS), ("threads", N_CLIENTS)):
        if trends[name].grew_by_more_than(tolerance):
            problems.append(f"{name} grew: {trends[name]}")
    if judge_speed:
        for name, share in (("speed", WALL_SPEED_TOLERANCE), ("speed per CPU second", CPU_SPEED_TOLERANCE)):
            if trends[name].fell_by_more_than(share):
                problems.append(f"{name} fell by more than {share:.0%}: {trends[name]}")
    if after.n_fds > before.n_fds or after.n_threads > before.n_threads:
        problems.append(f"at rest more is held than before: {before} -> {after}")
    return problems


def find_trends(series: Series, n_windows: int) -> dict[str, Trend]:
    values: dict[str, Samples] = {
        "memory": series.memory_bytes,
        "descriptors": series.descriptors,
        "threads": series.threads,
        "speed": rates(series.tokens),
        "speed per CPU second": rates(series.tokens, series.cpu_s),
    }
    return {name: trend(samples, n_windows) for name, samples in values.items()}


def run(
    folder: Path, seconds: float, *, slots: str = "6", io: str = "direct", seed: int = 1, judge_speed: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Report:  # fmt: skip
    """Logs go to the folder. Problems are in the report; none of it is raised but what makes a judgement impossible."""
    model = write_model(DEMO, folder / "soak.gguf")
    alone = answers_alone(model, folder / "stock.log")
    say(f"reference: {len(PROMPTS)} answers of {N_TOKENS} tokens")

    seen, warming, series = Seen(), Seen(), Series()
    streaming = () if slots == "off" else ("--moe-slots", slots, "--moe-io", io)
    with LlamaServer(model, folder / "soak.log", *SETTINGS, *streaming) as server:
        with ThreadPoolExecutor(N_CLIENTS) as pool:  # what only grows once has grown
            end = time.monotonic() + min(5.0, seconds / 4)
            list(pool.map(lambda i: client(server, alone, warming, 1000 + i, end), range(N_CLIENTS)))
        seen.problems += warming.problems
        before = at_rest(server)
        began, computed = time.monotonic(), tokens_so_far(server, seen)
        end = began + seconds
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            futures = [pool.submit(client, server, alone, seen, seed * 100 + i, end) for i in range(N_CLIENTS)]
            step = min(1.0, seconds / 60)
            next_said = began + 60
            while not all(future.done() for future in futures):
                time.sleep(step)
                now = time.monotonic()
                if now < end:
                    series.add(now - began, server.pid, tokens_so_far(server, seen))
                if now > next_said:
                    next_said += 60
                    say(f"{now - began:4.0f} s: {sum(seen.actions.values())} requests, {held(server.pid)}")
            for future in futures:
                future.result()
        after = at_rest(server)
        for prompt in PROMPTS:
            tokens = server.complete(prompt, N_TOKENS)
            seen.answer("answer afterwards", prompt, tokens, is_right(alone, prompt, tokens))
        totals = server.stats().get("totals", {})
        if totals.get("read_errors"):
            seen.problems.append(f"{totals['read_errors']} read errors")
        took = series.tokens[-1][0] if series.tokens else 0.0
    trends: dict[str, Trend] = {}
    try:
        trends = find_trends(series, N_WINDOWS if seconds >= 60 else 6)
        seen.problems += judge(trends, before, after, judge_speed=judge_speed)
    except ValueError as error:  # it ended early
        seen.problems.append(str(error))
    return Report(
        seconds=took, slots=slots, actions=dict(seen.actions), n_tokens_received=seen.n_tokens,
        n_tokens_computed=int(series.tokens[-1][1]) - computed, before=before, after=after, trends=trends, totals=totals,
        problems=seen.problems,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--slots", default="6", help="off: without streaming, which shows what is asked of stock")
    parser.add_argument("--io", choices=["auto", "direct", "buffered"], default="direct")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            Path(folder), options.seconds, slots=options.slots, io=options.io, seed=options.seed,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )  # fmt: skip
    print(report.text())
    if options.json:
        content: dict[str, Any] = {"schema": SCHEMA, **asdict(report)}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
