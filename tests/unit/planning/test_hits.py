"""Hit rates: against simulated LRU pools, and their limits."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from moestream import gguf_facts
from moestream.planning import hits
from moestream.routing.maps import MapLayer, RouterMap
from moestream.routing.replay import LayerCounts, Run
from moestream.routing.trace import ModelName

DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"


@pytest.mark.parametrize(
    ("n_expert", "n_used", "exponent"), [(64, 6, 1.0), (128, 8, 0.5), (8, 2, 2.0), (16, 1, 3.0), (4, 4, 1.0)]
)
def test_zipf_is_a_distribution(n_expert: int, n_used: int, exponent: float) -> None:
    chosen = hits.zipf(n_expert, n_used, exponent)
    assert len(chosen) == n_expert and sum(chosen) == pytest.approx(n_used)
    assert all(0 <= q <= 1 for q in chosen) and chosen == sorted(chosen, reverse=True)


def simulated(chosen: list[float], n_slot: int, n_token: int = 4000) -> float:
    """Hits of a real LRU pool whose tokens choose independently."""
    rng = random.Random(7)
    pool: OrderedDict[int, None] = OrderedDict()
    n_hit = n_access = 0
    for _ in range(n_token):
        wanted = [e for e, q in enumerate(chosen) if rng.random() < q]
        n_access += len(wanted)
        for e in wanted:
            n_hit += e in pool
            pool[e] = None
            pool.move_to_end(e)
        while len(pool) > n_slot:
            pool.popitem(last=False)
    return n_hit / n_access


@pytest.mark.parametrize("n_slot", [12, 20, 32, 48])
def test_lru_as_simulated(n_slot: int) -> None:
    chosen = hits.zipf(64, 6)
    assert hits.lru_hit_rate(chosen, n_slot) == pytest.approx(simulated(chosen, n_slot), abs=0.03)


def test_more_slots_hit_more_and_all_hit_always() -> None:
    chosen = hits.zipf(64, 6)
    rates = [hits.lru_hit_rate(chosen, n) for n in range(6, 65)]
    assert rates == sorted(rates) and rates[-1] == 1.0 and rates[0] > 0.2
    assert hits.lru_hit_rate([1.0, 1.0, 0.0, 0.0], 2) == 1.0  # what is never chosen needs no slot


def test_a_map_replaces_the_assumption() -> None:
    facts = gguf_facts.read(DEMO)
    counts = (100,) * 6 + (0,) * 58
    router_map = RouterMap(ModelName("qwen3moe", "demo", "0" * 16), 100, 6, tuple(MapLayer(il, counts) for il in range(7)))
    model = hits.of_map(facts, router_map, "x.map")
    assert model.source == "map" and "100 tokens" in model.words
    assert model.hit_rate(0, 6) == 1.0
    assert model.hit_rate(7, 6) == hits.assumed(facts).hit_rate(7, 6)  # a layer that the map lacks
    assert model.touched(0, 512) == pytest.approx(6)
    assert hits.from_counts([0, 0, 0, 0], 2) == [0.5] * 4


def test_a_replay_counts_before_everything_else() -> None:
    facts = gguf_facts.read(DEMO)
    layers = tuple(LayerCounts(il, 8, 60, 40, 40) for il in range(8))
    run = Run("lru", 8, 480, 320, 0, 320, 100, 0, layers)
    more = replace(run, slots=16, layers=tuple(replace(layer, slots=16, hits=80, misses=20) for layer in layers))
    model = hits.of_replay(hits.assumed(facts), [run, more], "t.trace")
    assert model.source == "replay"
    assert [model.hit_rate(0, n) for n in (8, 12, 16)] == pytest.approx([0.6, 0.7, 0.8])
    assert model.hit_rate(0, 6) == 0.6 and model.hit_rate(0, 40) == 0.8 and model.hit_rate(0, 64) == 1.0
