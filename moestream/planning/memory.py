"""Which slots fit, and what every part of memory takes. Pure; the decisions are the engine's (``decide_slots`` in engine/hooks/load-slots.cpp,
engine/budget.cpp, engine/ram-tier.cpp), in the same numbers, so that a plan says what a start will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moestream.gguf_facts import GgufFacts
from moestream.planning import state
from moestream.planning.state import ContextShape

CHUNK_BYTES = 1 << 20  # reader::default_chunk_size
MAX_IN_FLIGHT = 8
DEFAULT_IN_FLIGHT = 4
PROBE_BYTES_MIN = 64 << 20  # with fewer bytes of experts the engine measures nothing, and takes the default
TENSOR_PAD = 256
SLAB_ALIGNMENT = 64
DIRECT_ALIGNMENT = 512
PROGRAM_BYTES = 8 << 20  # what the engine's last check adds for the program itself, and a 64th
RAM_AUTO = -1

# Types that upstream's CPU kernels want repacked (ggml_repack_get_optimal_repack_type), with AVX2 and with NEON: a tied output then is a
# copy of the token embeddings.
REPACKED_X86 = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
REPACKED_ARM = REPACKED_X86 | {"Q5_K", "Q6_K", "Q8_0"}


def _align(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Wishes:
    """What was asked for.

    Attributes:
        context: see ContextShape.
        slots: in each layer; None: as many as fit. More than there are experts means all.
        ram_tier_bytes: of the RAM tier, ``RAM_AUTO`` for what is left; None: the engine chooses, none below slots in RAM.
        staging: ``auto``, ``full`` or ``ring``.
        in_flight: reads at a time; None: the engine chooses.
        in_flight_expected: what it will probably choose.
        prefetch: whether there is room for guesses.
        io: ``auto``, ``direct`` or ``buffered``.
        repacked: ggml types whose weights are repacked for the processor.
        threads: to compute with; None: as many as there are cores.
        prompt_cache_given: somebody has said how much llama-server may keep of old prompts.
    """

    context: ContextShape
    slots: int | None = None
    ram_tier_bytes: int | None = None
    staging: str = "auto"
    in_flight: int | None = None
    in_flight_expected: int = DEFAULT_IN_FLIGHT
    prefetch: bool = True
    io: str = "auto"
    repacked: frozenset[str] = REPACKED_X86
    threads: int | None = None
    prompt_cache_given: bool = False


@dataclass(frozen=True)
class Sizes:
    """Bytes by purpose; the names are those of ``memory`` in docs/stats.md."""

    pool_bytes: int
    staging_bytes: int
    ram_bytes: int
    guess_bytes: int
    bounce_bytes: int
    dense_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(vars(self).values())

    def as_json(self) -> dict[str, int]:
        return {**vars(self), "total_bytes": self.total_bytes}


@dataclass(frozen=True)
class MemoryPlan:
    """What the engine will decide, and what it will then take.

    Attributes:
        slots: in the layer with the most; 0 when not even one fits.
        least_slots: experts that a token uses, in the layer with the most.
        n_expert: of the layer with the most.
        staging: ``none``, ``full width`` or ``ring of N``, as /moe/stats says it.
        available_bytes: what there is.
        usable_bytes: without the margin that the engine leaves.
        budgeted_bytes: what the engine reckons for these slots.
        least_bytes: the same for ``least_slots``.
        tier_bytes: what the RAM tier may take.
        cached: reads go through the page cache, which can hold all experts beside everything else; else past it.
        sizes: what is expected to be taken.
    """

    slots: int
    least_slots: int
    n_expert: int
    staging: str
    available_bytes: int
    usable_bytes: int
    budgeted_bytes: int
    least_bytes: int
    tier_bytes: int
    cached: bool
    sizes: Sizes

    @property
    def fits(self) -> bool:
        return self.slots >= self.least_slots and self.budgeted_bytes <= self.usable_bytes


def in_flight_chosen(rates: Mapping[int, float]) -> int:
    """Reads under way that the engine takes by itself, from bytes a second by their number (``choose_io`` in engine/io-probe.cpp).

    Another number than the usual one must be clearly faster, a smaller one much.
    """
    usual = rates.get(DEFAULT_IN_FLIGHT)
    if usual is None:
        return DEFAULT_IN_FLIGHT
    able = [n for n in rates if n >= 2 and rates[n] > usual * (1.5 if n < DEFAULT_IN_FLIGHT else 1.15)]
    return max(able, key=lambda n: rates[n], default=DEFAULT_IN_FLIGHT)


def usable(available_bytes: int) -> int:
    """Without what the engine leaves to the program itself and to others."""
    return available_bytes - (available_bytes // 20 + min(512 << 20, available_bytes // 10))


def available_for(usable_bytes: int) -> int:
    """How much memory there must be for so much to be usable; the smallest such number."""
    low, high = usable_bytes, 2 * usable_bytes + (1 << 30)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if usable(middle) >= usable_bytes else (middle + 1, high)
    return low


def compute_budgeted(facts: GgufFacts, context: ContextShape) -> int:
    """The engine's estimate (``compute_bytes_estimate``)."""
    return _ubatch(context) * (_activations(facts, facts.n_expert_used) + context.n_ctx) * 4


def compute_expected(facts: GgufFacts, context: ContextShape) -> int:
    """The same with what flash attention needs: masks of two bytes an entry, one for each kind of attention.

    The last layer computes with the tokens alone whose logits are wanted, so its experts are no large moment.
    """
    n_moe = [layer for layer in facts.moe_layers_served if layer < facts.n_layer - 1]
    if n_moe or facts.n_layer == 1:
        per_token = _activations(facts, facts.n_expert_used)
    else:
        per_token = 6 * facts.n_embd + 2 * _width(facts, "feed_forward_length")
    windows, recurrent = state.window_layers(facts), state.recurrent_layers(facts)
    masks = 0
    if any(not w and not r for w, r in zip(windows, recurrent, strict=True)):
        masks += context.n_ctx_seq
    if any(windows):
        masks += state.window_cells(facts, context)
    return _ubatch(context) * (4 * per_token + 2 * masks)


def _ubatch(context: ContextShape) -> int:
    return min(context.n_ubatch, context.n_ctx)


def _width(facts: GgufFacts, key: str) -> int:
    value = facts.metadata.get(f"{facts.architecture}.{key}", 0)
    values = value if isinstance(value, list) else [value]
    return max((v for v in values if isinstance(v, int)), default=0)


def _activations(facts: GgufFacts, n_used: int) -> int:
    """Values of a token in a graph's largest moment."""
    n_ff = _width(facts, "expert_feed_forward_length") or _width(facts, "feed_forward_length")
    return 6 * facts.n_embd + n_used * (2 * n_ff + facts.n_embd)


def half_bytes(facts: GgufFacts, layers: tuple[int, ...]) -> int:
    return max(
        (sum(_align(t.size_bytes + TENSOR_PAD, 4096) for t in facts.layer_tensors(layer)) for layer in layers), default=0
    )


def _ring(facts: GgufFacts) -> tuple[int, int]:
    """Entries of the ring, and bytes of each."""
    entry = max([64, *(_align(t.bytes_per_expert, 64) for t in facts.expert_tensors)])
    return min(max((64 << 20) // entry, 8), 64), entry


def slab_bytes(facts: GgufFacts, layer: int) -> int:
    return sum(_align(t.bytes_per_expert, SLAB_ALIGNMENT) for t in facts.layer_tensors(layer))


def _ram_tier(facts: GgufFacts, slots: int, budget: int) -> int:
    """Bytes of the slabs that a budget makes: the same share of what each size could use, and what that leaves over to whom it suffices."""
    wanted: dict[int, int] = {}
    for layer in facts.moe_layers_served:
        n_expert = facts.layer_tensors(layer)[0].n_expert
        size = slab_bytes(facts, layer)
        wanted[size] = wanted.get(size, 0) + n_expert - min(slots, n_expert)
    wanted_bytes = sum(size * n for size, n in wanted.items())
    share = budget / wanted_bytes if budget < wanted_bytes else 1.0
    left = budget
    counts = {}
    for size, n in wanted.items():
        counts[size] = min(n, int(share * n), left // max(size, 1))
        left -= counts[size] * size
    for size, n in wanted.items():
        more = min(n - counts[size], left // max(size, 1))
        counts[size] += more
        left -= more * size
    return sum(size * n for size, n in counts.items())


def decide(facts: GgufFacts, wishes: Wishes, available_bytes: int, *, resident_elsewhere: bool = False) -> MemoryPlan:
    """The slots, the way of staging and the RAM tier.

    Args:
        facts: of a model with experts.
        available_bytes: memory that there is now.
        resident_elsewhere: dense weights, KV cache and compute buffers are in a GPU's memory. The engine's own ``auto`` does not reckon
            with that.
    """
    context = wishes.context
    n_used, n_expert = facts.n_expert_used, max(t.n_expert for t in facts.expert_tensors)
    slot_bytes = sum(t.bytes_per_expert for t in facts.expert_tensors)
    kv, compute = state.budgeted(facts, context), compute_budgeted(facts, context)
    resident = 0 if resident_elsewhere else facts.dense_bytes + kv + compute
    resident += (wishes.in_flight or MAX_IN_FLIGHT) * CHUNK_BYTES
    half = half_bytes(facts, facts.moe_layers)
    n_ring, ring_entry = _ring(facts)
    ring_bytes = n_ring * ring_entry + TENSOR_PAD
    n_guess = 3 * n_used if wishes.prefetch else 0
    guesses = n_guess * max(slab_bytes(facts, layer) for layer in facts.moe_layers)
    usable_bytes = usable(available_bytes)

    least = (
        2 if any(t.type in wishes.repacked for t in facts.expert_tensors) else 1
    )  # repacked kernels take no tensor of one expert
    wanted = None if wishes.slots is None else min(max(wishes.slots, least), n_expert)
    for_experts = max(0, usable_bytes - resident)
    ring = wishes.staging == "ring"
    if wishes.staging == "auto":
        ring = 2 * half + wanted * slot_bytes > for_experts if wanted else 2 * half > for_experts // 4
    staging = ring_bytes if ring else 2 * half
    tier = asked = max(wishes.ram_tier_bytes or 0, 0)

    def fit(resident_bytes: int) -> int:
        if resident_bytes + n_expert * slot_bytes <= usable_bytes:
            return n_expert
        left = usable_bytes - resident_bytes - staging
        return min(left // slot_bytes, n_expert - 1) if left > 0 else 0

    slots = wanted if wanted is not None else fit(resident)
    if wanted is None and slots < n_expert:
        slots = fit(resident + guesses + tier)
    is_all = slots >= n_expert
    extra = 0 if is_all else staging + guesses
    if wishes.ram_tier_bytes == RAM_AUTO:
        tier = max(0, usable_bytes - resident - extra - slots * slot_bytes)
    tier = 0 if is_all else tier

    served = facts.moe_layers_served
    pool = sum(min(slots, facts.layer_tensors(layer)[0].n_expert) * facts.bytes_per_slot(layer) for layer in served)
    real_half = half_bytes(facts, served)
    ram = 0 if is_all else _ram_tier(facts, slots, tier)
    tied_copy = facts.token_embd_bytes if facts.output_is_tied and facts.token_embd_type in wishes.repacked else 0
    in_flight = wishes.in_flight or wishes.in_flight_expected
    taken = facts.dense_bytes + slots_bytes(facts, slots) + (0 if is_all else staging + guesses + ram)
    holds_all = facts.expert_bytes + taken <= available_bytes
    buffered = wishes.io == "buffered" or (wishes.io == "auto" and holds_all)
    sizes = Sizes(
        pool_bytes=pool,
        staging_bytes=0 if is_all else (ring_bytes if ring else 2 * real_half),
        ram_bytes=ram,
        guess_bytes=0 if is_all or not n_guess else guesses + TENSOR_PAD,
        bounce_bytes=in_flight * (CHUNK_BYTES + 2 * (1 if buffered else DIRECT_ALIGNMENT)),
        dense_bytes=facts.dense_bytes - facts.dense_bytes_mtp + tied_copy,
        kv_bytes=state.expected(facts, context),
        compute_bytes=compute_expected(facts, context),
    )
    least_extra = 0 if n_used >= n_expert else staging + guesses + asked
    return MemoryPlan(
        slots=slots,
        least_slots=n_used,
        n_expert=n_expert,
        staging="none" if is_all else f"ring of {n_ring}" if ring else "full width",
        available_bytes=available_bytes,
        usable_bytes=usable_bytes,
        budgeted_bytes=resident + slots * slot_bytes + (0 if is_all else staging + guesses + tier),
        least_bytes=resident + least_extra + n_used * slot_bytes,
        tier_bytes=tier,
        cached=holds_all and buffered,
        sizes=sizes,
    )


def slots_bytes(facts: GgufFacts, slots: int) -> int:
    """Of so many slots in every layer, where it has so many experts."""
    return sum(t.bytes_per_expert * min(slots, t.n_expert) for t in facts.expert_tensors)


def largest_context(facts: GgufFacts, wishes: Wishes, available_bytes: int, *, resident_elsewhere: bool = False) -> int:
    """The longest context in steps of 256 tokens with which the fewest slots fit, 0 where there is none."""
    low, high = 0, wishes.context.n_ctx // state.PAD_CELLS
    while low < high:
        middle = (low + high + 1) // 2
        shorter = replace(wishes, slots=None, context=replace(wishes.context, n_ctx=middle * state.PAD_CELLS))
        plan = decide(facts, shorter, available_bytes, resident_elsewhere=resident_elsewhere)
        low, high = (middle, high) if plan.slots >= plan.least_slots else (low, middle - 1)
    return low * state.PAD_CELLS
