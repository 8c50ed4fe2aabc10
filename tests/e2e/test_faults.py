"""A model file that goes bad: under a running server, a request fails and the server lives; at start, a plain error."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixture_models import expert_ranges, run, split, tool
from llama_server import LlamaServer, environment

PROMPT = "The purpose of this manual is to describe"


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
            answer = server.post_completion("Define harbor. A ship, 17 apples and the Latin word for", 60)
            assert answer.status_code == 500
            assert "error" in answer.json()
            assert server.alive()
            errors = server.stats()["totals"]["read_errors"]
            assert errors > 0
            assert re.search(
                rf"moestream: reading \d+ bytes at offset \d+ of '{demo_copy}' failed at offset \d+: .*was the file truncated",
                server.text(),
            )

            assert server.post_completion(PROMPT + " the", 60).status_code == 500
            assert server.stats()["totals"]["read_errors"] > errors

        assert server.complete(PROMPT, 40) == stock_tokens
        assert server.alive()


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
