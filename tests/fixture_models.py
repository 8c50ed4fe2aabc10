"""Tiny mixture-of-experts models for tests of the engine: 8 experts, 2 used for a token, random weights.

``test-llama-archs`` of a test build makes most of them; the others are made here. All are deterministic.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import gguf
import numpy as np

from moestream.upstream import engines

EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.weight$")
N_EXPERT = 8
N_USED = 2

# upstream's name of the architecture, by ours
UPSTREAM = {
    "qwen3moe": "qwen3moe",
    "qwen2moe": "qwen2moe",  # shared expert
    "openai-moe": "gpt-oss",  # biases
    "deepseek2": "deepseek2",  # shared expert, first layer dense
    "qwen35moe": "qwen35moe",  # hybrid attention, shared expert
}
# Upstream's fixtures have gate and up merged wherever the loader takes it; released files mostly have them apart.
MERGED_UPSTREAM = {"deepseek2", "qwen35moe"}
LAYOUTS = (*UPSTREAM, *(f"{name}-merged" for name in sorted(MERGED_UPSTREAM)), "gemma4")


def tool(name: str) -> Path:
    """A program of the CPU engine in use; MoestreamError, and so a failed test, where it was not built."""
    return engines.in_use("cpu").tool(name)


def run(*command: str | Path, timeout_s: float = 300, ok: bool = True, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, output captured; its whole output is in the message when it fails and ``ok`` is asked for."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=timeout_s, **kwargs
    )
    assert not ok or done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def make_layout(layout: str, folder: Path) -> Path:
    """The F32 model of one of LAYOUTS, or of an architecture by upstream's name, as ``folder/LAYOUT-f32.gguf``."""
    path = folder / f"{layout}-f32.gguf"
    if layout == "gemma4":
        write_gemma4(path)
        return path
    arch = layout.removesuffix("-merged")
    run(tool("test-llama-archs"), "-o", folder, "-a", UPSTREAM.get(arch, arch), "-s", "1")
    made = folder / f"{UPSTREAM.get(arch, arch)}-moe.gguf"
    spread_routing(made)
    if layout in MERGED_UPSTREAM:
        separate_gate_up(made, path)
        made.unlink()
    else:
        made.rename(path)
    return path


def quantize(source: Path, target: Path, type_name: str = "Q4_0") -> Path:
    """All matrices in this type, experts included."""
    run(tool("llama-quantize"), "--allow-requantize", "--pure", source, target, type_name)
    return target


def split(source: Path, prefix: Path, n_shards: int = 3) -> list[Path]:
    """The model in ``n_shards`` files, the first one first."""
    n_tensors = len(gguf.GGUFReader(source).tensors)
    run(tool("llama-gguf-split"), "--split", "--split-max-tensors", str(math.ceil(n_tensors / n_shards)), source, prefix)
    shards = sorted(prefix.parent.glob(f"{prefix.name}-*-of-{n_shards:05}.gguf"))
    assert len(shards) == n_shards
    return shards


def expert_types(path: Path) -> set[str]:
    """The types of the expert tensors in a file."""
    return {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if EXPERTS.search(t.name)}


def expert_ranges(path: Path) -> list[tuple[int, int]]:
    """(first byte, byte behind the last) of every expert tensor in a file."""
    reader = gguf.GGUFReader(path)
    return [(t.data_offset, t.data_offset + int(t.n_bytes)) for t in reader.tensors if EXPERTS.search(t.name)]


def spread_routing(path: Path) -> None:
    """Give every router weights wide enough, and biases of zero, that tokens disagree about their experts."""
    rng = np.random.default_rng(1)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(".ffn_gate_inp.weight"):
            tensor.data[:] = rng.standard_normal(tensor.data.shape, dtype=np.float32)
        elif re.search(r"\.(ffn_gate_inp|exp_probs_b)\.bias$", tensor.name):
            tensor.data[:] = 0


def copy_metadata(
    reader: gguf.GGUFReader,
    writer: gguf.GGUFWriter,
    skip: Collection[str] = (),
    rename: Callable[[str], str] = str,
) -> None:
    """All keys but the architecture, which the writer was made with, and those in ``skip``."""
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF.") or field.name in skip:
            continue
        value = field.contents()
        if value == []:
            continue  # the writer knows no empty arrays
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(rename(field.name), value, field.types[0], sub_type)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def separate_gate_up(source: Path, target: Path) -> None:
    """Each ``ffn_gate_up_exps`` as ``ffn_gate_exps`` and ``ffn_up_exps``: an expert's rows are first gate's, then up's."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    copy_metadata(reader, writer)
    separated = 0
    for tensor in reader.tensors:
        if tensor.name.endswith(".ffn_gate_up_exps.weight"):
            half = tensor.data.shape[1] // 2
            for part, rows in (("gate", tensor.data[:, :half]), ("up", tensor.data[:, half:])):
                writer.add_tensor(
                    tensor.name.replace("gate_up", part), np.ascontiguousarray(rows), raw_dtype=tensor.tensor_type
                )
            separated += 1
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    assert separated > 0
    finish(writer)


def write_gemma4(path: Path) -> None:
    """A gemma4: in every layer a dense MLP beside the experts, gate and up merged, a scale per expert, sliding windows."""
    n_layer, n_vocab, d, d_head, n_head, n_head_kv, d_ff, d_expert = 4, 128, 256, 64, 4, 2, 192, 256
    w = gguf.GGUFWriter(path, "gemma4")
    w.add_block_count(n_layer)
    w.add_context_length(2048)
    w.add_embedding_length(d)
    w.add_feed_forward_length(d_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_key_length(d_head)
    w.add_value_length(d_head)
    w.add_uint32("gemma4.attention.key_length_swa", d_head)
    w.add_uint32("gemma4.attention.value_length_swa", d_head)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_float32("gemma4.rope.freq_base_swa", 1e4)
    w.add_rope_dimension_count(d_head)
    w.add_uint32("gemma4.rope.dimension_count_swa", d_head)
    w.add_uint32("gemma4.attention.sliding_window", 16)
    w.add_array("gemma4.attention.sliding_window_pattern", [il % 2 == 0 for il in range(n_layer)])
    w.add_uint32("gemma4.attention.shared_kv_layers", 0)
    w.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    w.add_float32("gemma4.final_logit_softcapping", 30.0)
    w.add_expert_count(N_EXPERT)
    w.add_expert_used_count(N_USED)
    w.add_expert_feed_forward_length(d_expert)
    w.add_tokenizer_model("test")
    w.add_token_list([f"tok_{i}" for i in range(n_vocab)])
    w.add_token_scores([0.0] * n_vocab)

    rng = np.random.default_rng(1)

    def random(name: str, *shape: int, std: float = 0.1) -> None:
        w.add_tensor(name, (rng.standard_normal(shape) * std).astype(np.float32))

    def ones(name: str, n: int) -> None:
        w.add_tensor(name, np.ones(n, np.float32))

    random("token_embd.weight", n_vocab, d)
    ones("rope_freqs.weight", d_head // 2)
    for il in range(n_layer):
        b = f"blk.{il}."
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1",
                     "post_ffw_norm_2"):  # fmt: skip
            ones(f"{b}{norm}.weight", d)
        ones(b + "attn_q_norm.weight", d_head)
        ones(b + "attn_k_norm.weight", d_head)
        random(b + "attn_q.weight", n_head * d_head, d)
        random(b + "attn_k.weight", n_head_kv * d_head, d)
        random(b + "attn_v.weight", n_head_kv * d_head, d)
        random(b + "attn_output.weight", d, n_head * d_head)
        random(b + "ffn_gate.weight", d_ff, d)
        random(b + "ffn_up.weight", d_ff, d)
        random(b + "ffn_down.weight", d, d_ff)
        random(b + "ffn_gate_inp.weight", N_EXPERT, d, std=1.0)
        ones(b + "ffn_gate_inp.scale", d)
        random(b + "ffn_gate_up_exps.weight", N_EXPERT, 2 * d_expert, d)
        random(b + "ffn_down_exps.weight", N_EXPERT, d, d_expert)
        w.add_tensor(b + "ffn_down_exps.scale", np.linspace(0.5, 2.0, N_EXPERT, dtype=np.float32))
    ones("output_norm.weight", d)
    finish(w)


def cached(folder: Path) -> Callable[[str, str], Path]:
    """``model(layout, type)``, type ``f32`` or ``q4_0``: made at the first call, in ``folder``."""
    made: dict[tuple[str, str], Path] = {}

    def model(layout: str, type_name: str) -> Path:
        key = (layout, type_name)
        if key not in made:
            if type_name == "f32":
                own = folder / layout
                own.mkdir()
                made[key] = make_layout(layout, own)
            else:
                source = model(layout, "f32")
                made[key] = quantize(source, source.with_name(f"{layout}-{type_name}.gguf"), type_name.upper())
            assert expert_types(made[key]) == {type_name.upper()}
        return made[key]

    return model
