"""The report of prove.py, which needs no card to be read and written."""

from __future__ import annotations

import json

import fusions
import prove
import pytest

SAID = """\
ok T=1 slots=6/64 pool_bytes=10 evictions=41 misses=4 hits=9 via_slots=128 via_staging=0
FAIL: token 3, value 7 differs T=9 slots=6/64 pool_bytes=10 evictions=1 misses=3 hits=0 via_slots=0 via_staging=128
something else
ok T=1 slots=48/64 pool_bytes=80 evictions=0 misses=1 hits=9 via_slots=128 via_staging=0
"""


def test_a_difference_is_a_problem(tmp_path, monkeypatch):
    program = tmp_path / "moe-identity"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SAID}END\nexit 1\n")
    program.chmod(0o755)
    one = prove.Run(tmp_path / "x-q4_0.gguf", 4, "as upstream chooses", (1,), 128)
    found, problems = prove.compare(program, one)
    assert [(c.verdict, c.ubatch, c.via_slots, c.via_staging) for c in found] == [
        ("ok", 1, 128, 0), ("FAIL: token 3, value 7 differs", 9, 0, 128), ("ok", 1, 128, 0),
    ]  # fmt: skip
    assert problems == ["x-q4_0, 4 sequences, T=1, as upstream chooses, T=9, 6 slots: FAIL: token 3, value 7 differs"]

    report = prove.Report("2026-01-02T03:04:05+00:00", "a card, 1.2", "abc", "python tests/gpu/prove.py")
    prove.prove(program, [one], report, jobs=1, limit_s=60)
    prove.prove(program, [one], report, jobs=1, limit_s=0)
    assert "a card, 1.2, commit abc: 2 of 3 comparisons equal." in report.as_markdown()
    assert "| x-q4_0 | 4 | as upstream chooses | 2 of 3 | 256 | 128 | 42 |" in report.as_markdown()
    assert report.problems[-1].endswith("not run, the time was over")
    data = json.loads(report.as_json())
    assert (data["schema"], len(data["comparisons"]), len(data["problems"])) == ("moestream/gpu-identity/1", 3, 2)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo no such model >&2; exit 2\n", "ended with 2 after 0 of 3: no such model"),
        (
            "printf 'ok T=1 slots=6/64 pool_bytes=1 evictions=4 misses=4 hits=9 via_slots=0 via_staging=8\\n%.0s' 1 2 3\n",
            "went through ['staging'] only",
        ),
    ],
)
def test_what_does_not_prove_anything_is_a_problem(tmp_path, script, problem):
    program = tmp_path / "moe-identity"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    _, problems = prove.compare(program, prove.Run(tmp_path / "x-q4_0.gguf", 1, "as upstream chooses", (1,), 8))
    assert len(problems) == 1 and problem in problems[0]


FUSIONS = """\
I nodes_fused: 3, first: MUL_MAT_ID (ffn_moe_gate-0), last: GLU (ffn_moe_swiglu-0)
I nodes_fused: 3, first: MUL_MAT_ID (ffn_moe_gate-11), last: GLU (ffn_moe_swiglu-11)
I nodes_fused: 3, first: MUL_MAT_ID (ffn_moe_gate-11), last: GLU (ffn_moe_swiglu-11)
I nodes_fused: 2, first: MUL_MAT (node_86), last: ADD (ffn_inp-0)
I nodes_fused: 2, first: MUL_MAT (node_145), last: ADD (ffn_inp-1)
I nodes_fused: 5, first: RMS_NORM (norm-0), last: SET_ROWS (cache_k_l0 (view))
I nodes_fused: 2, first: RMS_NORM (node_33), last: SCALE (node_34)
I nodes_fused: 2, first: RMS_NORM (node_108), last: SCALE (node_109)
something else
"""


def test_fusions_that_are_lost() -> None:
    stock = fusions.fused(FUSIONS)
    glu = "3 nodes, MUL_MAT_ID ffn_moe_gate to GLU ffn_moe_swiglu"
    assert stock == {
        glu: 2,
        "2 nodes, MUL_MAT node_ to ADD ffn_inp": 2,
        "5 nodes, RMS_NORM norm to SET_ROWS cache_k_l": 1,
        "2 nodes, RMS_NORM node_ to SCALE node_": 2,
    }
    assert fusions.lost(stock, stock) == []
    with_another_node = FUSIONS.replace("node_145", "node_147").replace("node_108", "node_110").replace("node_109", "node_111")
    assert fusions.fused(with_another_node) == stock
    streamed = stock.copy()
    streamed[glu] = 1
    assert fusions.lost(stock, streamed) == [f"{glu}: 1 instead of 2"]


def test_an_engine_that_names_no_fusions_proves_nothing(tmp_path):
    program = tmp_path / "llama-completion"
    program.write_text("#!/bin/sh\necho loaded\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="named 0 fusions: loaded"):
        fusions.run(program, tmp_path / "x.gguf")
