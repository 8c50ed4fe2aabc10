"""Speculative decoding: the text, and what was drafted and accepted, are those of the same programs without streaming."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from fixture_variants import make_mtp, write_dense_draft
from llama_server import LlamaServer, environment

PROMPT = "The purpose of this manual is to describe"


@pytest.fixture(scope="module")
def mtp_model(model: Callable[[str, str], Path], disk_folder: Path) -> Callable[[str], Path]:
    """A layout with a head that predicts the token after next, in Q4_0."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            made[layout] = make_mtp(layout, model, disk_folder)
        return made[layout]

    return get


@pytest.mark.parametrize("layout", ["glm4moe", "qwen35moe"])
def test_mtp_contexts(mtp_model: Callable[[str], Path], layout: str) -> None:
    """The head's drafts and hidden states, and the model's, bit for bit. The head is layer 4, behind 0 to 3."""
    done = run(tool("moe-mtp"), "-m", mtp_model(layout), "--steps", "20", env=environment({"MOESTREAM_POISON": "1"}), ok=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 3
    for slots, line in zip((2, 3, 8), lines, strict=True):
        assert re.fullmatch(rf"ok slots={slots}/8 outputs=\d+ bytes=\d+ last_layer=4 misses=[1-9]\d* evictions=\d+", line)


def answers(model: Path, log: Path, prompts: list[Any], *arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """For each prompt the tokens, and how many were drafted and accepted; and the statistics, empty without streaming."""
    with LlamaServer(model, log, *arguments, env={"MOESTREAM_POISON": "1"}) as server:
        found = []
        for prompt in prompts:
            answer = server.post_completion(prompt, 32).json()
            found.append((answer["tokens"], answer["timings"].get("draft_n"), answer["timings"].get("draft_n_accepted")))
        return found, server.stats() if "--moe-slots" in arguments else {}


@pytest.mark.parametrize("layout", ["glm4moe", "qwen35moe"])
def test_mtp_server(mtp_model: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    # these have no tokenizer: prompts are tokens
    prompts = [[(7 * i + k) % 128 for i in range(20)] for k in range(2)]
    mtp = ("--spec-type", "draft-mtp", "-c", "256")
    stock, _ = answers(mtp_model(layout), tmp_path / "log", prompts, *mtp)
    streamed, stats = answers(mtp_model(layout), tmp_path / "log", prompts, *mtp, "--moe-slots", "2")
    assert all(drafted > 0 for _, drafted, _ in stock)
    assert streamed == stock
    assert [layer["layer"] for layer in stats["layers"]][-1] == 4
    assert all(layer["evictions"] > 0 for layer in stats["layers"])


@pytest.mark.parametrize("draft", ["dense", "the model itself"])
def test_draft_model(demo: Path, tmp_path: Path, draft: str) -> None:
    """A draft model is not streamed, be it dense or not: nothing is asked of it, and nobody's slots are for it."""
    path = write_dense_draft(demo, tmp_path / "draft.gguf", 3) if draft == "dense" else demo
    drafting = ("-md", str(path), "--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    prompts = [PROMPT, "Define harbor. A ship, 17 apples and"]
    stock, _ = answers(demo, tmp_path / "log", prompts, *drafting)
    streamed, stats = answers(demo, tmp_path / "log", prompts, *drafting, "--moe-slots", "6")
    assert all(drafted > 0 for _, drafted, _ in stock)
    if draft != "dense":
        assert all(accepted > 0 for _, _, accepted in stock)
    assert streamed == stock
    assert stats["totals"]["evictions"] > 0
    assert (tmp_path / "log").read_text(errors="replace").count("moestream: streaming ") == 1
