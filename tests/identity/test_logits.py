"""Streamed logits are the bits of unstreamed ones: every layout, few and many slots, one token and several at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_architectures import align, split_apart
from fixture_models import LAYOUTS, expert_types, run, split, tool
from fixture_variants import write_nvfp4
from llama_server import environment

# Evicted slots are filled with 0xff, and so is staging before it is used again: a read of stale bytes cannot go unseen. A slot
# that changes while it holds an expert is an error at its next use.
POISON = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}


PROMPT = "The command reads the file named on the command line and writes each line to standard output, numbered. " * 6


def compare(
    model: Path, *arguments: str, n_slots: int = 3, n_ubatch: int = 3, n_tokens: int = 48, env: dict[str, str] = POISON
) -> Counter[str]:
    """Run moe-identity, which compares all logits of all tokens; how many comparisons went through slots and through staging."""
    # one thread unless asked for: several wait for each other by spinning, which is slow on a busy machine
    done = run(tool("moe-identity"), "-m", model, "--threads", "1", *arguments, env=environment(env), ok=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == n_slots * n_ubatch
    ways: Counter[str] = Counter()
    for line in lines:
        match = re.fullmatch(r"ok T=.* via_slots=(\d+) via_staging=(\d+)( ram_hits=\d+ guess_hits=\d+)?", line)
        assert match, line
        via_slots, via_staging = map(int, match.groups()[:2])
        assert via_slots + via_staging == n_tokens, line
        ways["slots"] += via_slots > 0
        ways["staging"] += via_staging > 0
    return +ways


@pytest.mark.parametrize("type_name", ["f32", "q4_0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(model: Callable[[str, str], Path], layout: str, type_name: str) -> None:
    # slots 2, 3 and all of 8; of T = 1, 2 and 9 those with T * 2 experts in the slots go through them
    assert compare(model(layout, type_name)) == {"slots": 5, "staging": 4}


def test_nvfp4(model: Callable[[str, str], Path], disk_folder: Path) -> None:
    """Experts in a type that has a scale for each of them, beside the weights: read by the experts' own ids."""
    path = write_nvfp4(model("qwen3moe", "f32"), disk_folder / "qwen3moe-nvfp4.gguf")
    assert expert_types(path) == {"NVFP4"}
    assert compare(path) == {"slots": 5, "staging": 4}
    assert compare(path, "--moe-staging", "ring") == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_repacked(model: Callable[[str, str], Path], layout: str, io: str) -> None:
    """With the kernels that stock prefers for the type on this processor."""
    assert compare(model(layout, "q4_0"), "--repack", "--moe-io", io) == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("arguments", [(), ("--repack", "--threads", "3"), ("--moe-io", "direct")], ids=" ".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring(model: Callable[[str, str], Path], layout: str, arguments: tuple[str, ...]) -> None:
    """Experts that have no slot pass through a small buffer, and none is as wide as a layer."""
    assert compare(model(layout, "q4_0"), "--moe-staging", "ring", *arguments) == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("arguments", [(), ("--repack",)], ids=["plain", "repacked"])
def test_ring_demo(demo: Path, arguments: tuple[str, ...]) -> None:
    size = ("--ubatch", "9,64", "--tokens", "160", "--threads", "2")
    ways = compare(demo, "--slots", "6,40", *size, "--moe-staging", "ring", *arguments, n_slots=2, n_ubatch=2, n_tokens=160)
    assert ways == {"staging": 4}


def test_repacked_demo(demo: Path) -> None:
    assert compare(demo, "--repack", "--slots", "6,8,64") == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("arguments", [
    ("--moe-io", "direct"),
    ("--moe-io", "buffered"),
    ("--moe-io", "direct", "--moe-io-backend", "uring"),
    ("--moe-io", "buffered", "--moe-io-backend", "uring", "--moe-io-threads", "32"),
    ("--moe-policy", "lfu"),
    ("--moe-policy", "heat"),
    ("--moe-overlap", "off"),
    ("--moe-io-threads", "1"),
    ("--threads", "3"),
    ("--moe-io", "direct", "--moe-policy", "lfu", "--moe-overlap", "off", "--moe-io-threads", "16"),
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("layout", ["qwen2moe", "gemma4"])
def test_settings(model: Callable[[str, str], Path], layout: str, arguments: tuple[str, ...]) -> None:
    compare(model(layout, "q4_0"), *arguments)


@pytest.mark.parametrize("layout", ["qwen3moe", "deepseek2-merged"])
def test_shards(model: Callable[[str, str], Path], disk_folder: Path, layout: str) -> None:
    shards = split(model(layout, "q4_0"), disk_folder / f"{layout}-shard")
    compare(shards[0])
    compare(shards[0], "--moe-io", "direct", "--slots", "used", n_slots=1)


@pytest.mark.parametrize("n_shards", [2, 3, 4, 5])
@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("load_mode", ["mmap", "none", "dio"])
def test_files(model: Callable[[str, str], Path], tmp_path: Path, n_shards: int, alignment: int, load_mode: str) -> None:
    shards = split(model("qwen2moe", "q4_0"), tmp_path / "model", n_shards)
    for shard in shards:  # after the split: upstream's splitter writes every alignment as 32
        align(shard, alignment)
    compare(shards[0], "--load-mode", load_mode, "--slots", "used", n_slots=1)


@pytest.mark.parametrize(("layout", "pattern"), [("openai-moe", r"\.bias$"), ("gemma4", r"\.scale$")])
def test_experts_apart_from_their_biases_and_scales(
    model: Callable[[str, str], Path], tmp_path: Path, layout: str, pattern: str
) -> None:
    shards = split_apart(model(layout, "q4_0"), tmp_path / "model", pattern)
    compare(shards[0], "--slots", "used", n_slots=1)


def test_symlinked_shards(model: Callable[[str, str], Path], tmp_path: Path) -> None:
    # as download caches keep them: files under the names of their digests, and links under their own
    shards = split(model("qwen3moe", "q4_0"), tmp_path / "model", 3)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for i, shard in enumerate(shards):
        blob = shard.rename(tmp_path / "blobs" / f"{i:064x}")
        (tmp_path / "snapshot" / shard.name).symlink_to(blob)
    compare(tmp_path / "snapshot" / shards[0].name, "--slots", "used", n_slots=1)


@pytest.mark.parametrize(("arguments", "env"), [
    ((), {}),
    ((), POISON),
    (("--moe-io", "direct", "--threads", "2"), POISON),
    (("--moe-policy", "lfu"), POISON),
], ids=["plain", "poison", "direct, two threads", "lfu"])  # fmt: skip
def test_demo(demo: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    # 6 are used: at 8 slots only T = 1 fits into them, at 64 every T does
    assert compare(demo, "--slots", "6,8,64", *arguments, env=env) == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("backend", ["threads", "uring"])
def test_demo_read_by(demo: Path, io: str, backend: str) -> None:
    assert compare(demo, "--repack", "--slots", "6,8,64", "--moe-io", io, "--moe-io-backend", backend) == {
        "slots": 5,
        "staging": 4,
    }


@pytest.mark.parametrize("layout", ["qwen2moe", "openai-moe", "gemma4"])
def test_prompt_then_token(model: Callable[[str, str], Path], layout: str) -> None:
    # 48 tokens through staging, whose last experts go to the slots, and one through these
    ways = compare(
        model(layout, "f32"), "--tokens", "49", "--ubatch", "16,48", "--slots", "2,5", n_slots=2, n_ubatch=2, n_tokens=49
    )
    assert ways == {"slots": 4, "staging": 4}


@pytest.mark.parametrize("layout", ["qwen2moe", "qwen35moe"])
def test_sequences(model: Callable[[str, str], Path], layout: str) -> None:
    compare(model(layout, "q4_0"), "--sequences", "4", "--ubatch", "4,8", n_ubatch=2)


def test_demo_sequences(demo: Path) -> None:
    ways = compare(demo, "--sequences", "4", "--ubatch", "4", "--slots", "6,24", n_slots=2, n_ubatch=1)
    assert ways == {"slots": 1, "staging": 1}


def test_wide_batches_read_ahead(demo: Path) -> None:
    # 64 tokens choose 384 times among 64 experts: all of the next layer is read while this one computes
    size = ("--ubatch", "64", "--tokens", "160")
    assert compare(demo, "--slots", "6,40", *size, n_slots=2, n_ubatch=1, n_tokens=160) == {"staging": 2}


def test_results_program(demo: Path, tmp_path: Path) -> None:
    """Upstream's own program that writes all logits of a text to a file writes the same file."""
    written = []
    plain, streamed = ["--no-repack"], ["--moe-slots", "8"]
    for name, arguments in {
        "stock": [], "again": [], "streamed": streamed, "plain": plain, "plain-streamed": [*plain, *streamed],
    }.items():  # fmt: skip
        path = tmp_path / f"{name}.gguf"
        run(
            tool("llama-results"), "-m", demo, "-o", path, "-p", PROMPT, "-b", "512", "-ub", "9", "-t", "1", "-c", "512",
            *arguments, env=environment(POISON),
        )  # fmt: skip
        written.append(path.read_bytes())
    assert len(written[0]) > 100 * 8192 * 4
    assert written[0] == written[1], "the reference does not equal itself"
    assert written[0] == written[2]
    assert written[3] == written[4]
