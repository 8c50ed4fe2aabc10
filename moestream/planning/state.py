"""Memory that a context keeps between tokens: KV cache, windows of it, latent (MLA) caches, recurrent states. Pure.

``budgeted`` is what the engine reckons with when it sizes slots (``kv_bytes_estimate`` in engine/hooks/load-slots.cpp), ``expected`` is what
llama.cpp allocates. The rules are upstream's: ``llama_model::create_memory`` and the constructors of ``llama_kv_cache``,
``llama_kv_cache_iswa`` and ``llama_memory_recurrent``; which layers have a window is said in each file of ``src/models``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestream.gguf_facts import GGML_TYPES, GgufFacts
from moestream.planning import architectures

PAD_CELLS = 256  # llama_context rounds its context up to this, and windows as well

# Sliding windows where the header gives no pattern: (period, whether the first layer of a period is the full one).
_PATTERNS = {
    "gpt-oss": (2, False), "llama4": (4, False), "smallthinker": (4, True), "exaone-moe": (4, False), "afmoe": (4, False),
    "cohere2moe": (4, True), "laguna": (4, True), "mellum": (4, False),
}  # fmt: skip
# A window without one of these keys is not a window: the header has the key for other reasons.
_WINDOWED = {*_PATTERNS, "gemma4", "step35", "mimo2", "dots3note", "granite_swa", "maple"}
_LLAMA4_CHUNK = 8192
# Recurrent layers: where the header has no list of them, every n-th layer is attention (default 4) ...
_BY_INTERVAL = {"qwen3next", "qwen35moe", "qwen4exp", "minimax-01"}
# ... or those without KV heads are recurrent.
_BY_HEADS = {"jamba", "granitehybrid", "lfm2moe", "nemotron_h_moe", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next"}
# Caches of their own kind, which are not modelled here.
_UNKNOWN = {"deepseek32", "deepseek4", "glm-dsa", "glm5-next", "minimax-m3", "dots3note", "hy_v4", "qwen4exp"}
_NO_CACHE = {"nomic-bert-moe", "llada-moe", "rnd1"}


@dataclass(frozen=True)
class ContextShape:
    """How a context is made.

    Attributes:
        n_ctx: tokens, of all sequences together.
        n_seq: sequences at a time.
        unified: whether they share one cache, as llama-server does when nobody says how many there are.
        n_ubatch: tokens of a batch that are computed at once.
        type_k, type_v: ggml types of the cache.
    """

    n_ctx: int
    n_seq: int = 4
    unified: bool = True
    n_ubatch: int = 512
    type_k: str = "F16"
    type_v: str = "F16"

    @property
    def n_ctx_seq(self) -> int:
        """Cells of each stream."""
        n_ctx = _pad(self.n_ctx)
        return n_ctx if self.unified else _pad(n_ctx // self.n_seq)

    @property
    def n_stream(self) -> int:
        return 1 if self.unified else self.n_seq


def _pad(n: int) -> int:
    return -(-max(n, 1) // PAD_CELLS) * PAD_CELLS


def row_bytes(type_name: str, n_values: int) -> int:
    """Bytes of so many values in a ggml type."""
    _, block, block_bytes = next(t for t in GGML_TYPES.values() if t[0] == type_name)
    return n_values * block_bytes // block


def _number(facts: GgufFacts, key: str, default: int = 0) -> int:
    value = facts.metadata.get(f"{facts.architecture}.{key}", default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _flags(facts: GgufFacts, key: str) -> list[bool] | None:
    value = facts.metadata.get(f"{facts.architecture}.{key}")
    if not isinstance(value, list) or len(value) < facts.n_layer:
        return None
    return [bool(v) for v in value]


def window_layers(facts: GgufFacts) -> list[bool]:
    """Which layers see a sliding window alone."""
    none = [False] * len(facts.n_head_kv)
    arch = facts.architecture
    if arch not in _WINDOWED or not window_tokens(facts):
        return none
    found = _flags(facts, "attention.sliding_window_pattern")
    if found is None:
        period, full_first = _PATTERNS.get(arch, (0, False))
        period = _number(facts, "attention.sliding_window_pattern", period)
        if not period:
            return none
        found = [(il % period != 0) if full_first else il % period < period - 1 for il in range(facts.n_layer)]
    return [found[il] and il < facts.n_layer if il < len(found) else False for il in range(len(none))]


def window_tokens(facts: GgufFacts) -> int:
    """Tokens of a sliding window, 0 where the model has none."""
    default = _LLAMA4_CHUNK if facts.architecture == "llama4" else 0
    return _number(facts, "attention.sliding_window", default)


def recurrent_layers(facts: GgufFacts) -> list[bool]:
    """Which layers keep a state of fixed size instead of a cache."""
    layers = range(len(facts.n_head_kv))
    arch = facts.architecture
    if arch in _BY_INTERVAL:
        found = _flags(facts, "attention.recurrent_layers")
        if found is None:
            interval = max(1, _number(facts, "full_attention_interval", 4))
            found = [(il + 1) % interval != 0 for il in layers]
        return [il < facts.n_layer and found[il] for il in layers]
    if arch in _BY_HEADS:
        recurrent = [il < facts.n_layer and facts.n_head_kv[il] == 0 for il in layers]
        if arch == "nemotron_h_moe":  # layers of an FFN alone have no KV heads either, and no state
            wide = facts.metadata.get(f"{arch}.feed_forward_length")
            widths: Sequence[int] = wide if isinstance(wide, list) else [wide or 0] * len(layers)
            recurrent = [r and not widths[il] for il, r in enumerate(recurrent)]
        return recurrent
    return [False for _ in layers]


def _state_values(facts: GgufFacts) -> int:
    """Values (F32) of one recurrent layer's state for a sequence: upstream's n_embd_r() + n_embd_s()."""
    n_head = max(facts.n_head, default=0)
    d_conv, d_inner, d_state = (_number(facts, f"ssm.{key}") for key in ("conv_kernel", "inner_size", "state_size"))
    conv = max(d_conv - 1, 0)
    if cache := _number(facts, "shortconv.l_cache"):
        return facts.n_embd * (cache - 1) + d_state * d_inner
    if kda := _number(facts, "kda.head_dim"):
        return 3 * (conv or 3) * n_head * kda + kda * kda * n_head
    if facts.architecture == "minimax-01":
        return facts.n_embd_head_k**2 * n_head
    return conv * (d_inner + 2 * _number(facts, "ssm.group_count") * d_state) + d_state * d_inner


def _heads(facts: GgufFacts, windowed: bool) -> tuple[int, int]:
    k, v = facts.n_embd_head_k, facts.n_embd_head_v
    if windowed:
        k, v = _number(facts, "attention.key_length_swa", k) or k, _number(facts, "attention.value_length_swa", v) or v
    return k, v


def budgeted(facts: GgufFacts, shape: ContextShape) -> int:
    """The engine's estimate: every layer as if it had a cache for the whole context."""
    n = 0
    for il, windowed in enumerate(window_layers(facts)):
        head_k, head_v = _heads(facts, windowed)
        n += row_bytes(shape.type_k, head_k * facts.n_head_kv[il]) + row_bytes(shape.type_v, head_v * facts.n_head_kv[il])
    return n * shape.n_ctx


def window_cells(facts: GgufFacts, shape: ContextShape) -> int:
    """Cells of the cache of layers with a window."""
    seen = window_tokens(facts) * (shape.n_seq if shape.unified else 1) + shape.n_ubatch
    return _pad(min(shape.n_ctx_seq, seen))


def expected(facts: GgufFacts, shape: ContextShape) -> int:
    """What llama.cpp allocates, MTP layers left out."""
    if facts.architecture in _NO_CACHE:
        return 0
    windows, recurrent = window_layers(facts), recurrent_layers(facts)
    is_latent = bool(_number(facts, "attention.key_length_mla") and _number(facts, "attention.value_length_mla"))
    n_cached = facts.n_layer - _number(facts, "attention.shared_kv_layers")
    state = 4 * _state_values(facts) * max(1, shape.n_seq) if any(recurrent) else 0
    n = 0
    for il in range(facts.n_layer):
        if recurrent[il]:
            n += state
            continue
        if il >= n_cached:
            continue
        head_k, head_v = _heads(facts, windows[il])
        cell = row_bytes(shape.type_k, head_k * facts.n_head_kv[il])
        if not is_latent:
            cell += row_bytes(shape.type_v, head_v * facts.n_head_kv[il])
        n += cell * (window_cells(facts, shape) if windows[il] else shape.n_ctx_seq) * shape.n_stream
    return n


def is_known(facts: GgufFacts) -> bool:
    """False: the architecture has caches that are not reckoned with, and ``expected`` is too low; or nobody knows it."""
    return facts.architecture in architectures.KNOWN and facts.architecture not in _UNKNOWN
