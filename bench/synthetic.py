"""Synthetic qwen3moe models at real shapes, whose routing is skewed and local in time by a chosen amount.

A model of random weights routes without any structure: every expert equally often, no memory of the token before. Caches
then look worse than they are on real models, and weights with a mean other than zero look far better, because every
token goes to the same few experts. Here the residual stream is built so that three parts of the router's logits are known:

    logit(layer, expert) = skew * popularity(expert) + token(x) + locality * topic(recent tokens)

- popularity: minus the logarithm of a rank (Zipf), standardised, another order in each layer. It is read from a constant part
  that all token embeddings share.
- token: standard normal for each (token, expert, layer); read from the random part of the embedding.
- topic: standard normal too, but of a weighted mean over the tokens so far, weights ~ distance^-recency. The attention
  of layer 0 computes it: its queries and keys are constant, so that only the rotary phases, and with them the distance,
  decide its weights. It stays in the residual stream for all later layers.

Experts and the attention of later layers have random weights of mean zero and add little to the residual stream (``gain``),
enough that a wrong expert changes the logits and too little to wipe out the routing. What the routing comes to is measured on
the real model, by ``bench/routing.py``.

    python bench/synthetic.py --hit 75 models/qwen3moe-30b-a3b-hit75.gguf

``--arch gemma4`` writes the shape of Gemma-4-26B-A4B instead: a dense FFN beside the experts, gate and up merged, sliding windows. Its weights, and
so its routing, are random throughout: for memory and start-up, not for speed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream.errors import MoestreamError

ROPE_BASE = 1e6
N_BYTE_TOKENS = 256
FIRST_FILLER = N_BYTE_TOKENS + 2


@dataclass(frozen=True)
class Routing:
    """How the router chooses; see the module's text. Units of ``skew`` and ``locality``: standard deviations of the token part."""

    skew: float
    locality: float
    recency: float


# LRU hits at 32 of 128 slots, decoding one sequence; measured, the whole curves are in docs/measuring.md.
PRESETS = {
    75: Routing(skew=1.0, locality=1.0, recency=1.5),
    60: Routing(skew=0.72, locality=1.0, recency=1.5),
}
UNIFORM = Routing(skew=0.0, locality=0.0, recency=1.5)


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # numpy order: the last is the row
    type: gguf.GGMLQuantizationType
    make: Callable[[np.random.Generator], np.ndarray]

    @property
    def size_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes


def write_model(
    path: str | os.PathLike[str],
    *,
    n_layer: int = 48,
    n_expert: int = 128,
    n_used: int = 8,
    d_model: int = 2048,
    d_ff: int = 768,
    n_head: int = 32,
    n_head_kv: int = 4,
    d_head: int = 128,
    n_vocab: int = 1024,
    n_ctx: int = 32768,
    expert_type: str = "Q4_0",
    dense_type: str = "Q8_0",
    seed: int = 1,
    routing: Routing = UNIFORM,
    gain: float = 0.02,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a qwen3moe GGUF; the same arguments give the same bytes.

    Args:
        n_used: experts chosen for a token.
        d_model, d_ff: width of the residual stream and of one expert.
        n_vocab: at least 258: the 256 bytes, an end token, one merge; the rest are fillers that no text maps to.
        expert_type, dense_type: ggml types. Q4_0 and Q8_0 are made of random blocks at some GB/s; F32, F16, BF16 and what the
            gguf package can quantize are slower. Norms and routers are F32, as in real models.
        gain: what one layer's experts, and one layer's attention, add to the residual stream, relative to the token part.
        progress: called with (bytes written, bytes in all) after each tensor.

    Raises:
        MoestreamError: shapes that do not fit the types, unknown types, too small a vocabulary, no space left.
    """
    path = Path(path)
    plan = _Plan(n_layer, n_expert, n_used, d_model, d_ff, n_head, n_head_kv, d_head, n_vocab, routing, gain)
    plan.check()
    tensors = list(plan.tensors(_type(expert_type), _type(dense_type)))

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name(f"synthetic qwen3moe {n_layer}x{n_expert}")
    _add_shape(
        writer, n_layer=n_layer, n_ctx=n_ctx, d_model=d_model, d_ff_dense=d_ff * n_used, d_ff=d_ff, n_expert=n_expert, n_used=n_used,
        n_head=n_head, n_head_kv=n_head_kv, d_head=d_head,
    )  # fmt: skip
    if file_type := getattr(gguf.LlamaFileType, f"MOSTLY_{expert_type.upper()}", None):
        writer.add_file_type(file_type)
    # What made the file, for whoever finds it later; llama.cpp ignores keys that it does not know.
    writer.add_uint32("moestream.synthetic.seed", seed)
    writer.add_float32("moestream.synthetic.skew", routing.skew)
    writer.add_float32("moestream.synthetic.locality", routing.locality)
    writer.add_float32("moestream.synthetic.recency", routing.recency)
    writer.add_float32("moestream.synthetic.gain", gain)
    _add_vocabulary(writer, n_vocab)

    _write(path, writer, tensors, seed, progress)
    return path


def write_gemma4(
    path: str | os.PathLike[str],
    *,
    n_layer: int = 30,
    n_expert: int = 128,
    n_used: int = 8,
    d_model: int = 2816,
    d_ff: int = 704,
    d_ff_dense: int = 2112,
    n_head: int = 16,
    n_head_kv: int = 8,
    d_head: int = 256,
    n_vocab: int = 262144,
    n_ctx: int = 32768,
    expert_type: str = "Q4_0",
    dense_type: str = "Q8_0",
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a gemma4 GGUF of random weights; arguments as of :func:`write_model`.

    Args:
        d_ff_dense: width of the FFN that every token goes through.
    """
    f32, expert, dense = gguf.GGMLQuantizationType.F32, _type(expert_type), _type(dense_type)
    q, kv = n_head * d_head, n_head_kv * d_head
    tensors: list[_Tensor] = []

    def ones(name: str, n: int) -> None:
        tensors.append(_Tensor(name, (n,), f32, lambda rng: np.ones(n, np.float32)))

    def random(name: str, shape: tuple[int, ...], type: gguf.GGMLQuantizationType) -> None:
        tensors.append(_Tensor(name, shape, type, lambda rng: random_weights(rng, shape, type, 1 / math.sqrt(shape[-1]))))

    random("token_embd.weight", (n_vocab, d_model), dense)
    ones("rope_freqs.weight", d_head // 2)
    for i in range(n_layer):
        p = f"blk.{i}."
        for norm in (
            "attn_norm",
            "post_attention_norm",
            "ffn_norm",
            "post_ffw_norm",
            "pre_ffw_norm_2",
            "post_ffw_norm_1",
            "post_ffw_norm_2",
        ):
            ones(f"{p}{norm}.weight", d_model)
        ones(p + "attn_q_norm.weight", d_head)
        ones(p + "attn_k_norm.weight", d_head)
        random(p + "attn_q.weight", (q, d_model), dense)
        random(p + "attn_k.weight", (kv, d_model), dense)
        random(p + "attn_v.weight", (kv, d_model), dense)
        random(p + "attn_output.weight", (d_model, q), dense)
        random(p + "ffn_gate.weight", (d_ff_dense, d_model), dense)
        random(p + "ffn_up.weight", (d_ff_dense, d_model), dense)
        random(p + "ffn_down.weight", (d_model, d_ff_dense), dense)
        random(p + "ffn_gate_inp.weight", (n_expert, d_model), f32)
        ones(p + "ffn_gate_inp.scale", d_model)
        random(p + "ffn_gate_up_exps.weight", (n_expert, 2 * d_ff, d_model), expert)
        random(p + "ffn_down_exps.weight", (n_expert, d_model, d_ff), expert)
        ones(p + "ffn_down_exps.scale", n_expert)
    ones("output_norm.weight", d_model)

    path = Path(path)
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_name(f"synthetic gemma4 {n_layer}x{n_expert}")
    _add_shape(
        writer, n_layer=n_layer, n_ctx=n_ctx, d_model=d_model, d_ff_dense=d_ff_dense, d_ff=d_ff, n_expert=n_expert, n_used=n_used,
        n_head=n_head, n_head_kv=n_head_kv, d_head=d_head,
    )  # fmt: skip
    writer.add_rope_dimension_count(d_head)
    for key, value in (
        ("attention.key_length_swa", d_head), ("attention.value_length_swa", d_head), ("rope.dimension_count_swa", d_head),
        ("attention.sliding_window", 1024), ("attention.shared_kv_layers", 0), ("embedding_length_per_layer_input", 0),
    ):  # fmt: skip
        writer.add_uint32(f"gemma4.{key}", value)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    writer.add_float32("gemma4.final_logit_softcapping", 30.0)
    writer.add_array("gemma4.attention.sliding_window_pattern", [i % 6 != 5 for i in range(n_layer)])
    writer.add_uint32("moestream.synthetic.seed", seed)
    _add_vocabulary(writer, n_vocab)
    _write(path, writer, tensors, seed, progress)
    return path


def _add_shape(
    writer: gguf.GGUFWriter, *, n_layer: int, n_ctx: int, d_model: int, d_ff_dense: int, d_ff: int, n_expert: int, n_used: int,
    n_head: int, n_head_kv: int, d_head: int,
) -> None:  # fmt: skip
    """The metadata that both architectures have."""
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(d_ff_dense)
    writer.add_expert_feed_forward_length(d_ff)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_used)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(d_head)
    writer.add_value_length(d_head)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(1e-6)


def _write(
    path: Path, writer: gguf.GGUFWriter, tensors: list[_Tensor], seed: int, progress: Callable[[int, int], None] | None
) -> None:
    """The tensors behind the metadata that the writer has."""
    total = sum(t.size_bytes for t in tensors)
    for t in tensors:
        block = gguf.GGML_QUANT_SIZES[t.type][0]
        if t.shape[-1] % block:
            raise MoestreamError(
                f"{t.name} has rows of {t.shape[-1]} values, no multiple of the {block} of {t.type.name}",
                hint="choose widths that are multiples of the block, or type F32",
            )
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.size_bytes, raw_dtype=t.type)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # One tensor is made while the one before is written: neither the disk nor the generator waits, two tensors in memory.
        done = 0
        with ThreadPoolExecutor(1) as pool:
            made = None
            for i, t in enumerate(tensors):
                data = made.result() if made else _make(t, seed)
                made = pool.submit(_make, tensors[i + 1], seed) if i + 1 < len(tensors) else None
                writer.write_tensor_data(data)
                done += t.size_bytes
                if progress:
                    progress(done, total)
        writer.close()
    except OSError as e:
        path.unlink(missing_ok=True)
        raise MoestreamError(
            f"cannot write {path} ({total} bytes): {e.strerror or e}", hint="check the folder and the free space of its disk"
        ) from e


def _make(t: _Tensor, seed: int) -> np.ndarray:
    """A tensor's bytes. Its generator depends on its name only, so that no tensor's content hangs on the others'."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(t.name.encode())]))
    data = t.make(rng)
    assert data.nbytes == t.size_bytes, (t.name, data.nbytes, t.size_bytes)
    return data


def _type(name: str) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType[name.upper()]
    except KeyError:
        raise MoestreamError(f"unknown ggml type {name!r}", hint="for example Q4_0, Q8_0, F16, F32") from None


@dataclass(frozen=True)
class _Plan:
    """Shapes and the scales that follow from them."""

    n_layer: int
    n_expert: int
    n_used: int
    d_model: int
    d_ff: int
    n_head: int
    n_head_kv: int
    d_head: int
    n_vocab: int
    routing: Routing
    gain: float

    def check(self) -> None:
        if not 1 <= self.n_used <= self.n_expert:
            raise MoestreamError(f"{self.n_used} experts used of {self.n_expert}", hint="n_used lies between 1 and n_expert")
        if self.n_vocab < FIRST_FILLER:
            raise MoestreamError(f"a vocabulary of {self.n_vocab} tokens", hint=f"at least {FIRST_FILLER}")
        if self.d_head % 2 or self.n_head % self.n_head_kv or self.d_model < 16:
            raise MoestreamError(
                f"{self.n_head} heads, {self.n_head_kv} KV heads of width {self.d_head} at model width {self.d_model}",
                hint="an even head width, a multiple of KV heads as heads, a width of at least 16",
            )

    # The residual stream is divided: [0, a) is the same for all tokens, [a, b) is the token's, [b, d_model) is the topic.

    @property
    def a(self) -> int:
        return 32 if self.d_model >= 128 else self.d_model // 4  # one quantisation block where there is room

    @property
    def b(self) -> int:
        return self.a + (self.d_model - self.a) // 2

    @property
    def common(self) -> float:
        """Value of the shared part; as much energy as the token part has."""
        return math.sqrt((self.b - self.a) / self.a)

    @property
    def norm_in(self) -> float:
        """Root mean square of the residual stream that enters layer 0, when the token part has standard deviation 1."""
        return math.sqrt(2 * (self.b - self.a) / self.d_model)

    def tensors(self, expert: gguf.GGMLQuantizationType, dense: gguf.GGMLQuantizationType) -> Iterator[_Tensor]:
        f32 = gguf.GGMLQuantizationType.F32
        d, ff, head = self.d_model, self.d_ff, self.d_head
        q, kv = self.n_head * head, self.n_head_kv * head

        def ones(name: str, n: int, value: float = 1.0) -> _Tensor:
            return _Tensor(name, (n,), f32, lambda rng: np.full(n, value, np.float32))

        def random(name: str, shape: tuple[int, ...], type: gguf.GGMLQuantizationType, std: float) -> _Tensor:
            return _Tensor(name, shape, type, lambda rng: random_weights(rng, shape, type, std))

        def built(name: str, shape: tuple[int, ...], type: gguf.GGMLQuantizationType, make) -> _Tensor:
            return _Tensor(name, shape, type, lambda rng: encode(make(rng), type))

        # A SwiGLU of two standard normal inputs has a root mean square of 0.60; the used experts' outputs are averaged.
        down_std = self.gain / (0.60 * math.sqrt(ff / self.n_used))

        yield built("token_embd.weight", (self.n_vocab, d), dense, self._embedding)
        for i in range(self.n_layer):
            p = f"blk.{i}."
            yield ones(p + "attn_norm.weight", d)
            if i == 0:
                yield built(p + "attn_q.weight", (q, d), dense, lambda rng: self._constant(q))
                yield built(p + "attn_k.weight", (kv, d), dense, lambda rng: self._constant(kv))
                yield built(p + "attn_v.weight", (kv, d), dense, self._topic_value)
                yield built(p + "attn_output.weight", (d, q), dense, self._topic_output)
                yield ones(p + "attn_q_norm.weight", head, self._phase_weight())
                yield ones(p + "attn_k_norm.weight", head, self._phase_weight())
            else:
                yield random(p + "attn_q.weight", (q, d), dense, 1 / math.sqrt(d))
                yield random(p + "attn_k.weight", (kv, d), dense, 1 / math.sqrt(d))
                yield random(p + "attn_v.weight", (kv, d), dense, 1 / math.sqrt(d))
                yield random(p + "attn_output.weight", (d, q), dense, self.gain / math.sqrt(q))
                yield ones(p + "attn_q_norm.weight", head)
                yield ones(p + "attn_k_norm.weight", head)
            yield ones(p + "ffn_norm.weight", d)
            yield built(p + "ffn_gate_inp.weight", (self.n_expert, d), f32, self._router)
            yield random(p + "ffn_gate_exps.weight", (self.n_expert, ff, d), expert, 1 / math.sqrt(d))
            yield random(p + "ffn_up_exps.weight", (self.n_expert, ff, d), expert, 1 / math.sqrt(d))
            yield random(p + "ffn_down_exps.weight", (self.n_expert, d, ff), expert, down_std)
        yield ones("output_norm.weight", d)
        # Flat logits: sampled text then wanders over the whole vocabulary, as the random tokens of llama-bench do.
        yield random("output.weight", (self.n_vocab, d), dense, 0.5 / math.sqrt(d))

    def _embedding(self, rng: np.random.Generator) -> np.ndarray:
        e = np.zeros((self.n_vocab, self.d_model), np.float32)
        e[:, : self.a] = self.common
        e[:, self.a : self.b] = rng.standard_normal((self.n_vocab, self.b - self.a), dtype=np.float32)
        return e

    def _constant(self, n: int) -> np.ndarray:
        """[n, d_model]: the same number in every output, whatever the token: the query and key of layer 0."""
        w = np.zeros((n, self.d_model), np.float32)
        w[:, : self.a] = 1 / math.sqrt(self.a)
        return w

    def _kernel_scale(self) -> float:
        """Factor s such that exp(s * sum_i cos(theta_i * distance)) falls as distance^-recency.

        With geometric rotary frequencies the sum falls by d_head/2 over ln(base) units of ln(distance).
        """
        return self.routing.recency * math.log(ROPE_BASE) / (self.d_head / 2)

    def _phase_weight(self) -> float:
        # q.k/sqrt(d_head) = w_q * w_k * 2 * sum_i cos(theta_i * distance) / sqrt(d_head)
        return math.sqrt(self._kernel_scale() * math.sqrt(self.d_head) / 2)

    def effective_tokens(self, n_tokens: int = 256) -> float:
        """1 / sum of squares of the topic's weights: over how many tokens it averages."""
        theta = ROPE_BASE ** (-np.arange(self.d_head // 2) / (self.d_head / 2))
        score = self._kernel_scale() * np.cos(np.outer(np.arange(n_tokens), theta)).sum(1)
        w = np.exp(score - score.max())
        w /= w.sum()
        return float(1 / (w * w).sum())

    def _topic_value(self, rng: np.random.Generator) -> np.ndarray:
        n = self.n_head_kv * self.d_head
        w = np.zeros((n, self.d_model), np.float32)
        w[:, self.a : self.b] = rng.standard_normal((n, self.b - self.a), dtype=np.float32) / math.sqrt(self.b - self.a)
        return w

    def _topic_output(self, rng: np.random.Generator) -> np.ndarray:
        """Scaled so that the topic has a standard deviation of 1 in every component once the context is long."""
        n = self.n_head * self.d_head
        mean_std = 1 / (self.norm_in * math.sqrt(self.effective_tokens()))
        w = np.zeros((self.d_model, n), np.float32)
        w[self.b :] = rng.standard_normal((self.d_model - self.b, n), dtype=np.float32) / (math.sqrt(n) * mean_std)
        return w

    def _router(self, rng: np.random.Generator) -> np.ndarray:
        """[n_expert, d_model], see the module's text. The RMS norm before it divides all three parts alike."""
        popularity = -np.log(np.arange(1, self.n_expert + 1))
        popularity -= popularity.mean()
        popularity /= popularity.std() or 1.0
        w = np.empty((self.n_expert, self.d_model), np.float32)
        w[:, : self.a] = (self.routing.skew * rng.permutation(popularity) / (self.a * self.common))[:, None]
        for lo, hi, scale in ((self.a, self.b, 1.0), (self.b, self.d_model, self.routing.locality)):
            part = rng.standard_normal((self.n_expert, hi - lo), dtype=np.float32)
            w[:, lo:hi] = scale * part / math.sqrt(hi - lo)
        return w


def random_weights(rng: np.random.Generator, shape: tuple[int, ...], type: gguf.GGMLQuantizationType, std: float) -> np.ndarray:
    """Random weights of mean zero and about the given standard deviation, as the bytes of a ggml type.

    Returns:
        float32 or float16 of ``shape``, or uint8 of ``shape`` with the last dimension in bytes.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[type]
    n_block = math.prod(shape) // block
    if type.name in ("Q4_0", "Q8_0"):
        raw = rng.integers(0, 1 << 64, -(-n_block * block_bytes // 8), dtype=np.uint64).view(np.uint8)
        raw = raw[: n_block * block_bytes].reshape(n_block, block_bytes)
        # Q4_0 holds d * (nibble - 8): uniform nibbles have the mean -1/2 and the root mean square 4.64. Q8_0 holds d * int8.
        rms = 4.64 if type.name == "Q4_0" else 73.9
        # The sign of d is random too: that is what makes the mean zero. 64 magnitudes.
        table = (std / rms * np.linspace(0.75, 1.25, 64)).astype(np.float16)
        table = np.concatenate([table, -table])
        raw[:, :2] = table[raw[:, 0] & 127].view(np.uint8).reshape(n_block, 2)
        return raw.reshape(*shape[:-1], -1)
    return encode(rng.standard_normal(shape, dtype=np.float32) * np.float32(std), type)


def encode(values: np.ndarray, type: gguf.GGMLQuantizationType) -> np.ndarray:
    """float32 values as the bytes of a ggml type."""
    values = np.ascontiguousarray(values, np.float32)
    try:
        return gguf.quants.quantize(values, type)
    except NotImplementedError:
        raise MoestreamError(
            f"weights of type {type.name} cannot be made here", hint="write F16 and convert it with llama-quantize"
        ) from None


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A byte-level BPE: the 256 bytes, one end token, one merge (llama.cpp wants a list of them), fillers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # GPT-2's table: a byte that has no printable form is shown as a character from U+0100 on.
    shown = {b: chr(b) for b in printable}
    shown |= {b: chr(0x100 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
    tokens = [shown[b] for b in range(256)] + ["<|end|>", "\u0120t"]
    tokens += [f"\u0120filler{i}" for i in range(FIRST_FILLER, n_vocab)]
    types = [gguf.TokenType.NORMAL] * n_vocab
    types[N_BYTE_TOKENS] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["\u0120 t"])
    writer.add_eos_token_id(N_BYTE_TOKENS)
    writer.add_bos_token_id(N_BYTE_TOKENS)
    writer.add_add_bos_token(False)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Write a synthetic qwen3moe GGUF with skewed, local routing.")
    p.add_argument("path", type=Path, help="file to write")
    p.add_argument(
        "--arch", choices=("qwen3moe", "gemma4"), default="qwen3moe", help="gemma4: its shape is fixed but for --layers"
    )
    p.add_argument("--hit", type=int, choices=sorted(PRESETS), default=75, help="LRU hits in percent at 32 of 128 slots")
    p.add_argument("--skew", type=float, help="popularity of experts, instead of the preset's")
    p.add_argument("--locality", type=float, help="weight of recent tokens, instead of the preset's")
    p.add_argument("--recency", type=float, help="how fast older tokens fade: distance^-RECENCY, instead of the preset's")
    p.add_argument("--layers", type=int, help="48, of gemma4 30")
    p.add_argument("--experts", type=int, default=128)
    p.add_argument("--used", type=int, default=8, help="experts chosen for a token")
    p.add_argument("--d-model", type=int, default=2048)
    p.add_argument("--d-ff", type=int, default=768, help="width of an expert")
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=4)
    p.add_argument("--d-head", type=int, default=128)
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--expert-type", default="Q4_0")
    p.add_argument("--dense-type", default="Q8_0")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args(argv)
    preset = PRESETS[a.hit]
    routing = Routing(
        preset.skew if a.skew is None else a.skew,
        preset.locality if a.locality is None else a.locality,
        preset.recency if a.recency is None else a.recency,
    )

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done / 2**30:6.2f} of {total / 2**30:.2f} GiB")
            sys.stderr.flush()

    start = time.monotonic()
    try:
        if a.arch == "gemma4":
            write_gemma4(a.path, n_layer=a.layers or 30, seed=a.seed, progress=progress)
            routing = UNIFORM
        else:
            write_model(
                a.path, n_layer=a.layers or 48, n_expert=a.experts, n_used=a.used, d_model=a.d_model, d_ff=a.d_ff, n_head=a.heads,
                n_head_kv=a.kv_heads, d_head=a.d_head, n_vocab=a.vocab, expert_type=a.expert_type, dense_type=a.dense_type,
                seed=a.seed, routing=routing, progress=progress,
            )  # fmt: skip
    except MoestreamError as e:
        print(f"error: {e.message}" + (f"\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return e.exit_code
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    print(f"{a.path}: {a.path.stat().st_size / 2**30:.2f} GiB in {time.monotonic() - start:.0f} s, {routing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
