"""Slots in the memory of a card: how many fit, what is below them, and how fast that is. Pure.

The numbers are those of the engine (``decide_slots`` and ``device_ram_budget`` in engine/hooks/), for one card that takes all layers.

A token's weights pass through the card's memory once; beside that a kernel or two of each tensor take their time, however small it is:
``TENSOR_S``, from two models on one card (docs/cuda.md). What is missed is copied by kernels at ``LINK_SHARE`` of what the link's own copies
reach, in part while the card computes: both together are taken as ``(a^p + b^p)^(1/p)``, with a p that fits what was measured from 8 to 96 slots. What
neither slots nor RAM tier have is read meanwhile, and waited for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moestream.gguf_facts import GgufFacts
from moestream.planning import memory, speed, state
from moestream.planning.card_rates import CardRates
from moestream.planning.hits import HitModel
from moestream.planning.memory import RAM_AUTO, Wishes
from moestream.planning.speed import total_s

TENSOR_S = 4.8e-6
LINK_SHARE = 0.88
_OVERLAP = 1.5  # p
_LARGEST_BATCH = 8  # tokens that go through slots on a card, at most
_NEIGHBOURS = (0.5, 0.75, 1.25, 1.5)
_MIB = 1 << 20


@dataclass(frozen=True)
class CardSpeed:
    """A prediction for one number of slots.

    Attributes:
        missed_bytes: that a token needs over the link.
        read_bytes: of these, what neither slots nor RAM tier have.
        seconds: of a token, by what takes it: ``compute``, ``link``, ``disk``; None: needed, and not measured.
        tokens_per_s: None where one of them is not known.
        tokens_per_s_at_most: what link and drive allow, however fast the card computes; None where one of them is needed and not measured, or
            nothing is missed.
        limit: what takes most of the time; empty where it is not known.
    """

    slots: int
    hit_rate: float
    missed_bytes: float
    read_bytes: float
    seconds: dict[str, float | None]
    tokens_per_s: float | None
    tokens_per_s_at_most: float | None
    limit: str


@dataclass(frozen=True)
class CardPlan:
    """What a start with all layers on the card comes to.

    Attributes:
        slots: of each layer, as asked for or as many as fit; fewer than ``least_slots``: not even those of a token fit.
        most_slots: that fit.
        free_bytes: of the card, before anything is there.
        usable_bytes: without the margin that the engine leaves.
        budgeted_bytes: what the engine reckons for these slots, on the card.
        staging_bytes: on the card; 0 where every expert has a slot.
        ram_tier_bytes: page-locked memory of the machine.
        link_bytes_s: of copies from page-locked memory to the card; None: not measured.
        speed: with these slots.
        rows: the same with more and fewer, in order, and whether they fit.
    """

    slots: int
    least_slots: int
    most_slots: int
    n_expert: int
    free_bytes: int
    usable_bytes: int
    budgeted_bytes: int
    staging_bytes: int
    ram_tier_bytes: int
    link_bytes_s: float | None
    speed: CardSpeed
    rows: tuple[tuple[CardSpeed, int, bool], ...]  # with bytes on the card

    @property
    def fits(self) -> bool:
        return self.slots >= self.least_slots and self.budgeted_bytes <= self.usable_bytes

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "budgeted_bytes": size, "fits": fits} for row, size, fits in self.rows]
        of_speed = {k: v for k, v in asdict(self.speed).items() if k != "slots"}
        whole = {k: v for k, v in asdict(self).items() if k not in ("speed", "rows")}
        return {**whole, **of_speed, "fits": self.fits, "table": rows}


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


def looks_after(stats: Mapping[str, Any]) -> str:
    """Who looks after the slots of a server whose experts are all on cards: ``mailbox``, ``copy``, or ``resident`` where nothing is missing; empty
    where the processor computes with some.

    Args:
        stats: docs/stats.md.
    """
    places = re.split(r", (?![^(]*\))", stats.get("placement") or "cpu")
    on_cards = all(place.startswith("CUDA") for place in places)
    return str((stats.get("gpu_path") or {}).get("in_force") or "") if on_cards else ""


def expected(in_ram: Mapping[str, int], made: CardPlan, path: str) -> dict[str, int]:
    """What a server takes, by purpose as docs/stats.md has it.

    Args:
        in_ram: the same with as many slots in RAM.
        path: see ``looks_after``.
    """
    own = {
        **in_ram,
        "guess_bytes": 0,
        "ram_bytes": made.ram_tier_bytes if path == "mailbox" else 0,
        "staging_bytes": made.staging_bytes,
    }
    return {**own, "total_bytes": sum(size for name, size in own.items() if name != "total_bytes")}


def compute_s(facts: GgufFacts, rates: CardRates) -> float | None:
    """Of a token, with all that it needs in the card's memory."""
    if rates.memory_bytes_s is None:
        return None
    return speed.active_bytes(facts) / rates.memory_bytes_s + facts.n_tensor * TENSOR_S


def predict(
    facts: GgufFacts, hits: HitModel, rates: CardRates, *, slots: int, ram_tier_bytes: int, disk_bytes_s: float | None
) -> CardSpeed:
    """Predict speeds with so many slots on the card, and so much memory below them."""
    needed = missed = hit = 0.0
    experts = 0
    for layer in facts.moe_layers_served:
        used, rate = sum(hits.chosen[layer]), hits.hit_rate(layer, slots)
        needed += used
        hit += used * rate
        missed += used * (1 - rate) * facts.bytes_per_slot(layer)
        experts += facts.layer_tensors(layer)[0].n_expert * facts.bytes_per_slot(layer)
    read = missed * max(0.0, 1 - ram_tier_bytes / experts)
    seconds = {
        "compute": compute_s(facts, rates),
        "link": 0.0 if missed <= 0 else missed / (LINK_SHARE * rates.link_bytes_s) if rates.link_bytes_s else None,
        "disk": 0.0 if read <= 0 else read / disk_bytes_s if disk_bytes_s else None,
    }
    computes, link, disk = seconds.values()
    whole = None
    if computes is not None and link is not None:
        whole = total_s({"card": (computes**_OVERLAP + link**_OVERLAP) ** (1 / _OVERLAP), "disk": disk})
    at_most = total_s({"link": link and LINK_SHARE * link, "disk": disk})
    return CardSpeed(
        slots=slots,
        hit_rate=hit / needed if needed else 1.0,
        missed_bytes=missed,
        read_bytes=read,
        seconds=seconds,
        tokens_per_s=1 / whole if whole else None,
        tokens_per_s_at_most=1 / at_most if at_most else None,
        limit="" if whole is None else max(seconds, key=lambda name: seconds[name] or 0.0),
    )


def decide(
    facts: GgufFacts, wishes: Wishes, hits: HitModel, *, free_bytes: int, available_bytes: int, rates: CardRates,
    disk_bytes_s: float | None,
) -> CardPlan:  # fmt: skip
    """Plan.

    Args:
        facts: of a model with experts.
        free_bytes: of the card.
        available_bytes: memory of the machine.
        disk_bytes_s: reads of experts from the drive; None: not measured.
    """
    n_used, n_expert = facts.n_expert_used, max(t.n_expert for t in facts.expert_tensors)
    slot_bytes = sum(t.bytes_per_expert for t in facts.expert_tensors)
    staging = 2 * memory.half_bytes(facts, facts.moe_layers)
    resident = facts.dense_bytes + state.budgeted(facts, wishes.context) + memory.compute_budgeted(facts, wishes.context)
    resident += (wishes.in_flight or memory.MAX_IN_FLIGHT) * memory.CHUNK_BYTES + staging
    can = usable(free_bytes)
    all_fit = resident + n_expert * slot_bytes <= can
    most = n_expert if all_fit else min(max(0, can - resident) // slot_bytes, n_expert - 1)
    slots = most if wishes.slots is None else min(wishes.slots, n_expert)
    tier = _ram_tier(facts, wishes, available_bytes)

    def row(n: int) -> tuple[CardSpeed, int, bool]:
        predicted = predict(facts, hits, rates, slots=n, ram_tier_bytes=0 if n >= n_expert else tier, disk_bytes_s=disk_bytes_s)
        size = resident + n * slot_bytes
        return predicted, size, n_used <= n and size <= can

    counts = {min(max(round(slots * f), n_used), n_expert) for f in _NEIGHBOURS}
    is_all = slots >= n_expert
    return CardPlan(
        slots=slots,
        least_slots=n_used,
        most_slots=most,
        n_expert=n_expert,
        free_bytes=free_bytes,
        usable_bytes=can,
        budgeted_bytes=resident + slots * slot_bytes,
        staging_bytes=0 if is_all else staging,
        ram_tier_bytes=0 if is_all else tier,
        link_bytes_s=rates.link_bytes_s,
        speed=row(slots)[0],
        rows=tuple(row(n) for n in sorted(counts | {max(slots, n_used), n_used, n_expert})),
    )
