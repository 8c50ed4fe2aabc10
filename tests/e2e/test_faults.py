"""A model file that goes bad: under a running server, a request fails and the server lives; at start, a plain error."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import clients
import pytest
from clients import held
from fixture_models import expert_ranges, run, split, tool
from llama_server import LlamaServer, environment
from waiting import until

PROMPT = "The purpose of this manual is to describe"
OTHER = "Define harbor. A ship, 17 apples and the Latin word for"
# what a client is told: which read failed and why, but not where the file lies
CAUSE = r"Compute error: moestream: reading \d+ bytes at offset \d+ of 'demo-copy\.gguf' failed at offset \d+: [^/]*was the file truncated[^/]*"


@contextmanager
def truncated(path: Path, size: int) -> Iterator[None]:
    """The same file, shorter; afterwards its bytes are back in place."""
    with path.open("rb") as file:
        file.seek(size)
        tail = file.read()
    assert tail
    os.truncate(path, size)
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(size)
            file.write(tail)


@pytest.fixture(scope="module")
def stock_tokens(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with LlamaServer(demo, tmp_path_factory.mktemp("stock") / "log") as server:
        return server.complete(PROMPT, 40)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("where", ["before the first expert", "inside the last expert tensor"])
def test_a_file_truncated_under_the_server(
    demo_copy: Path, tmp_path: Path, stock_tokens: list[int], io: str, where: str
) -> None:
    ranges = sorted(expert_ranges(demo_copy))
    size = ranges[0][0] if where == "before the first expert" else sum(ranges[-1]) // 2
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "8", "--moe-io", io) as server:
        assert server.complete(PROMPT, 40) == stock_tokens
        assert server.stats()["totals"]["read_errors"] == 0

        with truncated(demo_copy, size):
            # other text, so that other experts are needed than those in the slots
            answer = server.post_completion(OTHER, 60)
            assert answer.status_code == 500
            assert re.fullmatch(CAUSE, answer.json()["error"]["message"])
            assert server.alive()
            errors = server.stats()["totals"]["read_errors"]
            assert errors > 0
            line = (
                rf"moestream: reading \d+ bytes at offset \d+ of '{demo_copy}' failed at offset \d+: .*was the file truncated"
            )
            until(lambda: re.search(line, server.text()), "the error in the log, which a thread writes")

            assert server.post_completion(PROMPT + " the", 60).status_code == 500
            assert server.stats()["totals"]["read_errors"] > errors

        assert server.complete(PROMPT, 40) == stock_tokens
        assert server.alive()


def first_expert(path: Path) -> int:
    """Shorter than this, and every read of an expert fails."""
    return min(first for first, _ in expert_ranges(path))


def test_every_client_in_flight_is_told_the_cause(demo_copy: Path, tmp_path: Path, stock_tokens: list[int]) -> None:
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "6", "-np", "4", "-kvu", "-ub", "1") as server:
        before = held(server.pid)
        streams = [clients.events(server, f"{OTHER} {i}", 1500) for i in range(3)]
        for stream in streams:
            assert "error" not in next(stream)
        with ThreadPoolExecutor(1) as pool:
            unstreamed = pool.submit(server.post_completion, PROMPT, 1500)
            until(lambda: sum(s["is_processing"] for s in server.http.get("/slots").json()) == 4, "four requests in flight")
            with truncated(demo_copy, first_expert(demo_copy)):
                for stream in streams:
                    *_, last = stream
                    assert re.fullmatch(CAUSE, last["error"]["message"])
                    assert last["error"]["code"] == 500
                answer = unstreamed.result()
                assert answer.status_code == 500
                assert re.fullmatch(CAUSE, answer.json()["error"]["message"])
        assert server.alive()
        # all four slots are free again, and right
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _: server.complete(PROMPT, 40), range(4))) == [stock_tokens] * 4
        until(lambda: held(server.pid).n_fds <= before.n_fds, "no descriptor more than before")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": OTHER}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Define harbor."}]}),
        ("/v1/responses", {"input": "Define harbor."}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Define harbor."}]}),
    ],
)
def test_every_api_names_the_cause(failing: LlamaServer, path: str, question: dict[str, Any], stream: bool) -> None:
    answer = failing.http.post(path, json={**question, "max_tokens": 40, "stream": stream})
    if stream:  # the answer has begun before the first token is computed; the error is its last event
        assert answer.status_code == 200
        last = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")][-1]
        assert re.fullmatch(CAUSE, last.get("error", last)["message"])
    else:
        assert answer.status_code == 500
        assert re.fullmatch(CAUSE, answer.json()["error"]["message"])


def test_an_embedding_names_the_cause(demo_copy: Path, tmp_path: Path) -> None:
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "6", "--embedding", "--pooling", "last") as server:
        assert server.http.post("/v1/embeddings", json={"input": PROMPT}).status_code == 200
        with truncated(demo_copy, first_expert(demo_copy)):
            answer = server.http.post("/v1/embeddings", json={"input": OTHER})
            assert answer.status_code == 500
            assert re.fullmatch(CAUSE, answer.json()["error"]["message"])


def test_an_error_that_is_none_of_a_read_does_not_name_an_old_one(failing: LlamaServer) -> None:
    assert failing.post_completion(PROMPT, 20).status_code == 500
    answer = failing.post_completion("word " * 4000, 20)
    assert answer.status_code == 400
    assert "moestream" not in answer.text


@pytest.fixture
def failing(demo_copy: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    """A server whose file has no experts any more."""
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "6") as server, truncated(demo_copy, first_expert(demo_copy)):
        yield server


def replace(path: Path) -> None:
    """As programs that save safely do: a new file, renamed over the old one."""
    new = path.with_suffix(".new")
    new.write_bytes(b"another file, shorter")
    new.rename(path)


def damage_the_name(path: Path) -> None:
    path.unlink()
    path.mkdir()
    path.rmdir()
    path.write_bytes(b"")


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("change", [replace, damage_the_name])
def test_the_open_file_is_served_while_its_name_means_another(
    demo_copy: Path, tmp_path: Path, change: Callable[[Path], None], io: str
) -> None:
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "6", "--moe-io", io) as server:
        whole = server.complete(OTHER, 80)
        stream = clients.events(server, OTHER, 80)
        tokens = next(stream)["tokens"]
        change(demo_copy)
        for event in stream:
            tokens += event["tokens"]
        assert tokens == whole
        assert server.complete(OTHER, 80) == whole
        assert server.stats()["totals"]["read_errors"] == 0


def start_fails(model: Path, *arguments: str, within_s: float = 5.0) -> str:
    """What llama-server prints when it must refuse to start; it is nearly the time of loading its libraries."""
    began = time.monotonic()
    done = run(
        tool("llama-server"), "-m", model, "--host", "127.0.0.1", "--port", "1", "--moe-slots", "8", *arguments,
        env=environment(), timeout_s=60, ok=False,
    )  # fmt: skip
    assert done.returncode > 0, f"ended with {done.returncode}: {done.stderr}"
    assert time.monotonic() - began < within_s
    return done.stdout + done.stderr


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_start_with_a_truncated_file(demo_copy: Path, io: str) -> None:
    os.truncate(demo_copy, sorted(expert_ranges(demo_copy))[-1][0] + 100)
    output = start_fails(demo_copy, "--moe-io", io)
    assert "data is not within the file bounds, model is corrupted or incomplete" in output
    assert str(demo_copy) in output


@pytest.mark.parametrize("missing", [1, 2])
def test_start_with_a_missing_shard(demo: Path, tmp_path: Path, missing: int) -> None:
    shards = split(demo, tmp_path / "demo")
    shards[missing].unlink()
    output = start_fails(shards[0])
    assert shards[missing].name in output


def test_start_with_a_truncated_shard(demo: Path, tmp_path: Path) -> None:
    shards = split(demo, tmp_path / "demo")
    os.truncate(shards[1], shards[1].stat().st_size // 2)
    assert "data is not within the file bounds" in start_fails(shards[0])


@pytest.mark.parametrize("content", [b"", b"This is no model.\n" * 100, b"GGUF"], ids=["empty", "text", "cut in the magic"])
def test_start_with_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert str(path) in start_fails(path)


def test_start_without_the_file(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing.gguf") in start_fails(tmp_path / "nothing.gguf")


def test_shards_may_be_served(demo: Path, tmp_path: Path, stock_tokens: list[int]) -> None:
    shards = split(demo, tmp_path / "demo")
    with LlamaServer(shards[0], tmp_path / "log", "--moe-slots", "8") as server:
        assert server.complete(PROMPT, 40) == stock_tokens


def test_removed_and_replaced_files_do_not_matter(demo_copy: Path, tmp_path: Path, stock_tokens: list[int]) -> None:
    with LlamaServer(demo_copy, tmp_path / "log", "--moe-slots", "6") as server:
        moved = demo_copy.with_suffix(".moved")
        demo_copy.rename(moved)
        demo_copy.write_bytes(b"another file")
        moved.unlink()
        assert server.complete(PROMPT, 40) == stock_tokens
        assert server.stats()["totals"]["read_errors"] == 0


def test_a_fixture_is_truncated_for_the_library_too(model: Callable[[str, str], Path], tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(model("qwen3moe", "q4_0").read_bytes()[:-200_000])
    done = run(tool("moe-identity"), "-m", short, env=environment(), ok=False)
    assert done.returncode == 2
    assert "cannot load" in done.stderr
