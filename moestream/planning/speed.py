"""How fast a plan will be, and what holds it up. Pure: sizes, rates and hit rates in, times out.

A token takes ``1/C + missed bytes / bandwidth`` (as ``moestream.routing.replay.predicted_tps``): reads are not taken to overlap with
computing, which they do in part. ``C`` is what the processor can do when all experts are in memory: the larger of the time in which the
weights that a token uses pass through memory, and the time of their multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass

from moestream.gguf_facts import GgufFacts
from moestream.planning.hits import HitModel

PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second. None: not measured.

    Attributes:
        disk_bytes_s: direct reads of the size of an expert's matrix.
        memory_bytes_s: bytes copied within memory, all cores.
        flops: of matrix products (F32), all cores.
        prompt_flops: with as many columns as a prompt has tokens for an expert; None: as flops.
        cache_bytes_s: reads of the same size from the page cache; None: as memory_bytes_s.
    """

    disk_bytes_s: float | None
    memory_bytes_s: float
    flops: float
    cache_bytes_s: float | None = None
    prompt_flops: float | None = None


@dataclass(frozen=True)
class Speed:
    """A prediction for one number of slots.

    Attributes:
        hit_rate: of accesses, all layers; slots alone.
        ram_rate: of accesses, what the RAM tier has.
        read_bytes: asked of the files for a token, whether from the drive or the page cache.
        ram_bytes: from the RAM tier for a token.
        seconds: of a token, by what takes it: ``disk``; ``ram``, copies to slots from the RAM tier or the page cache; and ``memory`` or
            ``compute``.
        tokens_per_s: None: the drive is not measured, and is needed.
        prompt_s: time to the first token of a prompt of 512 tokens.
        limit, prompt_limit: what takes most of the time; empty where it is not known.
    """

    hit_rate: float
    ram_rate: float
    read_bytes: float
    ram_bytes: float
    seconds: dict[str, float | None]
    tokens_per_s: float | None
    prompt_s: float | None
    limit: str
    prompt_limit: str


def active_bytes(facts: GgufFacts) -> int:
    """Bytes of the weights that one token is computed with: all that are no experts', and the experts it uses.

    Of token embeddings one row alone is read, unless they are the output as well.
    """
    dense = facts.dense_bytes - facts.dense_bytes_mtp - (0 if facts.output_is_tied else facts.token_embd_bytes)
    return dense + sum(facts.bytes_per_slot(layer) * facts.n_expert_used_in(layer) for layer in facts.moe_layers_served)


def active_values(facts: GgufFacts) -> int:
    """Numbers among them: a token takes twice as many operations."""
    return (
        facts.dense_values
        + (facts.token_embd_values if facts.output_is_tied else 0)
        + sum(
            facts.n_expert_used_in(layer) * t.shape[0] * t.shape[1]
            for layer in facts.moe_layers_served
            for t in facts.layer_tensors(layer)
        )
    )


def predict(
    facts: GgufFacts, model: HitModel, rates: Rates, *, slots: int, ram_bytes: int = 0, ubatch: int = 512, cached: bool = False
) -> Speed:
    """Predict speeds.

    Args:
        slots: in each layer.
        ram_bytes: of the RAM tier.
        ubatch: tokens of a prompt that are computed at once.
        cached: the page cache holds all experts, so that what is missed is copied and not read from the drive.
    """
    layers = facts.moe_layers_served
    all_missing = sum(facts.bytes_per_slot(layer) * max(0, facts.layer_tensors(layer)[0].n_expert - slots) for layer in layers)
    share = min(1.0, ram_bytes / all_missing) if all_missing else 0.0
    hits = below = needed = read = from_ram = 0.0
    for layer in layers:
        n_expert, size = facts.layer_tensors(layer)[0].n_expert, facts.bytes_per_slot(layer)
        n_used = sum(model.chosen[layer])
        n_slab = int(share * max(0, n_expert - slots))
        hit = model.hit_rate(layer, slots)
        with_ram = model.hit_rate(layer, slots + n_slab) if n_slab else hit
        needed += n_used
        hits += n_used * hit
        below += n_used * (with_ram - hit)
        read += n_used * (1 - with_ram) * size
        from_ram += n_used * (with_ram - hit) * size
    cache_s = 0.0
    if cached:
        cache_s = read / (rates.cache_bytes_s or rates.memory_bytes_s)
    memory_s, flops_s = active_bytes(facts) / rates.memory_bytes_s, 2 * active_values(facts) / rates.flops
    seconds: dict[str, float | None] = {
        "disk": 0.0 if read == 0 or cached else read / rates.disk_bytes_s if rates.disk_bytes_s else None,
        "ram": from_ram / rates.memory_bytes_s + cache_s,
        "memory" if memory_s >= flops_s else "compute": max(memory_s, flops_s),
    }
    whole = total_s(seconds)
    prompt, prompt_limit = _prompt(facts, model, rates, slots, share, ubatch, cached)
    first = None if prompt is None or whole is None else prompt + whole
    return Speed(
        hit_rate=hits / needed,
        ram_rate=below / needed,
        read_bytes=read,
        ram_bytes=from_ram,
        seconds=seconds,
        tokens_per_s=None if whole is None else 1 / whole,
        prompt_s=first,
        limit="" if whole is None else max(seconds, key=lambda name: seconds[name] or 0.0),
        prompt_limit=prompt_limit,
    )


def total_s(seconds: dict[str, float | None]) -> float | None:
    """Of what happens one after the other; None where one part is not known."""
    values = list(seconds.values())
    return None if None in values else sum(v for v in values if v is not None)


def _prompt(
    facts: GgufFacts, model: HitModel, rates: Rates, slots: int, share: float, ubatch: int, cached: bool
) -> tuple[float | None, str]:
    """Seconds for the prompt. Its reads run behind the layer before, so the longer of both counts."""
    n_batch = -(-PROMPT_TOKENS // ubatch)
    n_token = min(ubatch, PROMPT_TOKENS)
    read = 0.0
    for layer in facts.moe_layers_served:
        n_expert = facts.layer_tensors(layer)[0].n_expert
        in_memory = min(1.0, (slots + share * max(0, n_expert - slots)) / n_expert)
        read += model.touched(layer, n_token) * (1 - in_memory) * facts.bytes_per_slot(layer) * n_batch
    compute_s = 2 * active_values(facts) * PROMPT_TOKENS / (rates.prompt_flops or rates.flops)
    bandwidth = (rates.cache_bytes_s or rates.memory_bytes_s) if cached else rates.disk_bytes_s
    if read > 0 and not bandwidth:
        return None, ""
    read_s = read / bandwidth if read > 0 and bandwidth else 0.0
    return max(compute_s, read_s), "compute" if compute_s >= read_s else "ram" if cached else "disk"
