"""The hit-rate curve from recorded routing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench import routing
from moestream.errors import MoestreamError


def steps(*rows):
    return [np.array(r) for r in rows]


def test_lru_by_hand():
    #             cache of 3:  01 -> 012 (1 hit) -> 203 evicts 1 -> 1 is a miss again
    recorded = steps([0, 1], [1, 2], [0, 2], [3], [1])
    assert routing.lru_hit_rate(recorded, 3, n_warm_up=0) == pytest.approx((0 + 1 + 2 + 0 + 0) / 8)
    assert routing.lru_hit_rate(recorded, 4, n_warm_up=0) == pytest.approx((0 + 1 + 2 + 0 + 1) / 8)


def test_a_step_never_evicts_what_it_uses_itself():
    assert routing.lru_hit_rate(steps([0, 1], [2, 0], [0, 2]), 2, n_warm_up=0) == pytest.approx(3 / 6)


def test_warm_up_fills_but_does_not_count():
    assert routing.lru_hit_rate(steps([0, 1], [0, 1]), 2, n_warm_up=1) == 1.0


def test_too_few_slots_are_no_rate():
    assert math.isnan(routing.lru_hit_rate(steps([0, 1, 2], [0, 1, 2]), 2, n_warm_up=0))


def test_all_slots_hit_everything_and_the_curve_rises():
    ids = np.random.default_rng(1).integers(0, 16, (200, 3, 1, 2))
    c = routing.curve(ids, 16, slots=(2, 4, 8, 16))
    assert list(c.hits) == sorted(c.hits)
    assert c.at(16) == pytest.approx(1.0, abs=0.01)
    assert c.at(5) is None
    assert c.distinct == 16 and c.n_tokens == 200 - routing.N_WARM_UP


def test_too_few_slots_for_parallel_sequences_are_unknown():
    ids = np.array([[[[0, 1], [2, 3]]]] * 100)
    c = routing.curve(ids, 4, slots=(2, 4))
    assert c.hits == (None, 1.0) and c.hits_min == (None, 1.0)
    assert c.text().splitlines()[1].split() == ["LRU", "hits", "-", "100.0%"]


def test_collapsed_routing_shows():
    c = routing.curve(np.tile(np.array([[[1, 2]]]), (100, 2, 1, 1)), 16, slots=(2, 8))
    assert c.distinct == 2 and c.overlap == 1.0 and c.hits == (1.0, 1.0)


def test_parallel_sequences_share_a_step():
    """Two sequences that use the same experts need them once."""
    ids = np.array([[[[0, 1], [1, 0]]]] * 100)
    assert routing.curve(ids, 4, slots=(2,)).hits == (1.0,)


def test_dump_is_read_in_any_line_order(tmp_path):
    f = tmp_path / "d.csv"
    f.write_text("1,0,5,7,8\n0,0,3,1,2\n0,0,5,3,4\n1,0,3,5,6\n")
    assert routing.read_dump(f).tolist() == [[[[1, 2]], [[3, 4]]], [[[5, 6]], [[7, 8]]]]
    f.write_text("1,0,5,7,8\n0,0,3,1,2\n0,0,5,3,4\n")
    with pytest.raises(MoestreamError, match="incomplete"):
        routing.read_dump(f)


def test_too_short_a_recording():
    with pytest.raises(MoestreamError, match="too few"):
        routing.curve(np.zeros((10, 1, 1, 1), int), 4)


def test_saved_curve_belongs_to_its_file(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"1234")
    c = routing.curve(np.random.default_rng(1).integers(0, 16, (100, 1, 1, 2)), 16, slots=(2, 8))
    routing.save(c, model)
    assert routing.load(model) == c
    model.write_bytes(b"12345")
    assert routing.load(model) is None


def test_text_has_every_slot_count():
    c = routing.curve(np.random.default_rng(1).integers(0, 16, (100, 1, 1, 2)), 16, slots=(2, 8))
    head, hits, *_ = c.text().splitlines()
    assert head.split() == ["slots", "2", "8"]
    assert hits.split()[-1] == f"{c.at(8):.1%}"
