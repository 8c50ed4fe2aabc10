"""What cannot be honoured is refused at start, in plain words; docs/refusals.md lists it all."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fixture_models import run, tool
from llama_server import LlamaServer, environment

DOC = Path(__file__).resolve().parents[2] / "docs" / "refusals.md"

COMBINATIONS = {
    "too few slots": (["--moe-slots", "5"], "--moe-slots 5 is too few: a token of this model uses 6 experts a layer; hint: --moe-slots 6 or more"),
    "cpu-moe": (["--moe-slots", "8", "--cpu-moe"], "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "n-cpu-moe": (["--moe-slots", "8", "--n-cpu-moe", "1"], "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "override-tensor": (["--moe-slots", "all", "--override-tensor", "blk.7.ffn_down_exps=CPU"], "'blk.7.ffn_down_exps' matches 'blk.7.ffn_down_exps.weight'; hint: leave out one of them"),
    "mlock": (["--moe-slots", "8", "--load-mode", "mlock"], "--moe-slots cannot be combined with --load-mode mlock; hint: use --load-mode none, mmap or dio"),
    "mmap+mlock": (["--moe-slots", "auto", "--load-mode", "mmap+mlock"], "--moe-slots cannot be combined with --load-mode mmap+mlock"),
    "split-mode row": (["--moe-slots", "8", "--split-mode", "row"], "--moe-slots cannot be combined with --split-mode row; hint: use --split-mode layer or none"),
    "io without slots": (["--moe-io", "direct"], "--moe-io does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-io"),
    "threads without slots": (["--moe-io-threads", "2"], "--moe-io-threads does nothing without --moe-slots"),
    "policy without slots": (["--moe-policy", "lfu"], "--moe-policy does nothing without --moe-slots"),
    "overlap without slots": (["--moe-overlap", "off"], "--moe-overlap does nothing without --moe-slots"),
    "check-tensors": (["--moe-slots", "8", "--check-tensors"], "--moe-slots cannot be combined with --check-tensors, which would read all experts"),
}  # fmt: skip

VALUES = {
    "--moe-slots": (["0", "-1", "-2", "6.5", "8x", "many", "", "99999999999999999999"], "expected a number of slots from 1, 'all' or 'auto'"),
    "--moe-io-threads": (["0", "-4", "257", "two", "4 "], "expected a number from 1 to 256"),
    "--moe-io": (["mmap", "Direct", ""], "expected 'auto', 'direct' or 'buffered'"),
    "--moe-policy": (["mru", "LRU", ""], "expected 'lru' or 'lfu'"),
    "--moe-overlap": (["yes", "1", ""], "expected 'on' or 'off'"),
}  # fmt: skip


def refused(program: str, *arguments: str | Path, env: dict[str, str] | None = None, within_s: float = 5.0) -> str:
    """The output of a program that must end by itself, with exit code 1, at once."""
    began = time.monotonic()
    done = run(tool(program), *arguments, env=environment(env), timeout_s=60, ok=False)
    assert done.returncode == 1, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert time.monotonic() - began < within_s
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(demo: Path, name: str) -> None:
    arguments, message = COMBINATIONS[name]
    assert message in refused("llama-server", "-m", demo, "--port", "1", *arguments)


@pytest.mark.parametrize("program", ["llama-server", "llama-completion", "llama-perplexity", "llama-bench"])
def test_every_program_refuses(demo: Path, program: str) -> None:
    assert "is too few" in refused(program, "-m", demo, "--moe-slots", "5")


def test_dense_models(disk_folder: Path) -> None:
    run(tool("test-llama-archs"), "-o", disk_folder, "-a", "qwen3", "-s", "1")
    output = refused("llama-server", "-m", disk_folder / "qwen3-dense.gguf", "--port", "1", "--moe-slots", "8")
    assert "--moe-slots: this is not a mixture-of-experts model (architecture 'qwen3' has no expert tensors here)" in output
    assert "hint: leave out --moe-slots" in output


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, (values, _) in VALUES.items() for value in values])
def test_values(demo: Path, flag: str, value: str) -> None:
    message = f"{flag} '{value}': {VALUES[flag][1]}"
    assert message in refused("llama-server", "-m", demo, "--port", "1", flag, value)
    name = "LLAMA_ARG_" + flag[2:].upper().replace("-", "_")
    if value:  # an empty variable counts as not set
        assert message in refused("llama-server", "-m", demo, "--port", "1", env={name: value})


def test_values_in_llama_bench(demo: Path) -> None:
    for flag, (values, message) in VALUES.items():
        assert message in refused("llama-bench", "-m", demo, flag, values[0])
        assert f"{flag} needs a value" in refused("llama-bench", "-m", demo, flag)


def test_importance_matrix(demo: Path, tmp_path: Path) -> None:
    output = refused("llama-imatrix", "-m", demo, "-f", DOC, "-o", tmp_path / "imatrix.gguf", "--moe-slots", "8")
    assert "--moe-slots cannot be combined with an importance matrix; hint: leave out --moe-slots" in output
    assert not (tmp_path / "imatrix.gguf").exists()


@pytest.mark.parametrize("arguments", [
    ("--override-tensor", "attn_q=CPU"),
    ("--load-mode", "none"),
    ("--moe-slots", "1000"),
], ids=" ".join)  # fmt: skip
def test_what_is_not_refused(demo: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "8", *arguments) as server:
        stats = server.stats()
        assert stats["streaming"] is True
        assert stats["slots"] == (64 if "1000" in arguments else 8)
        server.complete("The", 4)


def test_settings_from_the_environment(demo: Path, tmp_path: Path) -> None:
    env = {
        "LLAMA_ARG_MOE_SLOTS": "7", "LLAMA_ARG_MOE_IO": "buffered", "LLAMA_ARG_MOE_IO_THREADS": "3",
        "LLAMA_ARG_MOE_POLICY": "lfu", "LLAMA_ARG_MOE_OVERLAP": "off",
    }  # fmt: skip
    with LlamaServer(demo, tmp_path / "log", env=env) as server:
        stats = server.stats()
    assert (stats["slots"], stats["slots_requested"], stats["policy"], stats["overlap"]) == (7, "7", "lfu", False)
    assert (stats["io"]["mode"], stats["io"]["requested"], stats["io"]["threads"]) == ("buffered", "buffered", 3)


def test_the_document_lists_them() -> None:
    quoted = re.findall(r"^\|[^|]*\| `([^`]*)` \|", DOC.read_text(), re.MULTILINE)
    assert len(quoted) >= 14
    expected = [message for _, message in COMBINATIONS.values()] + [message for _, message in VALUES.values()]
    for message in expected:
        assert any(part in message or message in part for part in quoted) or "hint: leave out one of them" in message, message
