"""``moestream trace replay``: what it recommends of what the engine's program counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_files import trace_bytes

from moestream import gguf_facts, paths
from moestream.commands import trace
from moestream.routing.fingerprint import fingerprint
from moestream.routing.replay import LayerCounts, Run

DEMO = paths.demo_model()


def run(slots: int, tokens_decode: int) -> Run:
    return Run("lru", slots, 90, 10, 0, 10, tokens_decode, 5, (LayerCounts(0, slots, 90, 10, 10),))


@pytest.mark.parametrize(("tokens", "slots"), [({8: 0, 16: 50}, 16), ({8: 50, 16: 0}, 8), ({8: 0, 16: 0}, None)])
def test_runs_without_a_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: dict[int, int], slots: int | None
) -> None:
    """A hit rate is not held against speeds: 0.9 is more than what a slow drive gives a second."""
    facts = gguf_facts.read(DEMO)
    model = {"fingerprint": fingerprint(facts), "architecture": facts.architecture, "name": DEMO.name}
    file = tmp_path / "t"
    file.write_bytes(trace_bytes([], {"model": model, "n_expert_used": 6, "layers": [{"layer": 0, "n_expert": 64}]}))
    monkeypatch.setattr(trace.replaying, "replay", lambda *_a, **_k: [run(n, decoded) for n, decoded in tokens.items()])
    speed: dict[str, Any] = {"model": str(DEMO), "bandwidth": 0.001, "compute_tps": 10}
    command = trace.replay(file, "8,16", **speed).data["start"]
    assert command == (slots and f"moestream start --model {DEMO} --slots {slots} --policy lru")
    assert trace.replay(file, "8,16").data["start"] == f"moestream start --model {DEMO.name} --slots 8 --policy lru"
