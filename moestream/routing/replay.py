"""Replays of traces by the engine's own slots and policies, and what follows from them. Formats: docs/traces.md."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.upstream import engines

TOOL = "moe-replay-policy"
OPTIMUM = "opt"  # not a policy that could be started
SCHEMA = "moestream/replay/1"
DEFAULT_POLICY = "lru"  # the engine's, and the only one by which a card looks after its slots itself
AS_GOOD = 0.99  # the default is recommended when it reaches this much of the best policy
GOOD_ENOUGH = 0.95  # fewer slots are recommended when they reach this much of the best


@dataclass(frozen=True)
class LayerCounts:
    layer: int
    slots: int
    hits: int
    misses: int
    misses_decode: int


@dataclass(frozen=True)
class Run:
    """One policy with one choice of slots.

    Attributes:
        slots: in every layer; None when each layer has its own.
        misses_decode: misses of batches that went through slots.
        tokens_decode: tokens of these.
    """

    policy: str
    slots: int | None
    hits: int
    misses: int
    evictions: int
    misses_decode: int
    tokens_decode: int
    tokens_prefill: int
    layers: tuple[LayerCounts, ...]

    @property
    def hit_rate(self) -> float:
        """Of all accesses; 1 when there was none."""
        n = self.hits + self.misses
        return self.hits / n if n else 1.0

    @property
    def misses_per_token(self) -> float | None:
        """Of tokens that go through slots, over all layers; None when there were none."""
        return self.misses_decode / self.tokens_decode if self.tokens_decode else None

    def bytes_per_token(self, expert_bytes: Mapping[int, int]) -> float | None:
        """Bytes to be read for a token that goes through slots.

        Args:
            expert_bytes: of one expert, by layer.
        """
        if not self.tokens_decode:
            return None
        return sum(layer.misses_decode * expert_bytes[layer.layer] for layer in self.layers) / self.tokens_decode


def predicted_tps(bytes_per_token: float, bandwidth_bytes_s: float, compute_tps: float) -> float:
    """Tokens a second when computing takes ``1 / compute_tps`` and reads are not overlapped with it: 1 / (1/C + bytes/bandwidth)."""
    return 1 / (1 / compute_tps + bytes_per_token / bandwidth_bytes_s)


def expert_bytes(facts: GgufFacts) -> dict[int, int]:
    """Bytes of one expert, by layer."""
    return {layer: facts.bytes_per_slot(layer) for layer in facts.moe_layers}


def replay(
    trace: Path,
    slots: Sequence[int] = (),
    *,
    layer_slots: Mapping[int, int] | None = None,
    policies: Sequence[str] = (),
    backend: str | None = None,
) -> list[Run]:
    """Replay a trace with each of ``slots``, and with ``layer_slots`` (by layer), by each policy; all of them when none is named.

    Raises:
        MoestreamError: no engine, or what its program refuses: too few slots, an unknown policy, a damaged trace.
    """
    command = [str(engines.in_use(backend).tool(TOOL)), str(trace)]
    if slots:
        command += ["--slots", ",".join(map(str, slots))]
    if layer_slots:
        command += ["--layer-slots", ",".join(f"{layer}={n}" for layer, n in sorted(layer_slots.items()))]
    if policies:
        command += ["--policy", ",".join(policies)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        message, _, hint = (
            (said[-1] if said else f"it ended with {done.returncode}").removeprefix(f"{TOOL}: ").partition("; hint: ")
        )
        raise MoestreamError(f"cannot replay {trace}: {message}", hint=hint or None)
    answer = json.loads(done.stdout)
    assert answer["schema"] == SCHEMA, "the engine in use is built from these sources"
    return [_run(run) for run in answer["runs"]]


def _run(run: dict[str, Any]) -> Run:
    totals = run["totals"]
    return Run(
        policy=run["policy"],
        slots=run["slots"],
        layers=tuple(
            LayerCounts(**{name: layer[name] for name in LayerCounts.__dataclass_fields__}) for layer in run["layers"]
        ),
        **{name: totals[name] for name in totals},
    )


def best_start(runs: Sequence[Run], value: Mapping[tuple[str, int], float]) -> tuple[str, int] | None:
    """Policy and slots to start with: the fewest slots that reach 95 % of the best value, by the default policy
    unless another is clearly better there.

    Args:
        value: what is wanted much of, by policy and slots: hit rate, or tokens a second. What is missing is left out.
    """
    keys = [(run.policy, run.slots) for run in runs if run.policy != OPTIMUM and run.slots is not None]
    able = [key for key in keys if key in value]
    if not able:
        return None
    most = max(value[key] for key in able)
    slots = min(n for policy, n in able if value[policy, n] >= GOOD_ENOUGH * most)
    best = max((key for key in able if key[1] == slots), key=lambda key: value[key])
    default = (DEFAULT_POLICY, slots)
    return default if value.get(default, 0) >= AS_GOOD * value[best] else best
