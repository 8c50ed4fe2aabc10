"""A llama-server with scarce slots among many clients, some of which go away at any time: every answer is right, nothing is left behind.

What is asked of a server that streams is asked of the same server without streaming as well, which shows that the question is fair;
exact_answers.py says why it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import clients
import exact_answers
import pytest
from clients import Held, held
from exact_answers import N_TOKENS, PROMPTS, SETTINGS, Answers, is_right
from llama_server import LlamaServer
from waiting import until

SERVERS = {
    "stock": (),
    "6 slots, direct": ("--moe-slots", "6", "--moe-io", "direct"),
    "9 slots, buffered, lfu": ("--moe-slots", "9", "--moe-io", "buffered", "--moe-policy", "lfu"),
}
# An expert that lost its slot too early would give nonsense, and a slot whose bytes change is an error.
CHECKED = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}

any_server = pytest.mark.parametrize("streaming", SERVERS.values(), ids=SERVERS.keys())


@pytest.fixture(scope="module")
def exact_model(demo: Path, disk_folder: Path) -> Path:
    return exact_answers.write_model(demo, disk_folder / "exact.gguf")


@pytest.fixture(scope="module")
def alone(exact_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers without streaming to one client."""
    return exact_answers.answers_alone(exact_model, tmp_path_factory.mktemp("alone") / "log")


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
    exact_model: Path, tmp_path: Path, alone: Answers, streaming: tuple[str, ...]
) -> None:
    with LlamaServer(exact_model, tmp_path / "log", *SETTINGS, *streaming, env=CHECKED) as server:
        for n_streamed in (0, 2, 4):
            asks = [clients.complete_streamed] * n_streamed + [LlamaServer.complete] * (4 - n_streamed)
            prompts = PROMPTS[n_streamed : n_streamed + 4]
            answers = together(*(lambda a=ask, p=p: a(server, p, N_TOKENS) for ask, p in zip(asks, prompts, strict=True)))
            assert answers == [alone[prompt] for prompt in prompts]
        if streaming:
            totals = server.stats()["totals"]
            assert totals["read_errors"] == 0
            assert totals["evictions"] > 0
            # decode of several sequences together does not fit 6 slots
            assert totals["tokens_prefill"] > sum(len(p.split()) for p in PROMPTS)


@any_server
def test_clients_that_go_away_leave_nothing_behind(
    exact_model: Path, tmp_path: Path, alone: Answers, streaming: tuple[str, ...]
) -> None:
    def well_behaved(rng: random.Random) -> None:
        prompt, n, cache = rng.choice(PROMPTS), rng.randrange(5, N_TOKENS), rng.random() < 0.5
        ask = rng.choice([LlamaServer.complete, clients.complete_streamed])
        assert is_right(alone, prompt, ask(server, prompt, n, cache_prompt=cache))

    def badly_behaved(rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        match rng.randrange(5):
            case 0:
                assert is_right(alone, prompt, clients.cancel(server, prompt, 150, rng.randrange(1, 10)))
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

    with LlamaServer(exact_model, tmp_path / "log", *SETTINGS, *streaming, env=CHECKED) as server:
        storm(100)  # threads and buffers that stay are there afterwards
        before = settled(server)
        storm(200)
        back_to(server, before)
        four = PROMPTS[:4]
        assert together(*(lambda p=p: server.complete(p, N_TOKENS) for p in four)) == [alone[p] for p in four]
        if streaming:
            assert server.stats()["totals"]["read_errors"] == 0


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
def sleepy(request: pytest.FixtureRequest, exact_model: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    streaming = ("--moe-slots", request.param, "--moe-io", "direct", "--moe-io-threads", "3")
    with LlamaServer(exact_model, tmp_path / "log", *SETTINGS, *streaming, "--sleep-idle-seconds", "1") as server:
        yield server


def in_force(server: LlamaServer) -> dict[str, Any]:
    stats = server.stats()
    stats["prefetch"].pop("on")  # changes while it measures
    return {key: value for key, value in stats.items() if key not in ("totals", "layers")}


def test_sleep_frees_the_experts_and_waking_streams_them_again(sleepy: LlamaServer, alone: Answers) -> None:
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

        assert together(*(lambda p=p: server.complete(p, N_TOKENS) for p in PROMPTS[:4])) == [alone[p] for p in PROMPTS[:4]]
        assert in_force(server) == before
        assert server.stats()["totals"]["read_errors"] == 0
