"""A plan for one model on one machine. Pure: what was measured is an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import architectures, memory, speed, state
from moestream.planning.hits import HitModel
from moestream.planning.memory import MemoryPlan, Wishes
from moestream.planning.speed import Rates, Speed
from moestream.server import report

_NEIGHBOURS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
VRAM_MARGIN = 0.1  # for the driver and its library


@dataclass(frozen=True)
class Budget:
    """What a plan may use.

    Attributes:
        available_bytes: memory for the server.
        limited_by: what sets that: ``MemAvailable``, ``cgroup`` and its path, or ``--ram``.
        cores: to compute with.
        vram_bytes: free memory of GPUs that the engine uses; None: it uses none.
    """

    available_bytes: int
    limited_by: str
    cores: int
    vram_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """What planning knows of a machine: see Budget for most.

    Attributes:
        rates: see ``speed.Rates``.
    """

    available_bytes: int
    limited_by: str
    cores: int
    rates: Rates
    vram_bytes: int | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.available_bytes, self.limited_by, self.cores, self.vram_bytes)


@dataclass(frozen=True)
class Settled:
    """Where everything goes.

    Attributes:
        on_gpu: dense weights, KV cache and compute buffers are in the memory of GPUs.
        misfit: what to say of slots that were asked for and do not fit; None: they do.
        notices: what else the reader should know.
    """

    memory: MemoryPlan
    on_gpu: bool
    misfit: str | None
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A number of slots, what it takes, and how fast it will be."""

    slots: int
    fits: bool
    total_bytes: int
    speed: Speed

    def as_json(self) -> dict[str, Any]:
        return {"slots": self.slots, "fits": self.fits, "total_bytes": self.total_bytes, **speed_json(self.speed)}


@dataclass(frozen=True)
class Plan:
    """What a start will do, and how fast that is expected to be.

    Attributes:
        settled: the slots, and what everything takes.
        speed: with these.
        rows: for the neighbouring numbers of slots, and for these.
        target_slots: the fewest slots that reach the speed that was asked for; None: no number does, or none was asked for.
        ram_tier_experts: experts of all layers that the RAM tier holds.
        notices: what the reader should know.
    """

    settled: Settled
    speed: Speed
    hits: HitModel
    rows: tuple[Row, ...]
    target_slots: int | None
    ram_tier_experts: int
    notices: tuple[str, ...]

    @property
    def memory(self) -> MemoryPlan:
        return self.settled.memory

    @property
    def on_gpu(self) -> bool:
        return self.settled.on_gpu


def speed_json(s: Speed) -> dict[str, Any]:
    return {
        "hit_rate": round(s.hit_rate, 5), "ram_rate": round(s.ram_rate, 5), "read_bytes_per_token": round(s.read_bytes),
        "ram_bytes_per_token": round(s.ram_bytes), "seconds": s.seconds, "tokens_per_s": s.tokens_per_s,
        "prompt_512_s": s.prompt_s, "limit": s.limit, "prompt_limit": s.prompt_limit,
    }  # fmt: skip


def resident_bytes(facts: GgufFacts, wishes: Wishes) -> int:
    """What a GPU would have to hold for everything but experts to be there."""
    return (
        facts.dense_bytes
        - facts.dense_bytes_mtp
        + state.expected(facts, wishes.context)
        + memory.compute_expected(facts, wishes.context)
    )


def settle(facts: GgufFacts, budget: Budget, wishes: Wishes, *, by_start: bool = False) -> Settled:
    """Decide about slots, and where everything goes.

    Args:
        by_start: hints are for ``start``, not for ``plan``.

    Raises:
        MoestreamError: the model has no experts, or not even the slots of one token fit; says what would.
    """
    name = facts.name or facts.files[0].name
    if not facts.is_moe:
        raise MoestreamError(
            f"{name} ({facts.architecture}) is not a mixture-of-experts model: it has no experts to stream",
            hint="there is nothing to plan; moestream start --slots off serves it",
        )
    if wishes.slots is not None and wishes.slots < facts.n_expert_used:
        raise MoestreamError(
            f"--slots {wishes.slots}: too few, a token of {name} uses {facts.n_expert_used} experts in a layer",
            hint=f"the smallest is --slots {facts.n_expert_used}",
        )
    notices: list[str] = []
    on_gpu = False
    if budget.vram_bytes is not None:
        wanted = resident_bytes(facts, wishes)
        on_gpu = wanted <= budget.vram_bytes * (1 - VRAM_MARGIN)
        if not on_gpu:
            notices.append(
                f"dense weights, KV cache and compute buffers take {report.size(wanted)}, more than the "
                f"{report.size(budget.vram_bytes)} of GPU memory less {VRAM_MARGIN:.0%}: they are planned in RAM"
            )
        if by_start:
            notices.append("expert slots are in RAM and computed with on the CPU, whatever a GPU has")
        else:
            notices.append(
                "slots, the first table and the last command are of slots in RAM, computed with on the CPU; slots on the card are told apart"
            )
    decided = memory.decide(facts, wishes, budget.available_bytes, resident_elsewhere=on_gpu)
    misfit = None
    if decided.slots < decided.least_slots:
        raise _refusal(facts, budget, wishes, decided, on_gpu, by_start)
    if not decided.fits:
        most = memory.decide(facts, replace(wishes, slots=None), budget.available_bytes, resident_elsewhere=on_gpu).slots
        what = f"{most} slots fit" if most >= decided.least_slots else "no number of slots fits"
        misfit = (
            f"{decided.slots} slots do not fit: they need {report.size(decided.budgeted_bytes)}, and with a margin "
            f"{report.size(decided.usable_bytes)} of {report.size(budget.available_bytes)} may be used; {what}"
        )
    return Settled(decided, on_gpu, misfit, tuple(notices))


def make_plan(facts: GgufFacts, machine: Machine, wishes: Wishes, hits: HitModel, *, target_tps: float | None = None) -> Plan:
    """Plan.

    Raises:
        MoestreamError: the model has no experts, or not even the slots of one token fit; says what would.
    """
    settled = settle(facts, machine.budget, wishes)
    decided, on_gpu = settled.memory, settled.on_gpu
    notices = [*settled.notices, *filter(None, [settled.misfit])]
    if facts.architecture not in architectures.KNOWN:
        notices.append(
            f"the architecture {facts.architecture} is not known to the planner: it is planned as if it had nothing of its own"
        )
    elif not state.is_known(facts):
        notices.append(f"{facts.architecture} has caches beside KV that are not reckoned with: its KV bytes are a lower bound")

    def row(slots: int) -> Row:
        own = memory.decide(facts, replace(wishes, slots=slots), machine.available_bytes, resident_elsewhere=on_gpu)
        predicted = speed.predict(
            facts, hits, machine.rates, slots=own.slots, ram_bytes=own.sizes.ram_bytes,
            ubatch=min(wishes.context.n_ubatch, wishes.context.n_ctx), cached=own.cached,
        )  # fmt: skip
        return Row(own.slots, own.fits, own.sizes.total_bytes, predicted)

    counts = {min(max(round(decided.slots * f), decided.least_slots), decided.n_expert) for f in _NEIGHBOURS}
    rows = tuple(row(n) for n in sorted(counts | {decided.slots, decided.least_slots, decided.n_expert}))
    own_speed = next(r.speed for r in rows if r.slots == decided.slots)
    target = None
    if target_tps is not None:
        target, said = _for_target(target_tps, row, decided, machine)
        notices += said
    expert = sum(facts.bytes_per_slot(layer) for layer in facts.moe_layers_served) / len(facts.moe_layers_served)
    tier = decided.sizes.ram_bytes
    return Plan(settled, own_speed, hits, rows, target, int(tier / expert), tuple(notices))


def _for_target(target_tps: float, row: Any, decided: MemoryPlan, machine: Machine) -> tuple[int | None, list[str]]:
    """The fewest slots that reach a speed, and what to say of it."""
    best = row(decided.n_expert)
    if best.speed.tokens_per_s is None or best.speed.tokens_per_s < target_tps:
        return None, [
            f"{target_tps:g} tok/s is more than this machine computes with all experts in memory: "
            f"{best.speed.tokens_per_s or 0:.1f} ({best.speed.limit})"
        ]
    low, high = decided.least_slots, decided.n_expert
    while low < high:
        middle = (low + high) // 2
        reached = row(middle).speed.tokens_per_s
        low, high = (low, middle) if reached is not None and reached >= target_tps else (middle + 1, high)
    found = row(low)
    if found.fits:
        return low, [f"{target_tps:g} tok/s are reached from {low} slots on, which fit"]
    need = memory.available_for(found.total_bytes)
    return low, [
        f"{target_tps:g} tok/s are reached from {low} slots on, which do not fit: with about {report.size(need)} of memory they "
        f"would, {report.size(machine.available_bytes)} are there"
    ]


def _refusal(
    facts: GgufFacts, budget: Budget, wishes: Wishes, decided: MemoryPlan, on_gpu: bool, by_start: bool
) -> MoestreamError:
    need = memory.available_for(decided.least_bytes)
    ways = []
    context = memory.largest_context(facts, wishes, budget.available_bytes, resident_elsewhere=on_gpu)
    if context:
        ways.append(f"--ctx {context}")
    small = replace(wishes, context=replace(wishes.context, type_k="Q8_0", type_v="Q8_0"))
    if wishes.context.type_k == wishes.context.type_v == "F16":
        smaller = memory.decide(facts, small, budget.available_bytes, resident_elsewhere=on_gpu)
        if smaller.slots >= smaller.least_slots:
            ways.append(f"{'-- ' if by_start else ''}--cache-type-k q8_0 --cache-type-v q8_0")
    if wishes.ram_tier_bytes:
        ways.append("no --ram-tier")
    ways.append(f"{report.size(need)} of memory")
    if by_start and budget.limited_by != "--ram":
        ways.append(f"--slots {decided.least_slots} to try all the same")
    return MoestreamError(
        f"{decided.least_slots} slots a layer, what one token uses, need {report.size(decided.least_bytes)}, and with a margin "
        f"{report.size(decided.usable_bytes)} of the {report.size(budget.available_bytes)} available ({budget.limited_by}) may be used",
        hint="what would do: " + ", or ".join(ways),
    )
