"""Malformed GGUFs: a tiny valid model that the engine serves, and structured, byte-precise damage to it.

The header is written here and not by the gguf package, which would refuse or correct most of these values.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}

N_LAYER, N_EXPERT, N_USED = 2, 8, 2
WIDTH, FF, N_HEAD, N_HEAD_KV, HEAD = 32, 32, 2, 1, 16
TYPE_F32, TYPE_Q4_0 = 0, 2


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def number(type_id: int, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{_FORMATS[type_id]}", *values)


def array(type_id: int, values: list, length: int | None = None) -> bytes:
    """An array's value; ``length`` is what its header says, where that is not the truth."""
    items = b"".join(map(text, values)) if type_id == STR else number(type_id, *values)
    return struct.pack("<IQ", type_id, len(values) if length is None else length) + items


@dataclass
class Tensor:
    """``offset``: what the header says, from the start of the data; None for the right one."""

    name: str | bytes
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class Gguf:
    """All fields of a file. ``n_tensor`` and ``n_kv`` are what the header says, None for the truth."""

    kv: dict[str, tuple[int, bytes]]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensor: int | None = None
    n_kv: int | None = None
    padding: int = 32  # of the writer; general.alignment is a key
    behind_kv: bytes = b""
    behind_infos: bytes = b""
    marks: dict[str, int] = field(default_factory=dict)  # where the parts begin; set by ``write``

    def set(self, key: str, type_id: int, *values: float) -> None:
        self.kv[key] = (type_id, number(type_id, *values))

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def offset_of(self, name: str) -> int:
        """The right offset of a tensor."""
        at = 0
        for t in self.tensors:
            if t.name == name:
                return at
            at += -(-len(t.data) // self.padding) * self.padding
        raise KeyError(name)

    def write(self) -> bytes:
        out = bytearray(self.magic + struct.pack("<I", self.version))
        self.marks = {"counts": len(out)}
        for said, true in ((self.n_tensor, len(self.tensors)), (self.n_kv, len(self.kv))):
            out += struct.pack("<Q", (true if said is None else said) & (1 << 64) - 1)
        self.marks["kv"] = len(out)
        for key, (type_id, value) in self.kv.items():
            out += text(key) + struct.pack("<I", type_id) + value
        out += self.behind_kv
        self.marks["infos"] = len(out)
        at = 0
        for t in self.tensors:
            shape = [n & (1 << 64) - 1 for n in t.shape]
            out += text(t.name) + struct.pack("<I", len(shape) if t.n_dims is None else t.n_dims)
            out += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<I", t.type)
            out += struct.pack("<Q", at if t.offset is None else t.offset)
            at += -(-len(t.data) // self.padding) * self.padding
        out += self.behind_infos
        self.marks["header end"] = len(out)
        out += bytes(-len(out) % self.padding)
        self.marks["data"] = len(out)
        for t in self.tensors:
            out += t.data + bytes(-len(t.data) % self.padding)
        return bytes(out)


def tiny() -> Gguf:
    """A model of two MoE layers that is served: F32, a vocabulary of bytes, random weights. 260 KiB."""
    kv, tensors = _tiny_parts()
    return Gguf(kv=dict(kv), tensors=[replace(t) for t in tensors])


@cache
def _tiny_parts() -> tuple[dict[str, tuple[int, bytes]], list[Tensor]]:
    arch = "qwen3moe"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"abcdefghijklmnopqrstuvwxyz "]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 27]
    g = Gguf(
        kv={
            "general.architecture": (STR, text(arch)),
            "general.name": (STR, text("tiny")),
            "tokenizer.ggml.model": (STR, text("llama")),
            "tokenizer.ggml.tokens": (ARR, array(STR, tokens)),
            "tokenizer.ggml.scores": (ARR, array(F32, [-float(i) for i in range(len(tokens))])),
            "tokenizer.ggml.token_type": (ARR, array(I32, kinds)),
        },
        tensors=[],
    )
    for key, value in {
        "block_count": N_LAYER,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": FF,
        "expert_feed_forward_length": FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "expert_count": N_EXPERT,
        "expert_used_count": N_USED,
    }.items():
        g.set(f"{arch}.{key}", U32, value)
    g.set(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-6)
    g.set("tokenizer.ggml.bos_token_id", U32, 1)
    g.set("tokenizer.ggml.eos_token_id", U32, 2)

    rng = random.Random(1)

    def add(name: str, *shape: int, ones: bool = False) -> None:
        count = 1
        for n in shape:
            count *= n
        values = [1.0] * count if ones else [rng.uniform(-0.3, 0.3) for _ in range(count)]
        g.tensors.append(Tensor(name, shape, TYPE_F32, number(F32, *values)))

    add("token_embd.weight", WIDTH, len(tokens))
    add("output_norm.weight", WIDTH, ones=True)
    for il in range(N_LAYER):
        b = f"blk.{il}."
        add(b + "attn_norm.weight", WIDTH, ones=True)
        add(b + "attn_q.weight", WIDTH, N_HEAD * HEAD)
        add(b + "attn_k.weight", WIDTH, N_HEAD_KV * HEAD)
        add(b + "attn_v.weight", WIDTH, N_HEAD_KV * HEAD)
        add(b + "attn_output.weight", N_HEAD * HEAD, WIDTH)
        add(b + "attn_q_norm.weight", HEAD, ones=True)
        add(b + "attn_k_norm.weight", HEAD, ones=True)
        add(b + "ffn_norm.weight", WIDTH, ones=True)
        add(b + "ffn_gate_inp.weight", WIDTH, N_EXPERT)
        add(b + "ffn_gate_exps.weight", WIDTH, FF, N_EXPERT)
        add(b + "ffn_down_exps.weight", FF, WIDTH, N_EXPERT)
        add(b + "ffn_up_exps.weight", WIDTH, FF, N_EXPERT)
    return g.kv, g.tensors
    return g


def write_shards(folder: Path, name: str, n_shard: int) -> list[Path]:
    """The tiny model split as llama-gguf-split does it: all keys in the first shard, the tensors spread over all."""
    whole = tiny()
    files = []
    for i in range(n_shard):
        g = Gguf(kv=dict(whole.kv) if i == 0 else {}, tensors=whole.tensors[i::n_shard])
        g.set("split.no", U16, i)
        g.set("split.count", U16, n_shard)
        g.set("split.tensors.count", I32, len(whole.tensors))
        files.append(folder / f"{name}-{i + 1:05d}-of-{n_shard:05d}.gguf")
        files[-1].write_bytes(g.write())
    return files


Edit = Callable[[Gguf], None]


def full(key: str) -> str:
    """A key with the architecture in front, where it belongs to one."""
    return key if key.startswith(("general.", "tokenizer.", "split.", "x.")) else f"qwen3moe.{key}"


UP, DOWN, GATE = ("blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight", "blk.1.ffn_gate_exps.weight")


def set_key(key: str, type_id: int, *values: float) -> Edit:
    return lambda g: g.set(full(key), type_id, *values)


def set_array(key: str, type_id: int, values: list, length: int | None = None) -> Edit:
    return lambda g: g.kv.update({full(key): (ARR, array(type_id, values, length))})


def drop(key: str) -> Edit:
    return lambda g: g.kv.pop(full(key))


def set_text(key: str, value: str) -> Edit:
    return lambda g: g.kv.update({full(key): (STR, text(value))})


def set_raw(key: str, type_id: int, value: bytes) -> Edit:
    return lambda g: g.kv.update({full(key): (type_id, value)})


def header(**fields: int | bytes) -> Edit:
    return lambda g: vars(g).update(fields)


def tensor(name: str, **fields: object) -> Edit:
    return lambda g: vars(g.tensor(name)).update(fields)


def added(name: str, shape: tuple[int, ...]) -> Edit:
    return lambda g: g.tensors.append(Tensor(name, shape, TYPE_F32, bytes(4 * math.prod(shape))))


def removed(*names: str) -> Edit:
    def edit(g: Gguf) -> None:
        g.tensors = [t for t in g.tensors if t.name not in names]

    return edit


def all_experts(n: int) -> Edit:
    """Every tensor with one entry an expert has ``n`` of them, data and all; expert_count stays."""

    def edit(g: Gguf) -> None:
        for t in g.tensors:
            if "_exps." in t.name or "gate_inp" in t.name:
                one = len(t.data) // N_EXPERT
                t.shape, t.data = (*t.shape[:-1], n), (t.data * -(-n // N_EXPERT))[: one * n]

    return edit


def resized(name: str, *shape: int) -> Edit:
    """Another shape with as much data as it takes."""

    def edit(g: Gguf) -> None:
        t, n = g.tensor(name), 4
        for d in shape:
            n *= d
        t.shape, t.data = shape, (t.data * (n // len(t.data) + 1))[:n]

    return edit


def at_another(name: str, other: str, more: int = 0) -> Edit:
    """The tensor's offset is the other's, plus ``more``."""
    return lambda g: setattr(g.tensor(name), "offset", g.offset_of(other) + more)


def renamed(name: str, to: str | bytes) -> Edit:
    return lambda g: setattr(g.tensor(name), "name", to)


def both(*edits: Edit) -> Edit:
    def edit(g: Gguf) -> None:
        for e in edits:
            e(g)

    return edit


BIG = 1 << 31
HUGE = (1 << 32) - 1
ARCH = "general.architecture"


@dataclass(frozen=True)
class Case:
    """Damage, and what is said about it; None where the file is read (Python) or served (the engine)."""

    edit: Edit
    python: str | None
    engine: str | None

    def write(self) -> bytes:
        g = tiny()
        self.edit(g)
        return g.write()


CASES: dict[str, Case] = {
    # counts
    "expert_count 0": Case(set_key("expert_count", U32, 0), "qwen3moe.expert_used_count 2 exceeds qwen3moe.expert_count 0", "qwen3moe.expert_used_count is 2: expected no more than the 0 of expert_count"),
    "expert_count 1": Case(set_key("expert_count", U32, 1), "qwen3moe.expert_used_count 2 exceeds qwen3moe.expert_count 1", "qwen3moe.expert_used_count is 2: expected no more than the 1 of expert_count"),
    "expert_count 4": Case(set_key("expert_count", U32, 4), "expert tensor blk.0.ffn_gate_exps.weight has 8 experts, qwen3moe.expert_count says 4", "tensor 'blk.0.ffn_gate_inp.weight' has wrong shape"),
    "expert_count 9": Case(set_key("expert_count", U32, 9), "expert tensor blk.0.ffn_gate_exps.weight has 8 experts, qwen3moe.expert_count says 9", "tensor 'blk.0.ffn_gate_inp.weight' has wrong shape"),
    "expert_count 2^31": Case(set_key("expert_count", U32, BIG), "absurd qwen3moe.expert_count: 2147483648", "qwen3moe.expert_count is 2147483648: expected at most 1024"),
    "expert_count 2^32-1": Case(set_key("expert_count", U32, HUGE), "absurd qwen3moe.expert_count: 4294967295", "qwen3moe.expert_count is 4294967295: expected at most 1024"),
    "expert_count missing": Case(drop("expert_count"), "qwen3moe.expert_used_count 2 exceeds qwen3moe.expert_count 0", "qwen3moe.expert_used_count is 2: expected no more than the 0 of expert_count"),
    "expert_count -8": Case(set_key("expert_count", I32, -8), "absurd qwen3moe.expert_count: -8", "key qwen3moe.expert_count has wrong type i32 but expected type u32"),
    "expert_count f32": Case(set_key("expert_count", F32, 8), "absurd qwen3moe.expert_count: 8.0", "key qwen3moe.expert_count has wrong type f32 but expected type u32"),
    "expert_count str": Case(set_text("expert_count", "8"), "absurd qwen3moe.expert_count: '8'", "key qwen3moe.expert_count has wrong type str but expected type u32"),
    "expert_count array": Case(set_array("expert_count", U32, [8, 8]), "absurd qwen3moe.expert_count: [8, 8]", "key qwen3moe.expert_count has wrong type arr but expected type u32"),
    "used 0": Case(set_key("expert_used_count", U32, 0), "layer 0 has experts and uses none: qwen3moe.expert_used_count is 0", "qwen3moe.expert_used_count is 0: expected 1 to 8"),
    "used missing": Case(drop("expert_used_count"), "layer 0 has experts and uses none: qwen3moe.expert_used_count is 0", "qwen3moe.expert_used_count is 0: expected 1 to 8"),
    "used > count": Case(set_key("expert_used_count", U32, 9), "qwen3moe.expert_used_count 9 exceeds qwen3moe.expert_count 8", "qwen3moe.expert_used_count is 9: expected no more than the 8 of expert_count"),
    "used 2^32-1": Case(set_key("expert_used_count", U32, HUGE), "absurd qwen3moe.expert_used_count: 4294967295", "qwen3moe.expert_used_count is 4294967295: expected no more than the 8 of expert_count"),
    "used array 1": Case(set_array("expert_used_count", U32, [2]), "absurd qwen3moe.expert_used_count: [2]", "key qwen3moe.expert_used_count has wrong array length; expected 2, got 1"),
    "used array 3": Case(set_array("expert_used_count", U32, [2, 2, 2]), "absurd qwen3moe.expert_used_count: [2, 2, 2]", "key qwen3moe.expert_used_count has wrong array length; expected 2, got 3"),
    "used array 0": Case(set_array("expert_used_count", U32, []), "absurd qwen3moe.expert_used_count: []", "qwen3moe.expert_used_count is 0: expected 1 to 8"),
    "used array lies": Case(set_array("expert_used_count", U32, [2, 2], 1 << 62), "absurd length 4611686018427387904 of the array qwen3moe.expert_used_count", "absurd length of the array 'qwen3moe.expert_used_count': 4611686018427387904"),
    "used array > count": Case(set_array("expert_used_count", U32, [2, 9]), "qwen3moe.expert_used_count 9 exceeds qwen3moe.expert_count 8", "qwen3moe.expert_used_count is 9: expected no more than the 8 of expert_count"),
    "used array zero": Case(set_array("expert_used_count", U32, [2, 0]), "layer 1 has experts and uses none: qwen3moe.expert_used_count is 0", "layer 1 has experts ('blk.1.ffn_gate_exps.weight') and uses none: its expert_used_count is 0"),
    "used array str": Case(set_array("expert_used_count", STR, ["2", "2"]), "absurd qwen3moe.expert_used_count: ['2', '2']", "qwen3moe.expert_used_count has wrong array element type str"),
    "used array f32": Case(set_array("expert_used_count", F32, [2, 2]), "absurd qwen3moe.expert_used_count: [2.0, 2.0]", "qwen3moe.expert_used_count has wrong array element type f32"),
    "used array of arrays": Case(set_raw("expert_used_count", ARR, struct.pack("<IQ", ARR, 0)), "the array qwen3moe.expert_used_count has unknown type 9", "key 'qwen3moe.expert_used_count' has invalid GGUF type 9"),
    "groups = count": Case(set_key("expert_group_count", U32, 8), None, "qwen3moe.expert_group_count is 8: expected less than the 8 of expert_count"),
    "groups no divisor": Case(both(set_key("expert_group_count", U32, 3), set_key("expert_group_used_count", U32, 1)), None, "qwen3moe.expert_group_count is 3: expected a divisor of the 8 of expert_count"),
    "groups used 0": Case(set_key("expert_group_count", U32, 4), None, "qwen3moe.expert_group_used_count is 0: expected 1 to 3, with 4 groups"),
    "groups used > groups": Case(both(set_key("expert_group_count", U32, 4), set_key("expert_group_used_count", U32, 4)), None, "qwen3moe.expert_group_used_count is 4: expected 1 to 3, with 4 groups"),
    "block_count 0": Case(set_key("block_count", U32, 0), "expert tensor blk.0.ffn_gate_exps.weight belongs to layer 0, qwen3moe.block_count says 0", "qwen3moe.block_count is 0: expected 1 to 512"),
    "block_count 1": Case(set_key("block_count", U32, 1), "expert tensor blk.1.ffn_gate_exps.weight belongs to layer 1, qwen3moe.block_count says 1", "wrong number of tensors; expected 26, got 14"),
    "block_count 3": Case(set_key("block_count", U32, 3), None, "tensor 'blk.2.attn_norm.weight' not found"),
    "block_count 513": Case(set_key("block_count", U32, 513), None, "qwen3moe.block_count is 513: expected 1 to 512"),
    "block_count 2^32-1": Case(set_key("block_count", U32, HUGE), "absurd qwen3moe.block_count: 4294967295", "qwen3moe.block_count is 4294967295: expected 1 to 512"),
    "block_count missing": Case(drop("block_count"), "no qwen3moe.block_count in the header", "key not found in model: qwen3moe.block_count"),
    "nextn 3": Case(set_key("nextn_predict_layers", U32, 3), "qwen3moe.nextn_predict_layers 3 exceeds qwen3moe.block_count 2", "qwen3moe.nextn_predict_layers is 3: expected no more than the 2 of block_count"),
    "nextn 2": Case(set_key("nextn_predict_layers", U32, 2), None, "wrong number of tensors; expected 26, got 2"),
    "nextn 1": Case(set_key("nextn_predict_layers", U32, 1), None, "wrong number of tensors; expected 26, got 14"),
    "n_embd 0": Case(set_key("embedding_length", U32, 0), None, "tensor 'token_embd.weight' has wrong shape"),
    "n_embd 2^32-1": Case(set_key("embedding_length", U32, HUGE), "absurd qwen3moe.embedding_length: 4294967295", "tensor 'token_embd.weight' has wrong shape"),
    "n_head 0": Case(set_key("attention.head_count", U32, 0), None, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    "n_head 3": Case(set_key("attention.head_count", U32, 3), None, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    "n_head 2^31": Case(set_key("attention.head_count", U32, BIG), "absurd qwen3moe.attention.head_count: 2147483648", "tensor 'blk.0.attn_q.weight' has wrong shape"),
    "n_head_kv 0": Case(set_key("attention.head_count_kv", U32, 0), None, "tensor 'blk.0.attn_k.weight' has wrong shape"),
    "n_head_kv 3": Case(set_key("attention.head_count_kv", U32, 3), None, "tensor 'blk.0.attn_k.weight' has wrong shape"),
    "n_head array 1": Case(set_array("attention.head_count", U32, [2]), "absurd qwen3moe.attention.head_count: [2]", "key qwen3moe.attention.head_count has wrong array length; expected 2, got 1"),
    "head 0": Case(set_key("attention.key_length", U32, 0), None, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    "head_v 8": Case(set_key("attention.value_length", U32, 8), None, "tensor 'blk.0.attn_k.weight' has wrong shape"),
    "rope 7": Case(set_key("rope.dimension_count", U32, 7), None, "rope.dimension_count is 7: expected an even number"),
    "rope 8": Case(set_key("rope.dimension_count", U32, 8), None, "GGML_ASSERT(n_embd_head == n_rot) failed"),
    "rope 0": Case(set_key("rope.dimension_count", U32, 0), None, "GGML_ASSERT(n_embd_head == n_rot) failed"),
    "ctx 0": Case(set_key("context_length", U32, 0), None, "context_length is 0: expected 1 or more"),
    "ctx 2^32-1": Case(set_key("context_length", U32, HUGE), "absurd qwen3moe.context_length: 4294967295", None),
    "ctx missing": Case(drop("context_length"), None, "key not found in model: qwen3moe.context_length"),
    "eps nan": Case(set_key("attention.layer_norm_rms_epsilon", F32, float("nan")), None, "the epsilon of a norm is nan: expected a number that is not negative"),
    "rope scaling type": Case(set_text("rope.scaling.type", "x"), None, "GGML_ASSERT(hparams.rope_scaling_type_train != LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED) failed"),
    "arch missing": Case(drop(ARCH), "no general.architecture in the header", "unknown model architecture: ''"),
    "arch unknown": Case(set_text(ARCH, "nosuch"), "no nosuch.block_count in the header", "unknown model architecture: 'nosuch'"),
    "arch empty": Case(set_text(ARCH, ""), "no general.architecture in the header", "unknown model architecture: ''"),
    "arch u32": Case(set_key(ARCH, U32, 3), "no general.architecture in the header", "key general.architecture has wrong type u32 but expected type str"),
    # vocabulary
    "tokens missing": Case(drop("tokenizer.ggml.tokens"), None, "cannot find tokenizer vocab in model file"),
    "tokens u32": Case(set_array("tokenizer.ggml.tokens", U32, list(range(286))), None, "invalid gguf type for tokenizer.ggml.tokens"),
    "scores u32": Case(set_array("tokenizer.ggml.scores", U32, list(range(286))), None, "invalid gguf type for tokenizer.ggml.scores"),
    "scores short": Case(set_array("tokenizer.ggml.scores", F32, [0.0]), None, "Index out of array bounds for scores (1 < 286)"),
    "token_type str": Case(set_array("tokenizer.ggml.token_type", STR, ["a"] * 286), None, "invalid gguf type for tokenizer.ggml.token_type"),
    "token_type short": Case(set_array("tokenizer.ggml.token_type", I32, [1]), None, "Index out of array bounds for toktypes (1 < 286)"),
    "bos out of range": Case(set_key("tokenizer.ggml.bos_token_id", U32, HUGE), None, None),
    "tokenizer unknown": Case(set_text("tokenizer.ggml.model", "nosuch"), None, "unknown tokenizer: 'nosuch'"),
    "tokenizer gpt2 no merges": Case(set_text("tokenizer.ggml.model", "gpt2"), None, "cannot find tokenizer merges in model file"),
    # offsets
    "offset past end": Case(tensor(UP, offset=1 << 40), "is truncated: tensor blk.1.ffn_up_exps.weight needs 1099511669248 bytes", "tensor 'blk.1.ffn_up_exps.weight' has offset 1099511627776, expected 227968"),
    "offset 2^64-32": Case(tensor(UP, offset=(1 << 64) - 32), "tensor blk.1.ffn_up_exps.weight has an absurd offset 18446744073709551584", "tensor 'blk.1.ffn_up_exps.weight' has offset 18446744073709551584, expected 227968"),
    "offset 2^63": Case(tensor(UP, offset=1 << 63), "tensor blk.1.ffn_up_exps.weight has an absurd offset 9223372036854775808", "tensor 'blk.1.ffn_up_exps.weight' has offset 9223372036854775808, expected 227968"),
    "offset misaligned": Case(at_another(UP, UP, 4), "tensor blk.1.ffn_up_exps.weight has an absurd offset 227972", "tensor 'blk.1.ffn_up_exps.weight' has offset 227972, expected 227968"),
    "offset +32": Case(at_another(UP, UP, 32), "is truncated: tensor blk.1.ffn_up_exps.weight needs 269472 bytes", "tensor 'blk.1.ffn_up_exps.weight' has offset 228000, expected 227968"),
    "overlap experts": Case(at_another(UP, DOWN), "tensor blk.1.ffn_up_exps.weight begins at 195200 of the data, 227968 is expected", "tensor 'blk.1.ffn_up_exps.weight' has offset 195200, expected 227968"),
    "overlap experts of another layer": Case(at_another(UP, "blk.0.ffn_up_exps.weight"), "tensor blk.1.ffn_up_exps.weight begins at 115968 of the data, 227968 is expected", "tensor 'blk.1.ffn_up_exps.weight' has offset 115968, expected 227968"),
    "overlap dense": Case(at_another("blk.0.attn_q.weight", "blk.0.attn_output.weight"), "tensor blk.0.attn_q.weight begins at 45056 of the data, 36864 is expected", "tensor 'blk.0.attn_q.weight' has offset 45056, expected 36864"),
    "overlap partly": Case(at_another(UP, DOWN, 32 * 32 * 4), "tensor blk.1.ffn_up_exps.weight begins at 199296 of the data, 227968 is expected", "tensor 'blk.1.ffn_up_exps.weight' has offset 199296, expected 227968"),
    "swapped": Case(both(at_another(UP, DOWN), at_another(DOWN, UP)), "tensor blk.1.ffn_down_exps.weight begins at 227968 of the data, 195200 is expected", "tensor 'blk.1.ffn_down_exps.weight' has offset 227968, expected 195200"),
    # shapes
    "dim 0": Case(tensor(UP, shape=(0, FF, N_EXPERT)), "expert tensor blk.1.ffn_up_exps.weight has shape (0, 32, 8), three dimensions are expected", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "dim 0 rows": Case(tensor(UP, shape=(WIDTH, 0, N_EXPERT)), "expert tensor blk.1.ffn_up_exps.weight has shape (32, 0, 8), three dimensions are expected", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "dim 0 experts": Case(tensor(UP, shape=(WIDTH, FF, 0)), "expert tensor blk.1.ffn_up_exps.weight has shape (32, 32, 0), three dimensions are expected", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "dim 0 experts, no data": Case(tensor(UP, shape=(WIDTH, FF, 0), data=b""), "expert tensor blk.1.ffn_up_exps.weight has shape (32, 32, 0), three dimensions are expected", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "dim 0 dense": Case(tensor("blk.0.attn_q.weight", shape=(WIDTH, 0), data=b""), None, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    "dim -1": Case(tensor(UP, shape=(WIDTH, FF, -1)), "tensor blk.1.ffn_up_exps.weight has a negative dimension: (32, 32, -1)", "tensor 'blk.1.ffn_up_exps.weight' dimension 2 has invalid number of elements: -1 < 0"),
    "dims overflow": Case(tensor(UP, shape=(1 << 32, 1 << 32, N_EXPERT)), "tensor blk.1.ffn_up_exps.weight has an absurd shape (4294967296, 4294967296, 8)", "incorrect shape for a tensor 'blk.1.ffn_up_exps.weight' may cause overflow"),
    "dims overflow to 0": Case(tensor(UP, shape=(1 << 31, 1 << 31, 4)), "tensor blk.1.ffn_up_exps.weight has an absurd shape (2147483648, 2147483648, 4)", "incorrect shape for a tensor 'blk.1.ffn_up_exps.weight' may cause overflow"),
    "dims overflow bytes": Case(tensor(UP, shape=(1 << 31, 1 << 31, 1)), "tensor blk.1.ffn_up_exps.weight has an absurd shape (2147483648, 2147483648, 1)", "tensor 'blk.1.ffn_up_exps.weight' with shape (2147483648, 2147483648, 1, 1) has a size in "),
    "dims 2^31 experts": Case(tensor(UP, shape=(WIDTH, FF, BIG)), "is truncated: tensor blk.1.ffn_up_exps.weight needs 8796093258880 bytes", "tensor 'blk.1.ffn_up_exps.weight' data is not within the file bounds"),
    "experts 7": Case(resized(UP, WIDTH, FF, 7), "expert tensor blk.1.ffn_up_exps.weight has 7 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "experts 9": Case(resized(UP, WIDTH, FF, 9), "expert tensor blk.1.ffn_up_exps.weight has 9 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "gate 4 down 8": Case(resized(GATE, WIDTH, FF, 4), "expert tensor blk.1.ffn_gate_exps.weight has 4 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_gate_exps.weight' has wrong shape"),
    "all 4": Case(all_experts(4), "expert tensor blk.0.ffn_gate_exps.weight has 4 experts, qwen3moe.expert_count says 8", "tensor 'blk.0.ffn_gate_inp.weight' has wrong shape"),
    "all 16": Case(all_experts(16), "expert tensor blk.0.ffn_gate_exps.weight has 16 experts, qwen3moe.expert_count says 8", "tensor 'blk.0.ffn_gate_inp.weight' has wrong shape"),
    "2-D": Case(tensor(UP, shape=(WIDTH, FF * N_EXPERT)), "expert tensor blk.1.ffn_up_exps.weight has 1 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "1-D": Case(tensor(UP, shape=(WIDTH * FF * N_EXPERT,)), "expert tensor blk.1.ffn_up_exps.weight has 1 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "4-D": Case(tensor(UP, shape=(WIDTH, FF, N_EXPERT // 2, 2)), "expert tensor blk.1.ffn_up_exps.weight has shape (32, 32, 4, 2), three dimensions are expected", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "4-D one": Case(tensor(UP, shape=(WIDTH, FF, N_EXPERT, 1)), None, None),
    "rows and columns": Case(resized(UP, FF * 2, WIDTH // 2, N_EXPERT), None, "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "wide": Case(resized(UP, WIDTH, FF * 2, N_EXPERT), None, "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "0 dims": Case(tensor(UP, shape=()), "expert tensor blk.1.ffn_up_exps.weight has 1 experts, qwen3moe.expert_count says 8", "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
    "5 dims": Case(tensor(UP, shape=(WIDTH, FF, N_EXPERT, 1, 1)), "tensor blk.1.ffn_up_exps.weight has 5 dimensions", "tensor 'blk.1.ffn_up_exps.weight' has invalid number of dimensions: 5 > 4"),
    "2^32-1 dims": Case(tensor(UP, n_dims=HUGE), "tensor blk.1.ffn_up_exps.weight has 4294967295 dimensions", "tensor 'blk.1.ffn_up_exps.weight' has invalid number of dimensions: 4294967295 > 4"),
    "dense 3-D": Case(tensor("blk.0.attn_q.weight", shape=(WIDTH, N_HEAD * HEAD // 2, 2)), None, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    # types and names
    "type 4": Case(tensor(UP, type=4), "tensor blk.1.ffn_up_exps.weight has unknown ggml type 4", "tensor 'blk.1.ffn_up_exps.weight'"),
    "type 31": Case(tensor(UP, type=31), "tensor blk.1.ffn_up_exps.weight has unknown ggml type 31", "tensor 'blk.1.ffn_up_exps.weight'"),
    "type 100": Case(tensor(UP, type=100), "tensor blk.1.ffn_up_exps.weight has unknown ggml type 100", "tensor 'blk.1.ffn_up_exps.weight' has invalid ggml type 100"),
    "type 2^32-1": Case(tensor(UP, type=HUGE), "tensor blk.1.ffn_up_exps.weight has unknown ggml type 4294967295", "tensor 'blk.1.ffn_up_exps.weight' has invalid ggml type -1"),
    "type Q4_0 for F32": Case(tensor(UP, type=TYPE_Q4_0), None, None),
    "type F16 for F32": Case(tensor(UP, type=1), None, None),
    "type I32": Case(tensor(UP, type=26), "expert tensor blk.1.ffn_up_exps.weight has type I32, which is no type of weights", "tensor 'blk.1.ffn_up_exps.weight' has type i32, which is no type of weights"),
    "type F64 with data": Case(tensor(UP, type=28, data=bytes(8 * WIDTH * FF * N_EXPERT)), "expert tensor blk.1.ffn_up_exps.weight has type F64, which is no type of weights", "tensor 'blk.1.ffn_up_exps.weight' has type f64, which is no type of weights"),
    "type I32 dense": Case(tensor("blk.0.attn_q.weight", type=26), None, "tensor 'blk.0.attn_q.weight' has type i32, which is no type of weights"),
    "type I32 norm": Case(tensor("blk.0.attn_norm.weight", type=26), None, "tensor 'blk.0.attn_norm.weight' has type i32, which is no type of weights"),
    "type Q8_1": Case(tensor(UP, type=9, data=bytes(36 * FF * N_EXPERT)), "expert tensor blk.1.ffn_up_exps.weight has type Q8_1, which is no type of weights", "tensor 'blk.1.ffn_up_exps.weight' has type q8_1, which is no type of weights"),
    "type Q8_1 dense": Case(tensor("blk.0.attn_q.weight", type=9, data=bytes(36 * 32)), None, "tensor 'blk.0.attn_q.weight' has type q8_1, which is no type of weights"),
    "type Q8_K": Case(tensor(UP, type=15), "tensor blk.1.ffn_up_exps.weight: rows of 32 values are no multiple of Q8_K's block of 256", "tensor 'blk.1.ffn_up_exps.weight' of type 15 (q8_K) has 32 elements per row, not a multipl"),
    "duplicate": Case(renamed(UP, DOWN), "two tensors are named blk.1.ffn_down_exps.weight", "duplicate tensor name 'blk.1.ffn_down_exps.weight' for tensor 25"),
    "name empty": Case(renamed(UP, ""), "impossible tensor name", "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "name long": Case(renamed(UP, "blk.1.ffn_up_exps.weight" * 10), "impossible tensor name", "tensor name 25 is too long: 240 >= 64"),
    "name 64": Case(renamed(UP, "n" * 64), "impossible tensor name", "tensor name 25 is too long: 64 >= 64"),
    "name not utf-8": Case(renamed(UP, b"\xff\xfe\x00x"), "impossible tensor name", "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "name NUL": Case(renamed(UP, b"blk.1.ffn_up_exps.weight\x00x"), "impossible tensor name", None),
    "up missing": Case(removed(UP), None, "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "all of layer missing": Case(removed(UP, DOWN, GATE), None, "tensor 'blk.1.ffn_gate_exps.weight' not found"),
    "layer 7": Case(renamed(UP, "blk.7.ffn_up_exps.weight"), "expert tensor blk.7.ffn_up_exps.weight belongs to layer 7, qwen3moe.block_count says 2", "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "layer 600": Case(renamed(UP, "blk.600.ffn_up_exps.weight"), "expert tensor blk.600.ffn_up_exps.weight belongs to layer 600, qwen3moe.block_count says 2", "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "extra tensor": Case(added("blk.9.ffn_up_exps.weight", (WIDTH, FF, N_EXPERT)), "expert tensor blk.9.ffn_up_exps.weight belongs to layer 9, qwen3moe.block_count says 2", "wrong number of tensors; expected 27, got 26"),
    "extra gate_up": Case(added("blk.1.ffn_gate_up_exps.weight", (WIDTH, FF * 2, N_EXPERT)), None, "wrong number of tensors; expected 27, got 26"),
    "embd missing": Case(removed("token_embd.weight"), None, "tensor 'token_embd.weight' not found"),
    # counts and lengths of the header
    "n_tensor 2^62": Case(header(n_tensor=1 << 62), "absurd tensor count 4611686018427387904", "absurd number of tensors: 4611686018427387904"),
    "n_tensor -1": Case(header(n_tensor=-1), "absurd tensor count -1", "absurd number of tensors: 18446744073709551615"),
    "n_tensor 10^9": Case(header(n_tensor=10**9), "absurd tensor count 1000000000", "absurd number of tensors: 1000000000"),
    "n_tensor +1": Case(header(n_tensor=27), "ends inside its header, in a tensor name", "string length 6158279682931656704 exceeds maximum 1073741824"),
    "n_tensor -1 less": Case(header(n_tensor=25), None, "tensor 'blk.1.ffn_up_exps.weight' not found"),
    "n_tensor 0": Case(header(n_tensor=0), None, "--moe-slots: this is not a mixture-of-experts model"),
    "n_kv 2^62": Case(header(n_kv=1 << 62), "absurd key count 4611686018427387904", "absurd number of keys: 4611686018427387904"),
    "n_kv -1": Case(header(n_kv=-1), "absurd key count -1", "absurd number of keys: 18446744073709551615"),
    "n_kv 10^9": Case(header(n_kv=10**9), "absurd key count 1000000000", "absurd number of keys: 1000000000"),
    "n_kv +1": Case(header(n_kv=22), "ends inside its header, in a tensor name", "string length 80501843339247616 exceeds maximum 1073741824"),
    "n_kv less": Case(header(n_kv=20), "impossible tensor name", "incorrect shape for a tensor 'tokenizer.ggml.eos_token_id' may cause overflow"),
    "n_kv 0": Case(header(n_kv=0), "tensor general.architecture has 8 dimensions", "tensor 'general.architecture' has invalid number of dimensions: 8 > 4"),
    "key length 2^64-1": Case(header(behind_kv=b"\xff" * 16, n_kv=22), "ends inside its header, in a key", "absurd length of a key: 18446744073709551615"),
    "key length 2^40": Case(header(behind_kv=struct.pack("<Q", 1 << 40) + bytes(64), n_kv=22), "ends inside its header, in a key", "absurd length of a key: 1099511627776"),
    "string length 2^63": Case(set_raw("x.y", STR, struct.pack("<Q", 1 << 63)), "ends inside its header, in x.y", "absurd length of a string in 'x.y': 9223372036854775808"),
    "string length 2^31": Case(set_raw("x.y", STR, struct.pack("<Q", 1 << 31)), "ends inside its header, in x.y", "absurd length of a string in 'x.y': 2147483648"),
    "array length 2^61": Case(set_array("x.y", U64, [], 1 << 61), "absurd length 2305843009213693952 of the array x.y", "absurd length of the array 'x.y': 2305843009213693952"),
    "array length 2^30 str": Case(set_array("x.y", STR, [], 1 << 30), "absurd length 1073741824 of the array x.y", "absurd length of the array 'x.y': 1073741824"),
    "array length 2^64-1 u8": Case(set_array("x.y", U8, [], (1 << 64) - 1), "absurd length 18446744073709551615 of the array x.y", "absurd length of the array 'x.y': 18446744073709551615"),
    "array type 77": Case(set_raw("x.y", ARR, struct.pack("<IQ", 77, 1)), "the array x.y has unknown type 77", "key 'x.y' has invalid GGUF type 77"),
    "array in array": Case(set_raw("x.y", ARR, struct.pack("<IQ", ARR, 1) + struct.pack("<IQ", U8, 0)), "the array x.y has unknown type 9", "key 'x.y' has invalid GGUF type 9"),
    "value type 77": Case(set_raw("x.y", 77, b""), "key x.y has unknown type 77", "key 'x.y' has invalid GGUF type 77"),
    "key empty": Case(lambda g: g.kv.update({"": (U8, b"\1")}), "a key without a name, behind 21 others", "key 21 is empty"),
    "key duplicate": Case(header(behind_kv=text("general.name") + struct.pack("<I", STR) + text("b"), n_kv=22), "the key general.name is there twice", "duplicate key 'general.name' for KV pair 21"),
    "key long": Case(set_raw("x." + "k" * 70000, U8, b"\1"), None, "absurd length of a key: 70002"),
    "bool 2": Case(set_raw("tokenizer.ggml.add_bos_token", BOOL, b"\2"), None, None),
    # magic, version, alignment
    "magic": Case(header(magic=b"GGUg"), "is not a GGUF file: it begins with 0x47475567 ('GGUg')", "invalid magic characters: 'GGUg', expected 'GGUF'"),
    "magic ggml": Case(header(magic=b"lmgg"), "is not a GGUF file: it begins with 0x6c6d6767 ('lmgg')", "invalid magic characters: 'lmgg', expected 'GGUF'"),
    "version 0": Case(header(version=0), "has GGUF version 0: versions 2 and 3 can be read", "bad GGUF version: 0"),
    "version 1": Case(header(version=1), "has GGUF version 1: versions 2 and 3 can be read", "GGUFv1 is no longer supported, please use a more up-to-date version"),
    "version 4": Case(header(version=4), "has GGUF version 4: versions 2 and 3 can be read", "this GGUF file is version 4 but this software only supports up to version 3"),
    "version big endian": Case(header(version=0x03000000), "has GGUF version 50331648: its byte order is not this machine's", "failed to load model: this GGUF file version 50331648"),
    "version 2^32-1": Case(header(version=HUGE), "has GGUF version 4294967295: versions 2 and 3 can be read", "this GGUF file is version 4294967295 but this software only supports up to version 3"),
    "alignment 0": Case(set_key("general.alignment", U32, 0), "general.alignment 0 is not a power of two", "alignment 0 is not a power of 2"),
    "alignment 3": Case(set_key("general.alignment", U32, 3), "general.alignment 3 is not a power of two", "alignment 3 is not a power of 2"),
    "alignment 2^31": Case(set_key("general.alignment", U32, BIG), "tensor output_norm.weight has an absurd offset 36608", "failed to seek to beginning of data section"),
    "alignment 64 in a file of 32": Case(set_key("general.alignment", U32, 64), "is truncated: tensor blk.1.ffn_up_exps.weight needs 269504 bytes", "tensor 'blk.1.ffn_up_exps.weight' data is not within the file bounds"),
    "alignment 4096 in a file of 32": Case(set_key("general.alignment", U32, 4096), "tensor output_norm.weight has an absurd offset 36608", "tensor 'output_norm.weight' has offset 36608, expected 36864"),
    "alignment u64": Case(set_key("general.alignment", U64, 32), None, "key 'general.alignment' must be of type u32 but is u64"),
    "alignment str": Case(set_text("general.alignment", "32"), "general.alignment '32' is not a power of two", "key 'general.alignment' must be of type u32 but is str"),
    # splits
    "split.count 2": Case(both(set_key("split.count", U16, 2), set_key("split.no", U16, 0)), "is one of 2 shards but its name does not say which", "invalid split file name"),
    "split.count 65535": Case(both(set_key("split.count", U16, 65535), set_key("split.no", U16, 0)), "is one of 65535 shards but its name does not say which", "invalid split file name"),
    "split.count 2 no no": Case(set_key("split.count", U16, 2), "is one of 2 shards but its name does not say which", "key not found in model: split.no"),
    "split.count u32": Case(set_key("split.count", U32, 70000), "is one of 70000 shards but its name does not say which", "key split.count has wrong type u32 but expected type u16"),
    "split.no 1": Case(both(set_key("split.count", U16, 2), set_key("split.no", U16, 1)), "is one of 2 shards but its name does not say which", "illegal split file idx: 1"),
    "split.no 1 alone": Case(both(set_key("split.count", U16, 1), set_key("split.no", U16, 1)), None, None),
}  # fmt: skip

# Lengths that fit into a file as large as a model: what the reader would allocate, or step over, before it notices.
LARGE_FILE = 64 << 30
LARGE: dict[str, Case] = {
    "strings": Case(set_array("x.y", STR, [], 1 << 29), "absurd length 536870912 of the array x.y", "absurd length of the array 'x.y': 536870912"),
    "strings that are empty": Case(set_array("x.y", STR, [], 1 << 23), "absurd length 8388608 of the array x.y", "absurd length of the array 'x.y': 8388608"),
    "bytes": Case(set_array("x.y", U8, [], 1 << 40), "absurd length 1099511627776 of the array x.y", "absurd length of the array 'x.y': 1099511627776"),
    "numbers": Case(set_array("x.y", U64, [], 1 << 28), "the header does not end within 1073741824 bytes", "absurd size of a header"),
    "a string": Case(set_raw("x.y", STR, struct.pack("<Q", 1 << 29)), "absurd length 536870912 of a string in x.y", "absurd length of a string in 'x.y': 536870912"),
    "a key": Case(header(behind_kv=struct.pack("<Q", 1 << 30), n_kv=22), "absurd length 1073741824 of a string in a key", "absurd length of a key: 1073741824"),
    "keys of nothing": Case(header(n_kv=30_000), None, None),
    "tensors of nothing": Case(header(n_tensor=30_000), None, None),
}  # fmt: skip


def fuzzed(seed: int, *, vocabulary: bool = True) -> bytes:
    """The valid file with a few bits, bytes or fields of its header changed, or its end cut off. The same for a seed.

    Args:
        seed: of the damage.
        vocabulary: whether the texts of the vocabulary may be hit too. Upstream believes them, and ends with an exception
            when a prompt needs a token that is not there.
    """
    g = tiny()
    good = g.write()
    rng = random.Random(seed)
    end = g.marks["header end"]
    tokens = good.index(b"tokenizer.ggml.tokens"), good.index(b"tokenizer.ggml.scores") - 8
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.choice([rng.randrange(end), rng.randrange(g.marks["infos"], end), rng.randrange(200)])
        if not vocabulary and tokens[0] <= at < tokens[1]:
            at = rng.randrange(g.marks["infos"], end)
        kind = rng.random()
        if kind < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            data[at] = rng.choice([0, 1, 127, 128, 255])
        elif kind < 0.85:
            data[at : at + 4] = number(U32, rng.choice([0, 1, 3, BIG, HUGE]))
        elif kind < 0.95:
            data[at : at + 8] = number(U64, rng.choice([0, 1 << 40, 1 << 63, (1 << 64) - 1]))
        else:
            del data[rng.randrange(at, len(data)) :]
            break
    return bytes(data)


def truncations() -> dict[str, int]:
    """Lengths to which the valid file is cut: at every kind of place."""
    g = tiny()
    size = len(g.write())
    m = g.marks
    return {
        "nothing": 0, "in the magic": 3, "behind the magic": 4, "in the version": 6, "in the counts": m["counts"] + 9,
        "before the keys": m["kv"], "in a key's length": m["kv"] + 5, "in a key": m["kv"] + 12,
        "in the vocabulary": m["kv"] + 1500, "before the tensors": m["infos"], "in a tensor's name": m["infos"] + 15,
        "in a shape": m["infos"] + 40, "before an offset": m["header end"] - 8, "in an offset": m["header end"] - 3,
        "behind the header": m["header end"], "before the data": m["data"], "in the data": m["data"] + 100_000,
        "the last byte": size - 1,
    }  # fmt: skip
