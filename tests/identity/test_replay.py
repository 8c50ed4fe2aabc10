"""A list of llama calls gives the same bits streamed and not: sequences that come and go, saved states, aborted graphs, two contexts in
turns and at once; and the right bits again after a batch that failed because experts could not be read."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_models import quantize, run, tool
from fixture_variants import deepen
from llama_server import environment

POISON = {"MOESTREAM_POISON": "1"}
ORDERS = ("one-by-one", "in-turns", "two-threads")
# calls that not every memory knows
WITHOUT_RECURRENT_STATE = {"trim", "both-ways"}
EVERYWHERE = {"abort", "abort-second-ubatch", "cancel", "copy", "embd", "fresh", "join", "last", "leave", "one", "prompt", "save",
              "step", "whole"}  # fmt: skip


@pytest.fixture(scope="module")
def deep(model: Callable[[str, str], Path], disk_folder: Path) -> Callable[[str], Path]:
    """A layout with so many layers that staging's halves are used again, in Q4_0."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            source = model(layout, "f32")
            deeper = source if layout == "gemma4" else deepen(source, disk_folder / f"{layout}-deep.gguf")
            made[layout] = quantize(deeper, disk_folder / f"{layout}-deep-q4_0.gguf")
        return made[layout]

    return get


def replay(model: Path, *arguments: str | Path, slots: str = "used,used+1", program: str = "moe-replay") -> list[str]:
    """The program's lines but the seed's, which all tell of equal bits."""
    done = run(tool(program), "-m", model, "--slots", slots, *arguments, env=environment(POISON), ok=False)
    seed, *lines = done.stdout.splitlines() or [""]
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"seed \d+", seed)
    return lines


def check_replay(lines: list[str], n_slots: int, expected_calls: set[str]) -> None:
    calls = dict(re.findall(r" ([a-z-]+)=(\d+)", lines[0]))
    assert lines[0].startswith("calls ") and calls.keys() == expected_calls
    pattern = r"ok ([a-z-]+) slots=(\d+)/(\d+) outputs=\d+ bytes=\d+ evictions=(\d+) via_slots=(\d+) via_staging=(\d+)"
    seen: Counter[str] = Counter()
    for line in lines[1:]:
        match = re.fullmatch(pattern, line)
        assert match, line
        n_slot, n_expert, evictions, via_slots, via_staging = map(int, match.groups()[1:])
        assert via_slots > 0, line
        if n_slot < n_expert:
            assert evictions > 0 and via_staging > 0, line
        seen[match[1]] += 1
    assert seen == dict.fromkeys(ORDERS, n_slots)


@pytest.mark.parametrize(("layout", "own_calls"), [
    ("qwen2moe", WITHOUT_RECURRENT_STATE | {"shift"}),  # a shared expert
    ("openai-moe", WITHOUT_RECURRENT_STATE | {"shift"}),  # biases
    ("deepseek2-merged", WITHOUT_RECURRENT_STATE | {"shift"}),  # the first layer dense, gate and up merged
    ("gemma4", WITHOUT_RECURRENT_STATE | {"shift"}),  # a dense FFN beside the experts, sliding windows
    ("qwen35moe", set()),  # recurrent layers
])  # fmt: skip
def test_layouts(deep: Callable[[str], Path], layout: str, own_calls: set[str]) -> None:
    check_replay(replay(deep(layout), "--steps", "24"), 2, EVERYWHERE | own_calls)


def test_all_slots(deep: Callable[[str], Path]) -> None:
    check_replay(replay(deep("qwen2moe"), "--steps", "24", slots="all"), 1, EVERYWHERE | WITHOUT_RECURRENT_STATE | {"shift"})


@pytest.mark.parametrize(("slots", "arguments"), [
    ("6,7", ("--seed", "2")),
    ("6", ("--seed", "3", "--moe-io", "direct", "--moe-policy", "lfu")),
], ids=["6 and 7 slots", "direct, lfu"])  # fmt: skip
def test_demo(demo: Path, slots: str, arguments: tuple[str, ...]) -> None:
    lines = replay(demo, "--steps", "1", *arguments, slots=slots)
    check_replay(lines, len(slots.split(",")), EVERYWHERE | WITHOUT_RECURRENT_STATE | {"shift"})


FIRST = [f"ok first slots=used cut_at={percent}%" for percent in (0, 30)]


def fail(model: Path, io: str) -> list[str]:
    """What moe-failed-batch says of a copy, which it damages."""
    copy = model.with_name(f"failing-{model.name}")
    shutil.copyfile(model, copy)
    try:
        return replay(copy, "--moe-io", io, slots="used", program="moe-failed-batch")
    finally:
        copy.unlink()


@pytest.mark.parametrize(("layout", "io"), [("gemma4", "direct"), ("qwen35moe", "buffered")])
def test_failed_batch(deep: Callable[[str], Path], layout: str, io: str) -> None:
    """Not for a recurrent state, which upstream cannot set back: giving the batch again as it is."""
    lines = fail(deep(layout), io)
    recurrent = layout == "qwen35moe"
    ways = ("clear", "restore") if recurrent else ("again", "clear", "restore")
    expected = [
        rf"ok {scene} {way} slots=used cut_at={percent}% last_position=\d+"
        for scene in ("token", "ubatch", "two-ubatches") for way in ways for percent in (0, 20, 60)
    ]  # fmt: skip
    # where nothing is recurrent an abort leaves nothing behind, so that there is one state
    for scene in ("token", "ubatch"):
        expected.append(rf"ok {scene} abort slots=used states={'[2-9]' if recurrent else '1'}")
        expected.append(rf"ok {scene} abort-cut slots=used failed_reads=[1-9]\d*")
    expected += FIRST
    assert len(lines) == len(expected)
    for pattern in expected:
        assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1, (pattern, lines)


@pytest.mark.parametrize("layout", ["qwen2moe", "qwen35moe"])
def test_failed_first_batch(model: Callable[[str, str], Path], layout: str) -> None:
    """With two layers of experts nobody takes a half of staging from another: it must not keep what was not read."""
    assert fail(model(layout, "q4_0"), "buffered") == FIRST
