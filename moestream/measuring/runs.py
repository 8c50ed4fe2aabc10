"""Measuring sides in turn, each answer in full view: real servers, streamed answers, outputs compared before any speed counts.

A round starts a fresh server for each side. A cold run empties the model's page cache first and measures the server's first answer; a warm
one measures its second, to the same prompt, when slots and page cache hold what they can. Every second round goes through the sides backwards, so that what
drifts does not favour one of them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestream.errors import MoestreamError
from moestream.measuring import figures, machine
from moestream.measuring.answers import Answer, Asker, Difference, NoAnswer, first_difference
from moestream.measuring.figures import Run
from moestream.measuring.prompt import TEXT
from moestream.server.client import ServerClient
from moestream.server.process import Cause, State
from moestream.server.progress import progress
from moestream.server.supervise import ServerPlan, Supervisor, end_error

CHECK_TOKENS = 16  # of the answers that are compared before anything is measured
DEATH_S = 3.0  # after a lost connection: how long the process may take to be gone


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        plan: makes the plan of a fresh server.
        streams: whether it has statistics of experts.
    """

    name: str
    plan: Callable[[], ServerPlan]
    streams: bool


@dataclass(frozen=True)
class Failure:
    """Why a side has no speed, or no more runs.

    Attributes:
        kind: ``killed`` (by SIGKILL, as the kernel does for want of memory), ``not loaded``, ``died``, ``timeout``, ``no answer``.
        message, hint: as of the error.
    """

    side: str
    kind: str
    message: str
    hint: str | None = None


class OutputsDiffer(Exception):
    """Two answers to the same question are not the same. No speed means anything then.

    Args:
        first, second: who answered.
    """

    def __init__(self, first: str, second: str, difference: Difference) -> None:
        super().__init__(f"{first} and {second} differ at {difference}")
        self.first = first
        self.second = second
        self.difference = difference


class Stopped(Exception):
    """A signal asked for the end."""


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class Outcome:
    """What there is so far.

    Attributes:
        sha256: of the whole output; None before the first measured answer.
        n_answers: that were compared and were the same.
        planned_runs: what was asked for.
        engine_facts: of each side, what its server said is in force.
    """

    planned_runs: int = 0
    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seen: machine.Seen = field(default_factory=machine.Seen)
    sha256: str | None = None
    n_answers: int = 0
    prompt_tokens: int = 0
    engine_facts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Mark:
    """Counters at one moment."""

    at_s: float  # time.monotonic()
    totals: dict[str, int]
    disk_bytes: int | None


class Bench:
    """Measures.

    Args:
        sides: what to compare.
        files: the model's, to empty their page cache.
        caches: ``cold``, ``warm`` or both, in this order.
        n_rounds: runs of each side and cache.
        n_tokens, n_prompt: length of the answer and of the prompt.
        timeout_s: for each answer.
    """

    def __init__(
        self, sides: Sequence[Side], files: Sequence[Path], *, caches: Sequence[str], n_rounds: int, n_tokens: int, n_prompt: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.sides = list(sides)
        self.files = list(files)
        self.caches = tuple(caches)
        self.n_rounds = n_rounds
        self.n_tokens = n_tokens
        self.n_prompt = n_prompt
        self.timeout_s = timeout_s
        self.outcome = Outcome(planned_runs=len(sides) * len(caches) * n_rounds)
        self._prompt: list[int] = []
        self._reference: tuple[str, Answer] | None = None  # of all measured answers
        self._checked: tuple[str, Answer] | None = None  # of the short ones
        self._supervisor: Supervisor | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ask for the end. Safe in a signal handler: the server is killed, which ends what waits for it."""
        self._stopped = True
        if self._supervisor is not None:
            self._supervisor.process.request_kill()

    def run(self) -> Outcome:
        """Compare all sides' outputs, then measure.

        Raises:
            OutputsDiffer: nothing counts.
            Stopped: what there is by then is in ``outcome``.
            MoestreamError: what is no matter of a side: the port, the state folder, a page cache that cannot be emptied.
        """
        for side in self.sides:
            with self._a_failure_ends(side):
                self._check(side)
        for number in range(self.n_rounds):
            for side in self.sides[:: -1 if number % 2 else 1]:
                if all(failure.side != side.name for failure in self.outcome.failures):
                    with self._a_failure_ends(side):
                        self._measure(side, number)
        return self.outcome

    @contextlib.contextmanager
    def _a_failure_ends(self, side: Side) -> Generator[None, None, None]:
        """A side that fails is out; the others go on."""
        try:
            yield
        except _Failed as error:
            if self._stopped:
                raise Stopped from None
            self.outcome.failures.append(error.failure)
        if self._stopped:
            raise Stopped

    def _check(self, side: Side) -> None:
        n_tokens = min(CHECK_TOKENS, self.n_tokens)
        with self._server(side, f"{side.name}, comparing outputs") as server:
            if not self._prompt:
                self._prompt = server.prompt(self.n_prompt)
                self.outcome.prompt_tokens = len(self._prompt)
            answer = server.ask(self._prompt, n_tokens)
        who = f"{side.name}, first answer"
        self._checked = self._checked or (who, answer)
        self._compare(self._checked, (who, answer))

    def _measure(self, side: Side, number: int) -> None:
        head = f"{side.name}, round {number + 1} of {self.n_rounds}"
        cold = "cold" in self.caches
        with self._server(side, head, cold=cold) as server:
            for cache in ("cold", "warm") if "warm" in self.caches else ("cold",):
                answer, run = server.measure(self._prompt, self.n_tokens, cache, number)
                who = f"{side.name}, {cache}, round {number + 1}"
                if self._checked is not None:
                    self._compare(self._checked, (who, answer), min(CHECK_TOKENS, self.n_tokens))
                self._reference = self._reference or (who, answer)
                self._compare(self._reference, (who, answer))
                if cache in self.caches:
                    self.outcome.sha256 = answer.sha256
                    self.outcome.runs.append(run)
                    if run.others_cpu_share is not None:
                        self.outcome.seen.others.append(run.others_cpu_share)
                if self._stopped:
                    raise Stopped

    def _compare(self, first: tuple[str, Answer], second: tuple[str, Answer], n_tokens: int | None = None) -> None:
        difference = first_difference(first[1], second[1], n_tokens)
        if difference is not None:
            raise OutputsDiffer(first[0], second[0], difference)
        if n_tokens is None:
            self.outcome.n_answers += 1

    @contextlib.contextmanager
    def _server(self, side: Side, what: str, cold: bool = False) -> Generator[_Server, None, None]:
        """A fresh server of a side, ready; gone at the end of the block, however it ends."""
        if self._stopped:
            raise Stopped
        plan = side.plan()
        share = None
        if cold:
            machine.drop_cache(self.files)
        if self.caches:
            share = machine.cached_share(self.files)
        if cold and share is not None and share > machine.COLD_SHARE:
            self.outcome.seen.warm_starts.append(share)
        vram = machine.vram_used_bytes()
        supervisor = self._supervisor = Supervisor(plan)
        watch: machine.Watch | None = None
        went_well = False
        try:
            begun = time.monotonic()
            supervisor.start()
            with progress(what, Path(plan.log_path)) as show:
                while not (now := supervisor.process.wait(lambda s: s.settled, 0.05)).settled:
                    if watch is None and now.pid is not None:
                        machine.first_to_go(now.pid)
                        watch = machine.Watch(now.pid, vram)
                    if self._stopped:
                        supervisor.process.request_kill()
                    show()
            if now.exit is not None or now.pid is None:
                raise _Failed(_end_of(side, supervisor, begun, was_ready=False))
            load_s = time.monotonic() - begun
            watch = watch or machine.Watch(now.pid, vram)
            with Asker(plan.url, api_key=plan.api_key, timeout_s=self.timeout_s) as asker, plan.client() as client:
                server = _Server(side, plan, supervisor, watch, asker, client, load_s, share, begun)
                self.outcome.engine_facts.setdefault(side.name, server.facts())
                yield server
            went_well = True
        finally:
            if watch is not None:
                watch.close()
            supervisor.process.request_stop()
            if self._stopped:
                supervisor.process.request_kill()
            supervisor.stop()
            self._supervisor = None
            if went_well:  # nobody looks at its log, which would take the place of another server's
                Path(plan.log_path).unlink(missing_ok=True)


class _Server:
    """A ready server of a side."""

    def __init__(
        self, side: Side, plan: ServerPlan, supervisor: Supervisor, watch: machine.Watch, asker: Asker, client: ServerClient,
        load_s: float, cached_share: float | None, begun: float,
    ) -> None:  # fmt: skip
        self.side = side
        self.plan = plan
        self._supervisor = supervisor
        self._watch = watch
        self._asker = asker
        self._client = client  # made beforehand: making one takes as long as many tokens
        self._load_s = load_s
        self._cached_share = cached_share
        self._begun = begun

    def facts(self) -> dict[str, Any]:
        """What is in force, as the server says."""
        raw = self._client.stats().raw or {}
        names = (
            "streaming",
            "slots",
            "policy",
            "io",
            "overlap",
            "staging",
            "placement",
            "kernels",
            "memory",
            "prefetch",
            "ram_requested",
        )
        return {"argv": _without_key(self.plan.argv), **{name: raw[name] for name in names if name in raw}}

    def prompt(self, n_tokens: int) -> list[int]:
        """So many tokens of a text, again from the start where it is too short."""
        with self._or_failure():
            tokens = self._asker.tokens_of(TEXT)
        if not tokens:
            raise _Failed(Failure(self.side.name, "no answer", "the server made no tokens of a text"))
        return (tokens * (n_tokens // len(tokens) + 1))[:n_tokens]

    def ask(self, prompt: Sequence[int], n_tokens: int, on_first: Callable[[], None] = lambda: None) -> Answer:
        with self._or_failure():
            return self._asker.complete(prompt, n_tokens, on_first)

    @contextlib.contextmanager
    def _or_failure(self) -> Generator[None, None, None]:
        try:
            yield
        except NoAnswer as error:
            if not error.late:
                gone = self._supervisor.process.wait(lambda s: s.state is State.EXITED, DEATH_S)
                if gone.exit is not None:  # how it ended says more than the lost connection
                    raise _Failed(_end_of(self.side, self._supervisor, self._begun, was_ready=True)) from error
            kind = "timeout" if error.late else "no answer"
            raise _Failed(
                Failure(self.side.name, kind, error.message, error.hint or f"the server's log: {self.plan.log_path}")
            ) from error

    def measure(self, prompt: Sequence[int], n_tokens: int, cache: str, number: int) -> tuple[Answer, Run]:
        """One answer, and all that is known of it."""
        at_first: list[_Mark] = []
        look = threading.Thread(target=lambda: at_first.append(self._mark()), daemon=True)
        before, cpu_before = self._mark(), machine.Cpu.now(self._watch.pid)
        begun = time.monotonic()
        answer = self.ask(prompt, n_tokens, look.start)  # the look at the counters goes on beside the stream
        cpu_after = machine.Cpu.now(self._watch.pid)
        look.join()
        end, first = self._mark(), at_first[0]
        self._watch.look()
        times = figures.token_times(answer.arrivals)
        took_s = sum(times)
        n_decoded = len(times)
        run = Run(
            self.side.name, cache, number, load_s=self._load_s, ttft_s=answer.at_s[0], token_s=times,
            peak_rss_bytes=self._watch.peak_rss_bytes, peak_anon_bytes=self._watch.peak_anon_bytes,
            peak_vram_bytes=self._watch.peak_vram_bytes, cached_share=self._cached_share, output_sha256=answer.sha256,
            others_cpu_share=cpu_after.others_since(cpu_before) if cpu_before and cpu_after else None,
        )  # fmt: skip
        prompt_ms, prompt_n = answer.timings.get("prompt_ms"), answer.timings.get("prompt_n")
        if prompt_ms and prompt_n:
            run.prompt_tok_per_s = prompt_n / (prompt_ms / 1e3)
        if n_decoded and took_s > 0:
            run.decode_tok_per_s = n_decoded / took_s
            run.token_p50_s, run.token_p95_s = figures.percentile(times, 0.5), figures.percentile(times, 0.95)
        _count(run, answer, begun, before, first, end)
        return answer, run

    def _mark(self) -> _Mark:
        totals: dict[str, int] = {}
        if self.side.streams:
            stats = self._client.stats()
            if not stats.available:  # an idle connection that the server has closed at this moment
                stats = self._client.stats()
            found = (stats.raw or {}).get("totals") or {}
            totals = {name: int(value) for name, value in found.items() if isinstance(value, int | float)}
        return _Mark(time.monotonic(), totals, machine.disk_read_bytes(self._watch.pid))


def _count(run: Run, answer: Answer, begun: float, before: _Mark, first: _Mark, end: _Mark) -> None:
    """Fill in what follows from counters at the request, at about the first token, and at the end.

    What was counted from the first token on is divided by the tokens of the same time. A server that was through with most of them
    before the counters could be read leaves those figures unknown.
    """
    n_decoded = len(run.token_s)
    n_left = sum(
        n > 1 and begun + at > first.at_s for n, at in zip((p.n_tokens for p in answer.parts), answer.at_s, strict=True)
    )
    if before.totals and first.totals and end.totals:
        prompt_part = {name: first.totals[name] - count for name, count in before.totals.items() if name in first.totals}
        part = {name: end.totals[name] - count for name, count in first.totals.items() if name in end.totals}
        n_left = part.get("tokens_decode", n_left)  # exact: of the same moment as the others
    known = n_decoded > 0 and 2 * n_left > n_decoded
    if before.disk_bytes is not None and first.disk_bytes is not None and end.disk_bytes is not None and known:
        run.prompt_disk_bytes = first.disk_bytes - before.disk_bytes
        run.decode_disk_bytes_per_token = (end.disk_bytes - first.disk_bytes) / n_left
    if before.totals and first.totals and end.totals and known:
        accesses = part.get("hits", 0) + part.get("misses", 0)
        run.hit_rate = part["hits"] / accesses if accesses else None
        run.prompt_expert_bytes = prompt_part.get("bytes_read")
        run.decode_expert_bytes_per_token = part.get("bytes_read", 0) / n_left
        run.prompt_stall_s = prompt_part.get("stall_us", 0) / 1e6
        run.decode_stall_share = part.get("stall_us", 0) / 1e6 / n_left / (sum(run.token_s) / n_decoded)


def _end_of(side: Side, supervisor: Supervisor, begun: float, *, was_ready: bool) -> Failure:
    """What a server that has ended died of."""
    end = supervisor.process.snapshot.exit
    assert end is not None
    error: MoestreamError = end_error(supervisor.plan, end, was_ready=was_ready, after_s=time.monotonic() - begun)
    if end.signal == signal.SIGKILL and end.cause is Cause.DIED:
        kind = "killed"
    elif end.cause is Cause.NOT_READY:
        kind = "timeout"
    else:
        kind = "died" if was_ready else "not loaded"
    return Failure(side.name, kind, error.message, error.hint)


def _without_key(argv: Sequence[str]) -> list[str]:
    return ["…" if i and argv[i - 1] == "--api-key" else a for i, a in enumerate(argv)]
