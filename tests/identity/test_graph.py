"""Streaming off leaves upstream's graph as it was, node for node; on, it adds two nodes a layer and overlaps what it can.

The golden lists come from an unpatched llama.cpp: ``python tests/identity/record_golden.py`` writes them anew.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
from fixture_models import run, tool
from llama_server import environment

GOLDEN = Path(__file__).with_name("golden")
GOLDEN_LAYOUTS = sorted(path.stem for path in GOLDEN.glob("*.txt"))
SHARED_FFN = {  # name of the last node of the FFN that does not depend on the experts, by layout
    "qwen2moe": "ffn_shexp_out",
    "deepseek2": "ffn_shexp",
    "qwen35moe": "ffn_shexp_gated",
    "gemma4": "ffn_mlp",
}


def nodes(model: Path, *arguments: str) -> list[str]:
    """What moe-graph prints, a line a node and one before each batch."""
    return run(tool("moe-graph"), "-m", model, *arguments, env=environment()).stdout.splitlines()


def name_of(node: str) -> str:
    return node.split("] ")[1].split(" <-")[0]


def sources_of(node: str) -> list[str]:
    return node.split(" <- ")[1].split(", ")


def test_golden_lists_are_there() -> None:
    assert GOLDEN_LAYOUTS == ["deepseek2", "gemma4", "openai-moe", "qwen2moe", "qwen3moe"]


@pytest.mark.parametrize("layout", GOLDEN_LAYOUTS)
def test_off_is_upstreams_graph(model: Callable[[str, str], Path], layout: str) -> None:
    expected = (GOLDEN / f"{layout}.txt").read_text().splitlines()
    assert len([line for line in expected if line.startswith("MUL_MAT_ID")]) >= 4
    actual = nodes(model(layout, "f32"))
    assert actual == expected, "\n".join(difflib.unified_diff(expected, actual, "upstream", "moestream off", lineterm="", n=1))


@pytest.mark.parametrize(("slots", "staged"), [("2", True), ("8", False)])
@pytest.mark.parametrize("layout", ["qwen3moe", "openai-moe", *SHARED_FFN])
def test_on_adds_two_nodes_a_layer(model: Callable[[str, str], Path], layout: str, slots: str, staged: bool) -> None:
    plain = nodes(model(layout, "f32"))
    streamed = nodes(model(layout, "f32"), "--slots", slots)
    ours = [line for line in streamed if name_of_or_empty(line).startswith(("moe_begin", "moe_join"))]
    n_moe_layers = sum(".ffn_down_exps.weight" in line for line in plain if line.startswith("MUL_MAT_ID"))  # of both batches
    assert n_moe_layers >= 2
    assert len(ours) == 2 * n_moe_layers
    assert all(line.startswith("CUSTOM i32 ") for line in ours)
    # nothing else came or went
    count = [sorted(line.split(" ")[0] for line in lines if line not in ours) for lines in (plain, streamed)]
    assert count[0] == count[1]

    # the expert matmuls, and they alone, take the ids of the join
    widths = set()
    for line in streamed:
        if line.startswith("#"):
            continue
        joined = any(source.startswith("moe_join") for source in sources_of(line))
        assert joined == line.startswith("MUL_MAT_ID")
        if joined:
            n_tokens = int(line.split("[")[1].split(",")[2])  # 1 in the last layer, which computes wanted outputs only
            widths.add(n_tokens)
            assert sources_of(line)[-1] == "gate"  # each waits for its own bytes
            assert sources_of(line)[0].endswith(".staging") == (staged and n_tokens * 2 > int(slots)), line
    assert widths == ({1} if layout.startswith("deepseek2") else {1, 9})  # its only MoE layer is the last one


def name_of_or_empty(line: str) -> str:
    return "" if line.startswith("#") else name_of(line)


KNOWN_BEFORE_ATTENTION = ["smallthinker", "arctic"]  # their routers see the layer's input


@pytest.mark.parametrize("slots", ["2", "8"])
@pytest.mark.parametrize("layout", [*KNOWN_BEFORE_ATTENTION, "qwen3moe"])
def test_reads_begin_before_attention_where_routing_is_known(
    model: Callable[[str, str], Path], layout: str, slots: str
) -> None:
    def order(overlap: str) -> list[str]:
        lines = nodes(model(layout, "f32"), "--slots", slots, "--overlap", overlap)
        kinds = {"moe_begin": "begin", "moe_join": "join", "kq_soft_max": "attention", "kq": "attention"}
        found = [kinds.get(name_of_or_empty(line).rsplit("-", 1)[0], "") for line in lines if not line.startswith("#")]
        return [kind for i, kind in enumerate(found) if kind and kind != (["", *found])[i]]

    off, on = order("off"), order("on")
    assert sorted(off) == sorted(on)
    assert off[0] == "attention" and off.count("begin") >= 4
    assert (on[0] == "begin") == (layout in KNOWN_BEFORE_ATTENTION)
    if layout not in KNOWN_BEFORE_ATTENTION:
        assert on == off


@pytest.mark.parametrize("slots", ["2", "8"])
@pytest.mark.parametrize("layout", SHARED_FFN)
def test_overlap(model: Callable[[str, str], Path], layout: str, slots: str) -> None:
    def matmuls_between(overlap: str) -> list[list[str]]:
        """The matmuls and the last FFN node that stand between begin and join, of each MoE layer of both batches."""
        found: list[list[str]] = []
        inside = False
        for line in nodes(model(layout, "f32"), "--slots", slots, "--overlap", overlap):
            if line.startswith("MUL_MAT_ID"):
                assert (sources_of(line)[-1] == "gate") == (overlap == "on")
            name = name_of_or_empty(line)
            if name.startswith("moe_begin"):
                found.append([])
                inside = True
            elif name.startswith("moe_join"):
                inside = False
            elif inside and (line.startswith("MUL_MAT ") or name.rsplit("-", 1)[0] == SHARED_FFN[layout]):
                found[-1].append(name.rsplit("-", 1)[0])
        assert len(found) >= 2
        return found

    for layer in matmuls_between("on"):
        assert {"ffn_gate", "ffn_up", SHARED_FFN[layout]} <= set(layer)
    for layer in matmuls_between("off"):
        assert layer == []
