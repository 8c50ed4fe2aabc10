"""Slots on a card: the engine's sums, what is below them, and what the link allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moestream import gguf_facts, paths
from moestream.gguf_facts import GgufFacts
from moestream.planning import card, hits, memory, speed, state
from moestream.planning.card_rates import CardRates
from moestream.planning.memory import RAM_AUTO, Wishes
from moestream.planning.state import ContextShape

MIB = 1 << 20
CONTEXT = ContextShape(2048, 1, False)
SLOT = 8 * 3 * 96 * 384 * 18 // 32  # one of every layer of the demo model
SLAB = 62208  # an expert of it: each part is a multiple of 64
EXPERTS = 8 * 64 * SLAB


@pytest.fixture(scope="module")
def facts() -> GgufFacts:
    return gguf_facts.read(paths.demo_model())


def plan(facts: GgufFacts, free: int, wishes: Wishes | None = None, **more: Any) -> card.CardPlan:
    rates = CardRates(more.pop("link_bytes_s", None), more.pop("memory_bytes_s", None))
    given = {"available_bytes": 1 << 30, "rates": rates, "disk_bytes_s": None, **more}
    return card.decide(facts, wishes or Wishes(CONTEXT), hits.assumed(facts), free_bytes=free, **given)


def resident(facts: GgufFacts) -> int:
    """By the rules of the engine: everything but slots, staging always among it."""
    rest = facts.dense_bytes + state.budgeted(facts, CONTEXT) + memory.compute_budgeted(facts, CONTEXT)
    return rest + memory.MAX_IN_FLIGHT * memory.CHUNK_BYTES + 2 * memory.half_bytes(facts, facts.moe_layers)


def needs(usable_bytes: int) -> int:
    """The least free memory of which so much is usable."""
    free = usable_bytes
    while card.usable(free) < usable_bytes:
        free += 4096
    return free


def test_the_margin_of_a_card() -> None:
    assert card.usable(8 << 30) == (8 << 30) - ((8 << 30) // 20 + 1280 * MIB)
    assert card.usable(1 << 30) == (1 << 30) - ((1 << 30) // 20 + (1 << 28))


@pytest.mark.parametrize("n", [6, 7, 32, 63])
def test_as_many_slots_as_fit(facts: GgufFacts, n: int) -> None:
    made = plan(facts, needs(resident(facts) + n * SLOT))
    assert made.slots == n and made.fits and made.budgeted_bytes == resident(facts) + n * SLOT <= made.usable_bytes
    assert made.staging_bytes == 2 * memory.half_bytes(facts, facts.moe_layers) > 0
    less = plan(facts, needs(resident(facts) + n * SLOT) - 8192)
    assert less.slots == n - 1 and less.fits == (n > 6)


def test_all_of_them_need_no_staging_and_no_tier(facts: GgufFacts) -> None:
    made = plan(facts, 1 << 30, link_bytes_s=1e9)
    assert (made.slots, made.staging_bytes, made.ram_tier_bytes, made.speed.missed_bytes) == (64, 0, 0, 0)
    assert made.speed.hit_rate == 1 and made.speed.tokens_per_s_at_most is None
    assert plan(facts, needs(resident(facts) + 64 * SLOT) - 8192).slots == 63


def test_a_number_that_was_asked_for(facts: GgufFacts) -> None:
    made = plan(facts, needs(resident(facts) + 20 * SLOT), Wishes(CONTEXT, slots=30))
    assert made.slots == 30 and not made.fits
    assert plan(facts, MIB).slots == 0


def test_what_is_below_them(facts: GgufFacts) -> None:
    free = needs(resident(facts) + 8 * SLOT)
    least = 2 * 8 * 6 * SLAB
    assert plan(facts, free).ram_tier_bytes == EXPERTS, "half of a GiB holds all"
    assert plan(facts, free, available_bytes=40 * MIB).ram_tier_bytes == 20 * MIB, "half of what there is"
    assert plan(facts, free, available_bytes=2 * MIB).ram_tier_bytes == least, "what a batch needs, in any case"
    asked = Wishes(CONTEXT, ram_tier_bytes=12 * MIB)
    assert plan(facts, free, asked).ram_tier_bytes == 12 * MIB
    assert plan(facts, free, replace(asked, ram_tier_bytes=1)).ram_tier_bytes == least
    assert plan(facts, free, replace(asked, ram_tier_bytes=0)).ram_tier_bytes == least, "none is not the same as nothing said"
    assert plan(facts, free, replace(asked, ram_tier_bytes=1 << 40)).ram_tier_bytes == EXPERTS
    auto = plan(facts, free, replace(asked, ram_tier_bytes=RAM_AUTO), available_bytes=30 * MIB)
    assert auto.ram_tier_bytes == memory.usable(30 * MIB)


def test_what_link_and_drive_allow(facts: GgufFacts) -> None:
    free = needs(resident(facts) + 16 * SLOT)
    made = plan(facts, free, link_bytes_s=2e9).speed
    assert 0 < made.hit_rate < 1 and made.read_bytes == 0
    assert made.missed_bytes == pytest.approx(8 * 6 * (1 - made.hit_rate) * SLAB)
    assert made.tokens_per_s_at_most == pytest.approx(2e9 / made.missed_bytes)
    assert (made.tokens_per_s, made.limit) == (None, ""), "how fast the card computes is not known"
    half = plan(facts, free, available_bytes=EXPERTS, link_bytes_s=2e9, disk_bytes_s=1e8).speed  # the tier has half of them
    assert half.read_bytes == pytest.approx(made.missed_bytes / 2)
    assert half.tokens_per_s_at_most == pytest.approx(1 / (half.missed_bytes / 2e9 + half.read_bytes / 1e8))
    no_drive = plan(facts, free, available_bytes=EXPERTS, link_bytes_s=2e9, memory_bytes_s=1e11).speed
    assert no_drive.tokens_per_s_at_most is None and no_drive.tokens_per_s is None, "the drive is not measured"
    assert plan(facts, free, available_bytes=EXPERTS, disk_bytes_s=1e8).speed.tokens_per_s_at_most is None, "the link is not"


def test_how_fast_a_card_is(facts: GgufFacts) -> None:
    free = needs(resident(facts) + 16 * SLOT)
    everything = plan(facts, 1 << 30, memory_bytes_s=1e11).speed
    computes = speed.active_bytes(facts) / 1e11 + facts.n_tensor * card.TENSOR_S
    assert everything.tokens_per_s == pytest.approx(1 / computes) and everything.limit == "compute"
    made = plan(facts, free, memory_bytes_s=1e11, link_bytes_s=2e9).speed
    link = made.missed_bytes / (card.LINK_SHARE * 2e9)
    assert made.seconds == {"compute": pytest.approx(computes), "link": pytest.approx(link), "disk": 0.0}
    assert made.tokens_per_s is not None and max(computes, link) < 1 / made.tokens_per_s < computes + link, "in part at once"
    assert made.limit == ("link" if link > computes else "compute")
    read = plan(facts, free, available_bytes=EXPERTS, memory_bytes_s=1e11, link_bytes_s=2e9, disk_bytes_s=1e8).speed
    assert read.tokens_per_s is not None and read.seconds["disk"] == pytest.approx(read.read_bytes / 1e8)
    assert 1 / read.tokens_per_s == pytest.approx(1 / made.tokens_per_s + read.read_bytes / 1e8), "reads are waited for"
    assert read.limit == "disk"


@pytest.mark.parametrize(
    ("placement", "path"),
    [("CUDA0", "mailbox"), ("CUDA0 (4 layers), CUDA1 (4 layers)", "mailbox"), ("CUDA0 (5 layers), cpu (3 layers)", ""), ("cpu", ""), (None, "")],
)  # fmt: skip
def test_who_looks_after_the_slots(placement: str | None, path: str) -> None:
    assert card.looks_after({"placement": placement, "gpu_path": {"in_force": "mailbox"}}) == path
    assert card.looks_after({"placement": placement, "gpu_path": None}) == ""


def test_more_slots_and_fewer(facts: GgufFacts) -> None:
    made = plan(facts, needs(resident(facts) + 16 * SLOT), memory_bytes_s=1e11, link_bytes_s=2e9)
    assert [row.slots for row, _, _ in made.rows] == [6, 8, 12, 16, 20, 24, 64]
    assert [fits for _, _, fits in made.rows] == [True] * 4 + [False] * 3
    speeds = [row.tokens_per_s for row, _, _ in made.rows]
    assert None not in speeds and speeds == sorted(speeds)
    assert [size for _, size, _ in made.rows] == [resident(facts) + row.slots * SLOT for row, _, _ in made.rows]
    told = made.as_json()
    assert told["hit_rate"] == made.speed.hit_rate and told["table"][0]["slots"] == 6 and "speed" not in told


# What was measured on one H200 (docs/cuda.md): a model of 576 tensors, tokens that miss so many experts of 2.65 MB; its 4.2 TB/s are assumed.
@pytest.mark.parametrize(
    ("missed", "measured"), [(0, 320.3), (21.1, 265.2), (42.7, 224.1), (100.8, 150.0), (170.5, 101.4), (235.1, 74.8)]
)
def test_the_rule_is_near_what_was_measured(missed: float, measured: float) -> None:
    class Facts:
        n_tensor = 579
        moe_layers_served = (0,)
        n_expert_used = 1
        dense_bytes, dense_bytes_mtp, token_embd_bytes, output_is_tied = 1018224640, 0, 2228224, False

        def bytes_per_slot(self, _layer: int) -> int:
            return 48 * 8 * 2654208

        def n_expert_used_in(self, _layer: int) -> int:
            return 1

        def layer_tensors(self, _layer: int) -> list[Any]:
            return [type("T", (), {"n_expert": 16})]

    class Hits:
        chosen = ([1.0],)

        def hit_rate(self, _layer: int, _slots: int) -> float:
            return 1 - missed / (48 * 8)

    got = card.predict(
        Facts(),
        Hits(),
        CardRates(55e9, 4.2e12),
        slots=1,
        ram_tier_bytes=1 << 50,
        disk_bytes_s=None,  # type: ignore[arg-type]
    )
    assert got.tokens_per_s == pytest.approx(measured, rel=0.12)
