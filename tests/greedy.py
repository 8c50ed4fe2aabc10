"""When a greedy answer is right although its bits are not: sums are rounded in another order in a batch, or in a used KV cache.

Stock llama.cpp's logits change in their last bits with the width of a batch and with the order of cells in the KV cache, and so may
the likeliest token where two are as good as equally likely. Nothing else may change an answer: bytes of a wrong expert make tokens
likely that were not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_server import LlamaServer

N_LIKELY = 20
# By how much less likely (logprob) than the likeliest a choice may be. Stock needs up to 0.29 with the demo model,
# where a router that is as undecided takes another expert.
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the reference; what follows has another context and says nothing more."""

    n_equal: int
    behind: float  # logprob by which its token is less likely than the reference's; inf when it is not among the likely ones

    @property
    def is_wrong(self) -> bool:
        return not self.behind < NEAR_TIE


@dataclass(frozen=True)
class Reference:
    """A greedy answer computed alone, and the likeliest tokens at each of its positions with their logprobs."""

    tokens: Sequence[int]
    likely: Sequence[Mapping[int, float]]

    def difference(self, answer: Sequence[int]) -> Difference | None:
        """None when the answer is the beginning of the reference, or all of it."""
        assert len(answer) <= len(self.tokens)
        for i, (expected, token) in enumerate(zip(self.tokens, answer, strict=False)):
            if token != expected:
                likely = self.likely[i]
                return Difference(i, likely[expected] - likely.get(token, -math.inf))
        return None


def likely_tokens(answer: Mapping[str, Any]) -> list[dict[int, float]]:
    return [{t["id"]: t["logprob"] for t in at["top_logprobs"]} for at in answer["completion_probabilities"]]


def record(server: LlamaServer, prompt: str, n_tokens: int) -> Reference:
    done = server.post_completion(prompt, n_tokens, n_probs=N_LIKELY).json()
    assert len(done["tokens"]) == n_tokens
    return Reference(done["tokens"], likely_tokens(done))


def most_behind(server: LlamaServer, prompt: str, answer: Sequence[int]) -> float:
    """The largest logprob by which a token of an answer is behind the likeliest one, each computed alone after those before it."""
    tokens = server.http.post("/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    behind = 0.0
    for i, token in enumerate(answer):
        done = server.post_completion([*tokens, *answer[:i]], 1, cache_prompt=True, n_probs=N_LIKELY).json()
        (likely,) = likely_tokens(done)
        behind = max(behind, max(likely.values()) - likely.get(token, -math.inf))
    return behind
