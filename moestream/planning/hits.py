"""What slots are worth: which share of a token's experts is found in memory. Pure.

Where a trace was replayed, its figures count. Else each expert has a probability of being chosen by a token, from a router map or from an
assumed distribution, and tokens are taken as independent of each other: an expert is then in an LRU pool of S slots when it was chosen
in the last T tokens, T being such that S experts are expected to be (Che, Tung, Wang: Hierarchical Web Caching Systems, 2002). Tokens
that follow each other choose alike, so that real hit rates are mostly higher than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moestream.gguf_facts import GgufFacts
from moestream.routing.maps import RouterMap
from moestream.routing.replay import Run

ZIPF_EXPONENT = 1.0
_STEPS = 60  # of a bisection; more than a float can tell apart


def zipf(n_expert: int, n_used: int, exponent: float = ZIPF_EXPONENT) -> list[float]:
    """Probabilities that a token uses an expert, proportional to ``1 / rank**exponent`` and none above 1; their sum is ``n_used``."""
    weights = [1 / rank**exponent for rank in range(1, n_expert + 1)]
    n_sure = 0
    while n_sure < n_used:
        scale = (n_used - n_sure) / sum(weights[n_sure:])
        if weights[n_sure] * scale <= 1:
            break
        n_sure += 1
    return (
        [1.0] * n_sure + [w * scale for w in weights[n_sure:]]
        if n_sure < n_used
        else [1.0] * n_used + [0.0] * (n_expert - n_used)
    )


def from_counts(counts: Sequence[int], n_used: int) -> list[float]:
    """The same from how often each expert was chosen; alike for all where nothing was."""
    total = sum(counts)
    if total == 0:
        return [n_used / len(counts)] * len(counts)
    return [min(1.0, count * n_used / total) for count in counts]


def lru_hit_rate(chosen: Sequence[float], n_slot: int) -> float:
    """The share of accesses that an LRU pool has.

    Args:
        chosen: probability by expert that a token uses it.
        n_slot: as many as a token uses, or more.
    """
    if n_slot >= sum(1 for q in chosen if q > 0):
        return 1.0
    low, high = 0.0, 1.0

    def filled(tokens: float) -> float:
        return sum(1 - (1 - q) ** tokens for q in chosen)

    while filled(high) < n_slot and high < 1e12:
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle) < n_slot else (low, middle)
    return sum(q * (1 - (1 - q) ** high) for q in chosen) / sum(chosen)


@dataclass(frozen=True)
class HitModel:
    """Where hit rates come from.

    Attributes:
        source: ``replay``, ``map`` or ``assumed``.
        words: the same for a person.
        chosen: probability that a token uses an expert, by layer.
        measured: hit rates of a replay, by slots and layer.
    """

    source: str
    words: str
    chosen: Mapping[int, Sequence[float]]
    measured: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    def hit_rate(self, layer: int, n_slot: int) -> float:
        """Of one layer. Between slots that were replayed it is drawn straight."""
        if n_slot >= len(self.chosen[layer]):
            return 1.0
        known = sorted((n, rates[layer]) for n, rates in self.measured.items() if layer in rates)
        if not known:
            return lru_hit_rate(self.chosen[layer], n_slot)
        below = [point for point in known if point[0] <= n_slot]
        above = [point for point in known if point[0] >= n_slot]
        if not below or not above:
            return (below or above)[-1 if below else 0][1]
        (n0, h0), (n1, h1) = below[-1], above[0]
        return h0 if n0 == n1 else h0 + (h1 - h0) * (n_slot - n0) / (n1 - n0)

    def touched(self, layer: int, n_token: int) -> float:
        """Experts of a layer that a batch of so many tokens uses."""
        return sum(1 - (1 - q) ** n_token for q in self.chosen[layer])


def assumed(facts: GgufFacts) -> HitModel:
    """Nothing is known of the model's routing."""
    chosen = {
        layer: zipf(facts.layer_tensors(layer)[0].n_expert, facts.n_expert_used_in(layer)) for layer in facts.moe_layers_served
    }
    words = f"assumed: LRU, experts chosen as by Zipf's law with exponent {ZIPF_EXPONENT:g}, tokens independent of each other"
    return HitModel("assumed", words, chosen)


def of_map(facts: GgufFacts, router_map: RouterMap, name: str) -> HitModel:
    """From how often each expert was chosen; layers that the map lacks are assumed."""
    chosen = dict(assumed(facts).chosen)
    for m in router_map.layers:
        if m.layer in chosen:
            chosen[m.layer] = from_counts(m.counts, facts.n_expert_used_in(m.layer))
    words = f"router map {name} of {router_map.tokens} tokens: LRU, tokens independent of each other"
    return HitModel("map", words, chosen)


def of_replay(model: HitModel, runs: Sequence[Run], name: str) -> HitModel:
    """From a replayed trace.

    Args:
        model: what else is known of the routing.
        runs: with the same slots in every layer, one policy.
    """
    measured: dict[int, dict[int, float]] = {}
    for run in runs:
        assert run.slots is not None
        measured[run.slots] = {
            layer.layer: layer.hits / (layer.hits + layer.misses) for layer in run.layers if layer.hits + layer.misses
        }
    return HitModel("replay", f"replay of the trace {name}, policy {runs[0].policy}", model.chosen, measured)
