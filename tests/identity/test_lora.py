"""Adapters to experts, whose matrices the experts' own ids choose, while the weights beside them lie in slots or staging."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_models import quantize, run, tool
from fixture_variants import deepen, write_lora
from llama_server import LlamaServer, environment

EXPERTS = r"ffn_(gate|up|down|gate_up)_exps\.weight$"
ATTENTION_AND_MORE = r"attn_(q|qkv|output)\.weight$|ffn_(up|down)_shexp\.weight$|ffn_(down|gate_up)_exps\.weight$"


@pytest.mark.parametrize("layout", [
    "qwen2moe",  # a shared expert, gate and up apart
    "openai-moe",  # biases
    "gemma4",  # gate and up merged, a scale per expert
    "qwen35moe-merged",  # recurrent layers
])  # fmt: skip
def test_adapters(model: Callable[[str, str], Path], tmp_path: Path, layout: str) -> None:
    """Two, in turns and together, at several scales, each of which changes the logits by itself."""
    path = model(layout, "f32") if layout == "gemma4" else deepen(model(layout, "f32"), tmp_path / "deep.gguf")
    path = quantize(path, tmp_path / "q4_0.gguf")
    assert write_lora(path, tmp_path / "a.gguf", EXPERTS) > 0
    assert write_lora(path, tmp_path / "b.gguf", ATTENTION_AND_MORE, rank=2, seed=2) > 0

    adapters = f"{tmp_path / 'a.gguf'},{tmp_path / 'b.gguf'}"
    done = run(
        tool("moe-replay"), "-m", path, "--lora", adapters, "--slots", "used,used+1", "--steps", "1",
        env=environment({"MOESTREAM_POISON": "1"}), ok=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert " lora=2 " in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["ok"] * 6, done.stdout


def test_server(demo: Path, tmp_path: Path) -> None:
    """An adapter given at start, turned off and on again over HTTP."""
    adapter = tmp_path / "adapter.gguf"
    write_lora(demo, adapter, EXPERTS, size=0.2)

    def answers(*arguments: str) -> list[list[int]]:
        with LlamaServer(demo, tmp_path / "log", "--lora", str(adapter), *arguments) as server:
            found = []
            for scale in (1.0, 0.0, 0.5):
                assert server.http.post("/lora-adapters", json=[{"id": 0, "scale": scale}]).status_code == 200
                found.append(server.complete("The purpose of this manual is to describe", 24))
            if "--moe-slots" in arguments:
                assert server.stats()["totals"]["evictions"] > 0
            return found

    stock = answers()
    assert stock[0] != stock[1] != stock[2]
    assert answers("--moe-slots", "8") == stock
