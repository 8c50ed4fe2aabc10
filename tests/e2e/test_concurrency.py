"""A llama-server with scarce slots among many clients, some of which go away at any time: every answer is right, nothing is left behind.

What is asked of a server that streams is asked of the same server without streaming as well, which shows that the question is fair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clients
import greedy
import pytest
from clients import Held, held
from greedy import Reference
from llama_server import LlamaServer
from waiting import until

PROMPTS = (
    "The purpose of this manual is to describe",
    "Define harbor. A harbor is",
    "Once upon a time there was a",
    "In the year 1815 the",
)
N_TOKENS = 40

# Stock's bits change with the width of a batch, and who is computed with whom is up to time. With one token in each graph, and one KV
# cache for all that is filled from empty, they do not: any difference is an error.
NARROW = ("-np", "4", "-kvu", "-ub", "1")
# The usual widths, where rounding decides near ties (greedy.py). At 6 slots several sequences together, and prompts, go through staging.
WIDE = ("-np", "4", "-kvu")

SERVERS = {
    "stock": (),
    "6 slots, direct": ("--moe-slots", "6", "--moe-io", "direct"),
    "9 slots, buffered, lfu": ("--moe-slots", "9", "--moe-io", "buffered", "--moe-policy", "lfu"),
}
POISON = {"MOESTREAM_POISON": "1"}  # an expert that lost its slot too early would give nonsense

any_server = pytest.mark.parametrize("streaming", SERVERS.values(), ids=SERVERS.keys())


@pytest.fixture(scope="module")
def alone(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The answers without streaming, one after the other."""
    with LlamaServer(demo, tmp_path_factory.mktemp("alone") / "log", *NARROW) as server:
        return {prompt: server.complete(prompt, N_TOKENS) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def references(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """The answers without streaming, one after the other, prompts in wide batches."""
    with LlamaServer(demo, tmp_path_factory.mktemp("references") / "log") as server:
        return {prompt: greedy.record(server, prompt, N_TOKENS) for prompt in PROMPTS}


def together(*tasks: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(task) for task in tasks]]


def requests_in_flight(server: LlamaServer) -> int:
    return sum(slot["is_processing"] for slot in server.http.get("/slots").json())


def settled(server: LlamaServer) -> Held:
    """What the server holds when it has noticed that everybody is gone."""
    until(lambda: requests_in_flight(server) == 0, "no request in flight")
    return held(server.pid)


def back_to(server: LlamaServer, before: Held, rss_bytes: int = 24 << 20) -> None:
    """Threads and descriptors are those of ``before``, and memory has not grown by more than this."""
    n_fds, n_threads = before.n_fds, before.n_threads
    until(lambda: settled(server).n_fds <= n_fds and settled(server).n_threads <= n_threads, f"{held(server.pid)} as {before}")
    assert settled(server).rss_bytes - before.rss_bytes < rss_bytes


@any_server
def test_each_client_gets_the_answer_it_gets_alone(
    demo: Path, tmp_path: Path, alone: dict[str, list[int]], streaming: tuple[str, ...]
) -> None:
    with LlamaServer(demo, tmp_path / "log", *NARROW, "--slot-save-path", str(tmp_path), *streaming, env=POISON) as server:
        for n_streamed in (0, 2, 4):
            asks = [clients.complete_streamed] * n_streamed + [LlamaServer.complete] * (4 - n_streamed)
            answers = together(*(lambda a=ask, p=p: a(server, p, N_TOKENS) for ask, p in zip(asks, PROMPTS, strict=True)))
            assert answers == list(alone.values())
            for slot in range(4):  # cells of the KV cache are then given out in order again
                assert server.http.post(f"/slots/{slot}?action=erase").status_code == 200
        if streaming:
            totals = server.stats()["totals"]
            assert totals["read_errors"] == 0
            assert totals["evictions"] > 0


@any_server
def test_clients_that_go_away_leave_nothing_behind(
    demo: Path, tmp_path: Path, references: dict[str, Reference], streaming: tuple[str, ...]
) -> None:
    def judge(prompt: str, tokens: list[int]) -> None:
        difference = references[prompt].difference(tokens)
        assert not difference or not difference.is_wrong, f"{difference}: {tokens} after '{prompt}'"

    def well_behaved(rng: random.Random) -> None:
        prompt, n, cache = rng.choice(PROMPTS), rng.randrange(5, N_TOKENS), rng.random() < 0.5
        ask = rng.choice([LlamaServer.complete, clients.complete_streamed])
        judge(prompt, ask(server, prompt, n, cache_prompt=cache))

    def badly_behaved(rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        match rng.randrange(5):
            case 0:
                judge(prompt, clients.cancel(server, prompt, 150, rng.randrange(1, 10)))
            case 1:
                clients.reset(server, prompt, 150, stream=True)
            case 2:
                clients.reset(server, prompt, 150, stream=False)
            case 3:
                clients.half_request(server, prompt, rng)
            case 4:
                clients.garbage(server, rng)

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(6):
            rng.choice([well_behaved, badly_behaved])(rng)

    def storm(seed: int) -> None:
        together(*(lambda s=seed + i: client(s) for i in range(6)))

    options = (*WIDE, "--cache-ram", "64")
    with LlamaServer(demo, tmp_path / "log", *options, *streaming, env=POISON) as server:
        storm(100)  # threads and buffers that stay are there afterwards
        before = settled(server)
        storm(200)
        back_to(server, before)
        together(*(lambda p=p: judge(p, server.complete(p, N_TOKENS)) for p in PROMPTS))
        assert server.complete(PROMPTS[0], N_TOKENS) == references[PROMPTS[0]].tokens
        if streaming:
            totals = server.stats()["totals"]
            assert totals["read_errors"] == 0
            assert totals["tokens_prefill"] > 0


@any_server
def test_wide_batches_answer_as_alone_but_for_rounding(demo: Path, tmp_path: Path, streaming: tuple[str, ...]) -> None:
    with LlamaServer(demo, tmp_path / "log", *WIDE, *streaming, env=POISON) as server:
        asks = [clients.complete_streamed, LlamaServer.complete] * 2
        # the fifth goes away while the others are computed
        *answers, _ = together(
            *(lambda a=ask, p=p: a(server, p, N_TOKENS) for ask, p in zip(asks, PROMPTS, strict=True)),
            lambda: clients.cancel(server, "It was a dark night", 200, 5),
        )
        if streaming:
            assert server.stats()["totals"]["tokens_prefill"] > 0
    with LlamaServer(demo, tmp_path / "log-alone") as plain:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert greedy.most_behind(plain, prompt, answer) < greedy.NEAR_TIE


@pytest.mark.parametrize("slots", ["6", "all"])
def test_a_saved_slot_is_restored_with_and_without_streaming(demo: Path, tmp_path: Path, slots: str) -> None:
    """State of a conversation is the same bytes whoever computed it, and goes on the same."""
    prompt, more = PROMPTS[0], " and the files of the system"
    options = ("-np", "2", "-kvu", "-ub", "1", "--slot-save-path", str(tmp_path))

    def save(server: LlamaServer, name: str) -> list[int]:
        tokens = server.complete(prompt, 20, cache_prompt=True, id_slot=0)
        assert server.http.post("/slots/0?action=save", json={"filename": name}).json()["n_saved"] > 20
        return tokens

    def go_on(server: LlamaServer, name: str) -> list[int]:
        restored = server.http.post("/slots/1?action=restore", json={"filename": name})
        assert restored.status_code == 200, restored.text
        answer = server.post_completion(prompt + more, 20, cache_prompt=True, id_slot=1).json()
        assert answer["timings"]["cache_n"] > 0
        return answer["tokens"]

    with LlamaServer(demo, tmp_path / "log", *options) as stock:
        said = save(stock, "stock.bin")
        went_on = go_on(stock, "stock.bin")
    with LlamaServer(demo, tmp_path / "log", *options, "--moe-slots", slots) as server:
        assert save(server, "streamed.bin") == said
        assert (tmp_path / "streamed.bin").read_bytes() == (tmp_path / "stock.bin").read_bytes()
        assert go_on(server, "stock.bin") == went_on
        assert go_on(server, "streamed.bin") == went_on
    with LlamaServer(demo, tmp_path / "log", *options) as stock:
        assert go_on(stock, "streamed.bin") == went_on


def test_a_context_that_is_shifted(demo: Path, tmp_path: Path) -> None:
    """More tokens than the context holds; the batches are the same, so are all bits."""
    options = ("-c", "256", "--context-shift")
    answers = []
    for streaming in SERVERS.values():
        with LlamaServer(demo, tmp_path / "log", *options, *streaming) as server:
            answer = server.post_completion(PROMPTS[2], 400).json()
            assert answer["truncated"]
            answers.append(answer["tokens"])
    assert len(answers[0]) == 400
    assert answers[1:] == answers[:1] * (len(SERVERS) - 1)


# ---- sleep: upstream frees the model after some idle seconds and loads it again at the next request


def is_sleeping(server: LlamaServer) -> bool:
    return server.http.get("/props").json()["is_sleeping"]


@pytest.fixture(params=["8", "auto"])
def sleepy(request: pytest.FixtureRequest, demo: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    options = (
        *NARROW,
        "--sleep-idle-seconds",
        "1",
        "--moe-slots",
        request.param,
        "--moe-io",
        "direct",
        "--moe-io-threads",
        "3",
    )
    with LlamaServer(demo, tmp_path / "log", *options) as server:
        yield server


def in_force(server: LlamaServer) -> dict[str, Any]:
    stats = server.stats()
    return {key: value for key, value in stats.items() if key not in ("totals", "layers")}


def test_sleep_frees_the_experts_and_waking_streams_them_again(sleepy: LlamaServer, alone: dict[str, list[int]]) -> None:
    server, prompt = sleepy, PROMPTS[0]
    assert server.complete(prompt, N_TOKENS) == alone[prompt]
    before = in_force(server)
    assert before["streaming"]
    first: Held | None = None
    for _ in range(3):
        metrics, awake = server.metrics(), held(server.pid)
        assert clients.open_model_files(server.pid, server.model) > 0
        until(lambda: is_sleeping(server), "asleep")
        asleep = held(server.pid)
        first = first or asleep
        assert asleep.n_threads == first.n_threads
        until(lambda n=first.n_fds: held(server.pid).n_fds <= n, "no descriptor more than in the first sleep")
        assert clients.open_model_files(server.pid, server.model) == 0
        assert awake.rss_bytes - asleep.rss_bytes > 0.9 * before["memory"]["pool_bytes"]
        assert server.stats() == {"schema": "moestream/stats/1", "streaming": False}
        # scraping wakes nobody up, and counters do not vanish meanwhile
        assert server.metrics() == metrics
        assert is_sleeping(server)

        assert together(*(lambda p=p: server.complete(p, N_TOKENS) for p in PROMPTS)) == list(alone.values())
        assert in_force(server) == before
        assert server.stats()["totals"]["read_errors"] == 0
