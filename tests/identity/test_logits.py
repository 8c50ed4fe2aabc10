"""Streamed logits are the bits of unstreamed ones: every layout, few and many slots, one token and several at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_models import LAYOUTS, run, split, tool
from llama_server import environment

# Evicted slots are filled with 0xff, and so is staging before it is used again: a read of stale bytes cannot go unseen. A slot
# that changes while it holds an expert is an error at its next use.
POISON = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}


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
        match = re.fullmatch(r"ok T=.* via_slots=(\d+) via_staging=(\d+)", line)
        assert match, line
        via_slots, via_staging = map(int, match.groups())
        assert via_slots + via_staging == n_tokens, line
        ways["slots"] += via_slots > 0
        ways["staging"] += via_staging > 0
    return +ways


@pytest.mark.parametrize("type_name", ["f32", "q4_0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(model: Callable[[str, str], Path], layout: str, type_name: str) -> None:
    # slots 2, 3 and all of 8; of T = 1, 2 and 9 those with T * 2 experts in the slots go through them
    assert compare(model(layout, type_name)) == {"slots": 5, "staging": 4}


@pytest.mark.parametrize("arguments", [
    ("--moe-io", "direct"),
    ("--moe-io", "buffered"),
    ("--moe-policy", "lfu"),
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


@pytest.mark.parametrize(("arguments", "env"), [
    ((), {}),
    ((), POISON),
    (("--moe-io", "direct", "--threads", "2"), POISON),
    (("--moe-policy", "lfu"), POISON),
], ids=["plain", "poison", "direct, two threads", "lfu"])  # fmt: skip
def test_demo(demo: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    # 6 are used: at 8 slots only T = 1 fits into them, at 64 every T does
    assert compare(demo, "--slots", "6,8,64", *arguments, env=env) == {"slots": 5, "staging": 4}


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
