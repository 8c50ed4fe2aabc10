"""Engine and Python give a model the same fingerprint, however its experts are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_models import LAYOUTS, run, split, tool
from llama_server import environment

from moestream import gguf_facts
from moestream.routing.fingerprint import fingerprint


def of_the_engine(path: Path, stats: Path) -> str:
    # the fixtures have no vocabulary to speak of: one token of a prompt is enough, and what comes of it does not matter
    done = run(
        tool("moe-identity"), "-m", path, "--slots", "2", "--threads", "1", "--tokens", "8", "--ubatch", "1",
        env=environment({"MOESTREAM_STATS_FILE": str(stats)}),
    )  # fmt: skip
    assert done.returncode == 0
    return json.loads(stats.read_text())["model_fingerprint"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(model: Callable[[str, str], Path], tmp_path: Path, layout: str) -> None:
    path = model(layout, "q4_0")
    ours = fingerprint(gguf_facts.read(path))
    assert of_the_engine(path, tmp_path / "stats") == ours
    assert fingerprint(gguf_facts.read(model(layout, "f32"))) == ours


def test_shards(model: Callable[[str, str], Path], tmp_path: Path) -> None:
    whole = model("qwen3moe", "q4_0")
    shards = split(whole, tmp_path / "m")
    assert of_the_engine(shards[0], tmp_path / "stats") == fingerprint(gguf_facts.read(shards[1]))
    assert fingerprint(gguf_facts.read(shards[0])) == fingerprint(gguf_facts.read(whole))
