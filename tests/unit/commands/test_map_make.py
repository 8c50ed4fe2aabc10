"""``moestream map make``: what it refuses before it reads anything, and that it never writes slots worse than equal ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_files import trace_bytes

from moestream import gguf_facts, paths
from moestream.commands import map as map_command
from moestream.commands.options import Policy
from moestream.commands.trace import check_fingerprint
from moestream.errors import MoestreamError
from moestream.routing import maps, trace
from moestream.routing.fingerprint import fingerprint
from moestream.routing.replay import LayerCounts, Run

NONE = [Path("no such trace")]
DEMO = paths.demo_model()


@pytest.mark.parametrize(("settings", "message"), [
    ({"policy": Policy.lfu}, "--policy lfu does nothing without --budget"),
    ({"backend": "cpu"}, "--backend cpu does nothing without --budget"),
    ({"budget": "4GiB"}, "--budget needs the sizes of the experts"),
    ({"budget": "much", "model": DEMO}, "--budget much: expected a size"),
    ({"out": DEMO}, "is not a map"),
])  # fmt: skip
def test_refused_before_traces_are_read(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MoestreamError, match=message):
        map_command.make(NONE, **{"out": tmp_path / "m", **settings})


def demo_trace(path: Path, **change: Any) -> Path:
    facts = gguf_facts.read(DEMO)
    model = {"fingerprint": fingerprint(facts), "architecture": facts.architecture, "name": DEMO.name}
    layers = [{"layer": layer, "n_expert": facts.layer_tensors(layer)[0].n_expert} for layer in facts.moe_layers]
    header = {"model": model, "n_expert_used": facts.n_expert_used, "layers": layers, **change}
    path.write_bytes(trace_bytes([(0, [list(range(facts.n_expert_used))])], header))
    return path


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"layer": 0, "n_expert": 65}, "65 experts in layer 0, and .* has 64 there"),
        ({"layer": 99, "n_expert": 64}, "no experts there"),
    ],
)
def test_layers_that_the_model_does_not_have(tmp_path: Path, layer: dict[str, int], message: str) -> None:
    path = demo_trace(tmp_path / "t", layers=[layer])
    with pytest.raises(MoestreamError, match=message):
        map_command.make([path], tmp_path / "m", model=DEMO)
    read = trace.read(path)
    facts = gguf_facts.read(DEMO)
    check_fingerprint(facts, path, read.model, [(layer, 64) for layer in facts.moe_layers])


def test_equal_slots_where_chosen_ones_read_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo_trace(tmp_path / "t")
    known = trace.read(path).layers

    def replay(_trace: Path, slots: Any = (), *, layer_slots: Any = None, **_how: Any) -> list[Run]:
        def run(n: int | None, misses: int) -> Run:
            layers = tuple(LayerCounts(m.layer, n or layer_slots[m.layer], 0, misses // n if n else misses, 0) for m in known)
            return Run("lru", n, 0, 0, 0, 0, 0, 0, layers)

        return [run(n, 6400) for n in slots] if layer_slots is None else [run(None, 100_000)]

    monkeypatch.setattr(map_command.replaying, "replay", replay)
    size = gguf_facts.read(DEMO).bytes_per_slot(0)
    result = map_command.make([path], tmp_path / "m", budget=str(size * len(known) * 20 + size), model=DEMO)
    assert set((maps.read(tmp_path / "m").slots or {}).values()) == {20} == set(result.data["slots"].values())
    assert result.data["missed_bytes"] == result.data["missed_bytes_alike"]
    assert "with 20 slots in every layer: slots chosen by layer would read more (lru)" in result.text
