"""Models made from the tiny ones of fixture_models: deeper, with a head that predicts the token after next, and adapters to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
from fixture_models import EXPERTS, copy_metadata, finish, quantize, run, spread_routing, tool

BLOCK = re.compile(r"^blk\.(\d+)\.")


def _architecture(reader: gguf.GGUFReader) -> str:
    return reader.fields[gguf.Keys.General.ARCHITECTURE].contents()


def _n_blocks(reader: gguf.GGUFReader) -> int:
    return reader.fields[f"{_architecture(reader)}.block_count"].contents()


def _grown(
    source: Path,
    target: Path,
    origins: list[int],
    more: dict[str, int],
    head: Iterable[tuple[str, np.ndarray]] = (),
    without: Iterable[str] = (),
) -> None:
    """``source`` with further blocks, each like the block ``origins`` names, but with other weights; lists with a value for
    each block grow alike. ``more``: metadata that replace what is there; ``head``: further tensors; ``without``: metadata left out."""
    reader = gguf.GGUFReader(source)
    arch = _architecture(reader)
    n = _n_blocks(reader)
    more = {f"{arch}.{name}": value for name, value in {"block_count": n + len(origins), **more}.items()}
    writer = gguf.GGUFWriter(target, arch)
    done = {f"{arch}.{name}" for name in without}
    for field in reader.fields.values():
        value = field.contents()
        if field.name in done:
            continue
        if field.name in more:
            writer.add_uint32(field.name, more[field.name])
            done.add(field.name)
        elif isinstance(value, list) and len(value) == n and field.name.startswith(f"{arch}.") and "rope" not in field.name:
            grown = value + [value[i] for i in origins]
            writer.add_key_value(field.name, grown, gguf.GGUFValueType.ARRAY, field.types[-1])
            done.add(field.name)
    assert done >= more.keys(), more.keys() - done
    copy_metadata(reader, writer, done)

    rng = np.random.default_rng(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for i, origin in enumerate(origins):
        for tensor in reader.tensors:
            match = BLOCK.match(tensor.name)
            if not match or int(match[1]) != origin:
                continue
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            data = tensor.data
            if data.ndim > 1:  # the same numbers elsewhere: they stay as large as they are
                data = np.roll(data[rng.permutation(data.shape[0])], i + 1, axis=1)
            writer.add_tensor(BLOCK.sub(f"blk.{n + i}.", tensor.name), np.ascontiguousarray(data))
    for name, data in head:
        writer.add_tensor(name, data)
    finish(writer)


def deepen(source: Path, target: Path, n_more: int = 2) -> Path:
    """``n_more`` blocks more, in the order of those there are, or all like the last one when the others have no experts.

    Staging's two halves are used by the layers in turn: with up to two of them, what a half holds is never replaced.
    """
    reader = gguf.GGUFReader(source)
    n = _n_blocks(reader)
    with_experts = {int(BLOCK.match(t.name)[1]) for t in reader.tensors if EXPERTS.search(t.name)}
    origins = [(n + i) % n if len(with_experts) == n else n - 1 for i in range(n_more)]
    _grown(source, target, origins, {})
    return target


def add_mtp(source: Path, target: Path) -> Path:
    """A head behind the last block that predicts the token after next ("nextn", MTP): a block like the last, with experts."""
    reader = gguf.GGUFReader(source)
    n = _n_blocks(reader)
    d = reader.fields[f"{_architecture(reader)}.embedding_length"].contents()
    rng = np.random.default_rng(3)
    head = [
        (f"blk.{n}.nextn.eh_proj.weight", (rng.standard_normal((d, 2 * d)) / np.sqrt(2 * d)).astype(np.float32)),
        (f"blk.{n}.nextn.enorm.weight", np.ones(d, np.float32)),
        (f"blk.{n}.nextn.hnorm.weight", np.ones(d, np.float32)),
    ]
    # upstream's head of this architecture cannot compute with positions of several dimensions, which text has no need of
    without = ["rope.dimension_sections"] if _architecture(reader) == "glm4moe" else []
    _grown(source, target, [n - 1], {"nextn_predict_layers": 1}, head, without)
    return target


def make_mtp(layout: str, model: Callable[[str, str], Path], folder: Path) -> Path:
    """A layout with such a head, deeper, in Q4_0: glm4moe, which upstream's own fixture makes, or one of ``model``."""
    if layout == "glm4moe":
        run(tool("test-llama-archs"), "-o", folder, "-a", layout, "-s", "1")
        source = folder / f"{layout}-moe.gguf"
        spread_routing(source)
    else:
        source = model(layout, "f32")
    target = folder / f"{layout}-mtp-q4_0.gguf"
    deep = deepen(source, target.with_suffix(".trunk"))
    headed = add_mtp(deep, target.with_suffix(".f32"))
    return quantize(headed, target)


def nvfp4(values: np.ndarray) -> np.ndarray:
    """Rows of floats [..., n] as NVFP4, bytes [..., n / 64 * 36]: of 64 values four scales (E4M3, without sign), then 4 bits a value (E2M1)."""
    steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = values.reshape(-1, 16)
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.floor(np.log2(np.abs(groups).max(1) / 6)), -6, 7).astype(int)
    fraction = np.clip(np.round((np.abs(groups).max(1) / 6 / 2.0**exponent - 1) * 8), 0, 7).astype(int)
    scale = (1 + fraction / 8) * 2.0**exponent
    nearest = np.abs(np.abs(groups / scale[:, None])[..., None] - steps).argmin(-1) | np.where(groups < 0, 8, 0)
    nibbles = (nearest[:, :8] | nearest[:, 8:] << 4).astype(np.uint8)
    scales = ((exponent + 7) << 3 | fraction).astype(np.uint8)
    blocks = np.concatenate([scales.reshape(-1, 4), nibbles.reshape(-1, 32)], 1)
    return blocks.reshape(*values.shape[:-1], values.shape[-1] // 64 * 36)


def write_nvfp4(source: Path, target: Path) -> Path:
    """``source``, F32, with experts in NVFP4, each with a scale of its own as released files have it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, _architecture(reader))
    copy_metadata(reader, writer)
    scales = {t.name.removesuffix("weight") + "scale": t for t in reader.tensors if EXPERTS.search(t.name)}
    for tensor in reader.tensors:
        if EXPERTS.search(tensor.name):
            writer.add_tensor(tensor.name, nvfp4(tensor.data), raw_dtype=gguf.GGMLQuantizationType.NVFP4)
        elif tensor.name not in scales:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, tensor in scales.items():
        writer.add_tensor(name, np.linspace(0.5, 2.0, tensor.data.shape[0], dtype=np.float32))
    finish(writer)
    return target


def write_lora(model: Path, target: Path, tensors: str, rank: int = 4, seed: int = 1, size: float = 0.02) -> int:
    """An adapter to those weights of a model whose names match ``tensors``; each expert has matrices of its own. How many there are."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(target, _architecture(reader))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(2 * rank))
    rng = np.random.default_rng(seed)
    n = 0
    for tensor in reader.tensors:
        if not re.search(tensors, tensor.name):
            continue
        n_in, n_out, *experts = (int(x) for x in tensor.shape)
        for part, shape in (("a", (*experts, rank, n_in)), ("b", (*experts, n_out, rank))):
            writer.add_tensor(f"{tensor.name}.lora_{part}", (rng.standard_normal(shape) * size).astype(np.float32))
        n += 1
    finish(writer)
    return n


def write_dense_draft(model: Path, target: Path, n_blocks: int) -> Path:
    """The first blocks of a qwen3moe with expert 0 alone for a feed-forward network, as a dense qwen3 with the same vocabulary."""
    reader = gguf.GGUFReader(model)
    assert _architecture(reader) == "qwen3moe"
    writer = gguf.GGUFWriter(target, "qwen3")
    done = {"qwen3moe.block_count", "qwen3moe.feed_forward_length", "qwen3moe.expert_feed_forward_length"}
    done |= {"qwen3moe.expert_count", "qwen3moe.expert_used_count"}
    writer.add_block_count(n_blocks)
    writer.add_feed_forward_length(reader.fields["qwen3moe.expert_feed_forward_length"].contents())
    copy_metadata(reader, writer, done, lambda name: name.replace("qwen3moe.", "qwen3."))
    for tensor in reader.tensors:
        block = BLOCK.match(tensor.name)
        if (block and int(block[1]) >= n_blocks) or tensor.name.endswith("ffn_gate_inp.weight"):
            continue
        data = tensor.data[0] if EXPERTS.search(tensor.name) else tensor.data
        name = tensor.name.replace("_exps", "")
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return target
