"""Slots in the memory of a card: how many fit, what is below them, and what the link to the card allows. Pure.

The numbers are those of the engine (``decide_slots`` and ``device_ram_budget`` in engine/moe-hooks.cpp), for one card that takes all layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moestream.gguf_facts import GgufFacts
from moestream.planning import memory, state
from moestream.planning.hits import HitModel
from moestream.planning.memory import RAM_AUTO, Wishes
from moestream.planning.speed import total_s

_LARGEST_BATCH = 8  # tokens that go through slots on a card, at most
_MIB = 1 << 20


@dataclass(frozen=True)
class CardPlan:
    """What a start with all layers on the card comes to.

    Attributes:
        slots: of each layer; fewer than ``least_slots``: not even those of a token fit.
        free_bytes: of the card, before anything is there.
        usable_bytes: without the margin that the engine leaves.
        budgeted_bytes: what the engine reckons for these slots, on the card.
        staging_bytes: on the card; 0 where every expert has a slot.
        ram_tier_bytes: page-locked memory of the machine.
        missed_bytes: that a token needs over the link.
        read_bytes: of these, what neither slots nor RAM tier have.
        link_bytes_s: of copies from page-locked memory to the card; None: not measured.
        tokens_per_s_at_most: what link and drive allow, one after the other, however fast the card computes; None where one of them is needed
            and not measured, or nothing is missed.
    """

    slots: int
    least_slots: int
    n_expert: int
    free_bytes: int
    usable_bytes: int
    budgeted_bytes: int
    staging_bytes: int
    ram_tier_bytes: int
    hit_rate: float
    missed_bytes: float
    read_bytes: float
    link_bytes_s: float | None
    tokens_per_s_at_most: float | None

    @property
    def fits(self) -> bool:
        return self.slots >= self.least_slots and self.budgeted_bytes <= self.usable_bytes

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def usable(free_bytes: int) -> int:
    """Of a card's free memory: upstream wants a GiB to be left, and the driver takes some."""
    return free_bytes - (free_bytes // 20 + min(1280 * _MIB, free_bytes // 4))


def _ram_tier(facts: GgufFacts, wishes: Wishes, available_bytes: int) -> int:
    """Bytes of page-locked slabs: as asked for; else half of what is available; and always enough to hand a batch's experts over."""
    slabs = {layer: memory.slab_bytes(facts, layer) for layer in facts.moe_layers_served}
    experts = sum(size * facts.layer_tensors(layer)[0].n_expert for layer, size in slabs.items())
    least = min(experts, 2 * _LARGEST_BATCH * facts.n_expert_used * max(slabs.values()) * len(set(slabs.values())))
    wanted = wishes.ram_tier_bytes
    if wanted is None or wanted == RAM_AUTO:
        most = max(0, memory.usable(available_bytes))
        wanted = most if wanted == RAM_AUTO else min(most, available_bytes // 2)
    return min(max(wanted, least), experts)


def decide(
    facts: GgufFacts, wishes: Wishes, hits: HitModel, *, free_bytes: int, available_bytes: int, link_bytes_s: float | None,
    disk_bytes_s: float | None,
) -> CardPlan:  # fmt: skip
    """Plan.

    Args:
        facts: of a model with experts.
        free_bytes: of the card.
        available_bytes: memory of the machine.
        link_bytes_s: copies from page-locked memory to the card; None: not measured.
        disk_bytes_s: reads of experts from the drive; None: not measured.
    """
    n_used, n_expert = facts.n_expert_used, max(t.n_expert for t in facts.expert_tensors)
    slot_bytes = sum(t.bytes_per_expert for t in facts.expert_tensors)
    staging = 2 * memory.half_bytes(facts, facts.moe_layers)
    resident = facts.dense_bytes + state.budgeted(facts, wishes.context) + memory.compute_budgeted(facts, wishes.context)
    resident += (wishes.in_flight or memory.MAX_IN_FLIGHT) * memory.CHUNK_BYTES + staging
    can = usable(free_bytes)
    if wishes.slots is not None:
        slots = min(wishes.slots, n_expert)
    elif resident + n_expert * slot_bytes <= can:
        slots = n_expert
    else:
        slots = min(max(0, can - resident) // slot_bytes, n_expert - 1)
    is_all = slots >= n_expert
    tier = 0 if is_all else _ram_tier(facts, wishes, available_bytes)

    needed = missed = hit = 0.0
    experts = 0
    for layer in facts.moe_layers_served:
        used, rate = sum(hits.chosen[layer]), hits.hit_rate(layer, slots)
        needed += used
        hit += used * rate
        missed += used * (1 - rate) * facts.bytes_per_slot(layer)
        experts += facts.layer_tensors(layer)[0].n_expert * facts.bytes_per_slot(layer)
    read = missed * max(0.0, 1 - tier / experts)
    seconds = total_s(
        {
            "link": 0.0 if missed <= 0 else missed / link_bytes_s if link_bytes_s else None,
            "disk": 0.0 if read <= 0 else read / disk_bytes_s if disk_bytes_s else None,
        }
    )
    return CardPlan(
        slots=slots,
        least_slots=n_used,
        n_expert=n_expert,
        free_bytes=free_bytes,
        usable_bytes=can,
        budgeted_bytes=resident + slots * slot_bytes,
        staging_bytes=0 if is_all else staging,
        ram_tier_bytes=tier,
        hit_rate=hit / needed if needed else 1.0,
        missed_bytes=missed,
        read_bytes=read,
        link_bytes_s=link_bytes_s,
        tokens_per_s_at_most=1 / seconds if seconds else None,
    )
