"""A tiny model of every architecture that has experts, for the identity matrix: upstream's ``test-llama-archs`` makes most of them,
those that it cannot make are written here. 8 experts, 2 used for a token unless a name says otherwise; all are deterministic."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
from fixture_models import (
    EXPERTS,
    N_EXPERT,
    N_USED,
    copy_metadata,
    finish,
    run,
    split,
    spread_routing,
    tool,
    write_gemma4,
)

from moestream import gguf_facts

# llama-quantize's name of the type, by ours; rows of the experts are wide enough for each of them
TYPES = {
    "f32": "",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_k": "Q4_K_S",
    "q6_k": "Q6_K",
    "mxfp4": "MXFP4_MOE",
    "iq4_nl": "IQ4_NL",
}
# Upstream has repacked kernels for these on most processors.
REPACKED = {"q8_0", "q4_0", "q4_k", "q6_k", "mxfp4", "iq4_nl"}
# Upstream's fixtures of these have expert tensors that their graphs never use.
WITHOUT_MOE_GRAPH = {"refact"}
# Upstream's own CPU code cannot compute with every matrix of these in a quantized type: only the experts are.
ONLY_EXPERTS_QUANTIZED = {"qwen4exp"}
# These give embeddings, no logits.
EMBEDDINGS = {"llama-embed", "nomic-bert-moe"}
# Its layers use 1 and 3 experts, of different size.
UNEVEN = "nemotron_h_moe, uneven"
# fewer would mean that upstream's fixtures or our selection broke
AT_LEAST = 62


def make_all(folder: Path) -> dict[str, Path]:
    """The F32 models, by name."""
    run(tool("test-llama-archs"), "-o", folder, "-s", "1")
    found = {}
    for path in sorted(folder.glob("*.gguf")):
        name = re.sub(r"-(moe|dense)$", "", path.stem)
        if gguf_facts.read(path).expert_tensors and name not in WITHOUT_MOE_GRAPH:
            found[name] = path
        else:
            path.unlink()
    for name, write in {
        "gemma4": write_gemma4,
        "step35": write_step35,
        "nomic-bert-moe": write_nomic_bert_moe,
    }.items():
        found[name] = folder / f"{name}-moe.gguf"
        write(found[name])
    for name, source in {"llama-embed": "llama", "deepseek2-ocr": "deepseek"}.items():
        found[name] = folder / f"{name}-moe.gguf"
        rename_architecture(found[source], found[name], name)
    found[UNEVEN] = folder / "nemotron_h_moe-uneven.gguf"
    write_uneven_nemotron(found["nemotron_h_moe"], found[UNEVEN])
    for path in found.values():
        spread_routing(path)
    return dict(sorted(found.items()))


def n_used(name: str) -> int:
    """The most experts that a token uses in a layer."""
    return 3 if name == UNEVEN else N_USED


def quantized(name: str, source: Path, target: Path, type_name: str) -> Path:
    """``source`` with its experts (and mostly its other matrices) in a type of TYPES; asserts that they really are."""
    if type_name == "f32":
        return source
    arguments: list[str] = ["--pure"]
    as_whole = TYPES[type_name]
    if name in ONLY_EXPERTS_QUANTIZED:
        arguments = ["--tensor-type", f"_exps={type_name.replace('k', 'K')}", "--tensor-type", ".*=f32"]
        as_whole = "Q4_0"
    run(tool("llama-quantize"), "--allow-requantize", *arguments, source, target, as_whole)
    types = {t.tensor_type.name for t in gguf.GGUFReader(target).tensors if EXPERTS.search(t.name)}
    assert types == {type_name.upper()}, f"{name}: the experts are {types}"
    return target


def align(path: Path, alignment: int) -> None:
    """Rewrite a file such that every tensor starts at a multiple of so many bytes."""
    source = path.rename(path.with_name(f"{path.name}.unaligned"))
    reader = gguf.GGUFReader(source)
    architecture = reader.fields.get(gguf.Keys.General.ARCHITECTURE)
    # only the first shard names it
    writer = gguf.GGUFWriter(path, architecture.contents() if architecture else "")
    copy_metadata(reader, writer, skip=[gguf.Keys.General.ALIGNMENT])
    writer.add_custom_alignment(alignment)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    source.unlink()


def rename_architecture(source: Path, target: Path, name: str) -> None:
    """The same model under another name, where upstream serves both with the same tensors."""
    reader = gguf.GGUFReader(source)
    old = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, name)
    copy_metadata(reader, writer, rename=lambda key: re.sub(rf"^{re.escape(old)}\.", f"{name}.", key))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def split_apart(source: Path, prefix: Path, pattern: str) -> list[Path]:
    """The model in as few shards as put some tensor that matches, such as a bias, into another shard than its experts."""
    for n_shards in range(2, 8):
        shards = split(source, prefix, n_shards)
        shard_of = {t.name: shard for shard in shards for t in gguf.GGUFReader(shard).tensors}
        for name, shard in shard_of.items():
            experts = re.sub(pattern, ".weight", name)
            if experts != name and EXPERTS.search(experts) and shard_of[experts] != shard:
                return shards
        for shard in shards:
            shard.unlink()
    raise AssertionError(f"{source.name}: no split takes a tensor that matches {pattern!r} from its experts")


class TinyModel:
    """A GGUF in the making: random matrices, norms of ones, a vocabulary without text."""

    def __init__(self, writer: gguf.GGUFWriter, n_vocab: int) -> None:
        self.writer = writer
        self.rng = np.random.default_rng(1)
        writer.add_context_length(2048)
        writer.add_tokenizer_model("test")
        writer.add_token_list([f"tok_{i}" for i in range(n_vocab)])
        writer.add_token_scores([0.0] * n_vocab)

    def has_experts(self) -> None:
        self.writer.add_expert_count(N_EXPERT)
        self.writer.add_expert_used_count(N_USED)

    def has_size(self, n_layer: int, d: int, d_ff: int, n_head: int) -> None:
        self.writer.add_block_count(n_layer)
        self.writer.add_embedding_length(d)
        self.writer.add_feed_forward_length(d_ff)
        self.writer.add_head_count(n_head)

    def random(self, name: str, *shape: int, std: float = 0.1) -> None:
        self.writer.add_tensor(name, (self.rng.standard_normal(shape) * std).astype(np.float32))

    def ones(self, names: Iterable[str], n: int) -> None:
        for name in names:
            self.writer.add_tensor(name, np.ones(n, np.float32))


def write_step35(path: Path) -> None:
    """Sliding windows, a gate on attention, a first layer without experts, a shared expert, a bias that only chooses."""
    n_layer, n_vocab, d, d_head, n_head, d_ff = 4, 128, 256, 64, 4, 512
    w = gguf.GGUFWriter(path, "step35")
    model = TinyModel(w, n_vocab)
    model.has_experts()
    model.has_size(n_layer, d, d_ff, n_head)
    w.add_head_count_kv(n_head)
    w.add_key_length(d_head)
    w.add_value_length(d_head)
    w.add_rope_dimension_count(d_head)
    w.add_rope_freq_base(1e4)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_expert_feed_forward_length(d_ff)
    w.add_expert_shared_feed_forward_length(d_ff // 2)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(1.5)
    w.add_sliding_window(32)
    w.add_sliding_window_pattern([il % 2 == 0 for il in range(n_layer)])
    model.random("token_embd.weight", n_vocab, d)
    model.random("output.weight", n_vocab, d)
    model.ones(["output_norm.weight"], d)
    for il in range(n_layer):
        b = f"blk.{il}."
        model.ones([b + "attn_norm.weight", b + "ffn_norm.weight"], d)
        model.ones([b + "attn_q_norm.weight", b + "attn_k_norm.weight"], d_head)
        for name in ("attn_q", "attn_k", "attn_v"):
            model.random(f"{b}{name}.weight", n_head * d_head, d)
        model.random(b + "attn_output.weight", d, n_head * d_head)
        model.random(b + "attn_gate.weight", n_head, d)
        if il == 0:
            _dense_ffn(model, b, "", d, d_ff)
            continue
        model.random(b + "ffn_gate_inp.weight", N_EXPERT, d)
        w.add_tensor(b + "exp_probs_b.bias", np.zeros(N_EXPERT, np.float32))
        for name in ("gate", "up"):
            model.random(f"{b}ffn_{name}_exps.weight", N_EXPERT, d_ff, d)
        model.random(b + "ffn_down_exps.weight", N_EXPERT, d, d_ff)
        _dense_ffn(model, b, "_shexp", d, d_ff // 2)
    finish(w)


def _dense_ffn(model: TinyModel, b: str, suffix: str, d: int, d_ff: int) -> None:
    model.random(f"{b}ffn_gate{suffix}.weight", d_ff, d)
    model.random(f"{b}ffn_up{suffix}.weight", d_ff, d)
    model.random(f"{b}ffn_down{suffix}.weight", d, d_ff)


def write_nomic_bert_moe(path: Path) -> None:
    """An encoder: attention goes both ways, every second layer has experts, these have no gate, the output is embeddings."""
    n_layer, n_vocab, d, n_head, d_ff = 4, 128, 256, 4, 512
    w = gguf.GGUFWriter(path, "nomic-bert-moe")
    model = TinyModel(w, n_vocab)
    model.has_experts()
    model.has_size(n_layer, d, d_ff, n_head)
    w.add_layer_norm_eps(1e-6)
    w.add_causal_attention(False)
    w.add_pooling_type(gguf.PoolingType.NONE)
    w.add_token_type_count(1)
    w.add_moe_every_n_layers(2)
    model.random("token_embd.weight", n_vocab, d, std=1.0)  # what tokens have in common stays small beside it
    model.random("token_types.weight", 1, d)
    model.ones(["token_embd_norm.weight", "token_embd_norm.bias"], d)
    for il in range(n_layer):
        b = f"blk.{il}."
        model.random(b + "attn_qkv.weight", 3 * d, d)
        model.random(b + "attn_output.weight", d, d, std=0.01)
        norms = [b + "attn_output_norm.weight", b + "attn_output_norm.bias", b + "layer_output_norm.weight"]
        model.ones([*norms, b + "layer_output_norm.bias"], d)
        if il % 2 == 1:
            model.random(b + "ffn_gate_inp.weight", N_EXPERT, d)
            model.random(b + "ffn_up_exps.weight", N_EXPERT, d_ff, d)
            model.random(b + "ffn_down_exps.weight", N_EXPERT, d, d_ff)
        else:
            model.random(b + "ffn_up.weight", d_ff, d)
            model.random(b + "ffn_down.weight", d, d_ff)
    finish(w)


def write_uneven_nemotron(source: Path, target: Path) -> None:
    """Its only MoE layer twice: as it is with 1 expert used, and with experts of half the width and 3 used."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    (layer,) = {int(t.name.split(".")[1]) for t in reader.tensors if EXPERTS.search(t.name)}
    added = layer + 1
    assert added == reader.fields[f"{arch}.block_count"].contents(), "the MoE layer is the last one"
    d_ff = next(int(t.shape[0]) for t in reader.tensors if t.name == f"blk.{layer}.ffn_down_exps.weight")

    per_layer = {
        f"{arch}.{key}": [*reader.fields[f"{arch}.{key}"].contents(), reader.fields[f"{arch}.{key}"].contents()[layer]]
        for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    }
    per_layer[f"{arch}.expert_feed_forward_length"] = [d_ff] * added + [d_ff // 2]
    per_layer[f"{arch}.expert_used_count"] = [1] * added + [3]
    writer = gguf.GGUFWriter(target, arch)
    copy_metadata(reader, writer, skip=[*per_layer, f"{arch}.block_count"])
    writer.add_block_count(added + 1)
    for key, value in per_layer.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name.startswith(f"blk.{layer}."):
            name = tensor.name.replace(f"blk.{layer}.", f"blk.{added}.")
            data = tensor.data
            if name.endswith("ffn_up_exps.weight"):
                data = data[:, : d_ff // 2]
            elif name.endswith("ffn_down_exps.weight"):
                data = data[:, :, : d_ff // 2]
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    finish(writer)


def write_graniteswitch(path: Path) -> None:
    """No experts, but matrices stacked like experts: an adapter for each token is chosen by id. No model to stream."""
    n_layer, n_vocab, d, n_head, d_ff, n_adapter, rank = 2, 128, 256, 4, 512, 3, 32
    w = gguf.GGUFWriter(path, "graniteswitch")
    model = TinyModel(w, n_vocab)
    model.has_size(n_layer, d, d_ff, n_head)
    w.add_head_count_kv(n_head)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_logit_scale(1.0)
    w.add_rope_dimension_count(d // n_head)
    w.add_uint32("graniteswitch.adapters.count", n_adapter)
    w.add_uint32("graniteswitch.adapters.lora_rank", rank)
    w.add_float32("graniteswitch.adapters.router_gain", 50.0)
    w.add_array("graniteswitch.adapters.token_ids_activate", [1, 2, 3])
    w.add_array("graniteswitch.adapters.token_ids_substitute", [4, 5, 6])
    model.random("token_embd.weight", n_vocab, d)
    model.ones(["output_norm.weight"], d)
    for il in range(n_layer):
        b = f"blk.{il}."
        model.ones([b + "attn_norm.weight", b + "ffn_norm.weight"], d)
        model.random(b + "attn_qkv.weight", 3 * d, d)
        shapes = {"attn_output": (d, d), "ffn_gate": (d_ff, d), "ffn_up": (d_ff, d), "ffn_down": (d, d_ff)}
        for name, shape in shapes.items():
            model.random(f"{b}{name}.weight", *shape)
        for name, (n_out, n_in) in {**shapes, "attn_q": (d, d), "attn_k": (d, d), "attn_v": (d, d)}.items():
            model.random(f"{b}{name}.lora_a", n_adapter + 1, rank, n_in)
            model.random(f"{b}{name}.lora_b", n_adapter + 1, n_out, rank)
    finish(w)
