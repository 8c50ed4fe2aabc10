"""gguf_facts against tiny GGUFs written by the gguf package, and against bytes that no writer would produce."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from moestream import gguf_facts
from moestream.errors import MoestreamError

DEMO = Path(__file__).parents[2] / "demo" / "moestream-demo-q4_0.gguf"


def write_tiny(path: Path, *, arch: str = "qwen3moe", n_layer: int = 2, n_expert: int = 4, tensors=None, keys=(), n_vocab=10):
    """A GGUF of F32 zeros: two layers, four experts of 64 x 32, plus ``tensors`` (name -> array)."""
    w = gguf.GGUFWriter(path, arch)
    w.add_name("tiny")
    w.add_block_count(n_layer)
    w.add_embedding_length(64)
    w.add_context_length(512)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_expert_count(n_expert)
    w.add_expert_used_count(2)
    w.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(n_vocab)])
    for key, value in keys:
        w.add_uint32(key, value)
    w.add_tensor("token_embd.weight", np.zeros((n_vocab, 64), np.float32))
    if tensors is None:
        tensors = {}
        for i in range(n_layer):
            tensors[f"blk.{i}.ffn_gate_exps.weight"] = np.zeros((n_expert, 32, 64), np.float32)
            tensors[f"blk.{i}.ffn_up_exps.weight"] = np.zeros((n_expert, 32, 64), np.float16)
            tensors[f"blk.{i}.ffn_down_exps.weight"] = np.zeros((n_expert, 64, 32), np.float32)
    for name, data in tensors.items():
        w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_split(directory: Path, n_shard: int = 3) -> list[Path]:
    """A split set as llama-gguf-split makes it: all keys in the first shard, the layers spread over all."""
    files = []
    for i in range(n_shard):
        f = directory / f"m-{i + 1:05d}-of-{n_shard:05d}.gguf"
        w = gguf.GGUFWriter(f, "qwen3moe")
        w.add_uint16("split.no", i)
        w.add_uint16("split.count", n_shard)
        w.add_int32("split.tensors.count", n_shard)
        if i == 0:
            w.add_block_count(n_shard)
            w.add_expert_count(4)
            w.add_expert_used_count(2)
        w.add_tensor(f"blk.{i}.ffn_up_exps.weight", np.zeros((4, 32, 64), np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        files.append(f)
    return files


def raw(tensors=(), kv=(), *, magic=b"GGUF", version=3, n_tensor=None, n_kv=None, tail=b"") -> bytes:
    """A header byte by byte. ``kv``: (key, type id, packed value); ``tensors``: (name, shape, type id, offset)."""

    def string(s: str) -> bytes:
        return struct.pack("<Q", len(s)) + s.encode()

    out = magic + struct.pack("<I", version)
    out += struct.pack("<qq", len(tensors) if n_tensor is None else n_tensor, len(kv) if n_kv is None else n_kv)
    for key, type_id, value in kv:
        out += string(key) + struct.pack("<I", type_id) + value
    for name, shape, type_id, offset in tensors:
        out += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}q", *shape)
        out += struct.pack("<IQ", type_id, offset)
    return out + bytes(-len(out) % 32) + tail


def keys(**values: int) -> list[tuple[str, int, bytes]]:
    arch = ("general.architecture", 8, struct.pack("<Q", 8) + b"qwen3moe")
    return [arch, *((f"qwen3moe.{k}", 4, struct.pack("<I", v)) for k, v in values.items())]


def fails(path: Path) -> MoestreamError:
    start = time.monotonic()
    with pytest.raises(MoestreamError) as e:
        gguf_facts.read(path)
    assert time.monotonic() - start < 1, "an error must not take long"
    assert e.value.hint
    return e.value


# --- what is reported ---


def test_facts_of_a_tiny_model(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    f = gguf_facts.read(path)
    assert (f.architecture, f.name, f.n_layer, f.n_expert, f.n_expert_used) == ("qwen3moe", "tiny", 2, 4, 2)
    assert (f.n_ctx_train, f.n_embd, f.n_head, f.n_head_kv, f.n_vocab) == (512, 64, (4, 4), (2, 2), 10)
    assert (f.n_embd_head_k, f.n_embd_head_v) == (16, 16)
    assert f.kv_bytes_per_token() == 2 * 2 * (16 + 16) * 2
    assert f.is_moe and f.moe_layers == (0, 1)
    assert [t.kind for t in f.layer_tensors(1)] == ["down", "gate", "up"]
    assert {t.kind: t.type for t in f.layer_tensors(0)} == {"gate": "F32", "up": "F16", "down": "F32"}
    assert f.bytes_per_slot(0) == 64 * 32 * (4 + 2 + 4)
    assert f.expert_bytes == 2 * 4 * f.bytes_per_slot(0)
    assert f.dense_bytes == 10 * 64 * 4
    assert f.total_bytes == path.stat().st_size


def test_offsets_point_at_the_experts(tmp_path):
    data = np.arange(4 * 32 * 64, dtype=np.float32).reshape(4, 32, 64)
    path = write_tiny(tmp_path / "tiny.gguf", tensors={"blk.1.ffn_up_exps.weight": data})
    (t,) = gguf_facts.read(path).expert_tensors
    assert t.shape == (64, 32, 4)
    with path.open("rb") as f:
        f.seek(t.offset + 3 * t.bytes_per_expert)
        assert f.read(t.bytes_per_expert) == data[3].tobytes()


def test_same_as_the_gguf_package_on_the_demo_model():
    facts = gguf_facts.read(DEMO)
    assert (facts.n_layer, facts.n_expert, facts.n_expert_used) == (8, 64, 6)
    assert (facts.n_embd, facts.n_ctx_train, facts.n_vocab) == (384, 2048, 8192)
    assert len(facts.expert_tensors) == 8 * 3
    assert {t.type for t in facts.expert_tensors} == {"Q4_0"}
    reader = gguf.GGUFReader(DEMO)
    theirs = {t.name: t for t in reader.tensors}
    for t in facts.expert_tensors:
        assert t.offset == theirs[t.name].data_offset
        assert t.size_bytes == theirs[t.name].n_bytes
        assert t.shape == tuple(theirs[t.name].shape)
    assert facts.tensor_bytes == sum(int(t.n_bytes) for t in reader.tensors)
    assert facts.expert_bytes == 8 * 3 * 64 * 20736


def test_block_sizes_agree_with_the_gguf_package():
    for type_id, size in gguf.GGML_QUANT_SIZES.items():
        if type_id.name == "Q8_1":  # 40 bytes in older releases of the package; ggml's block_q8_1 has 36
            continue
        name, *ours = gguf_facts.GGML_TYPES[int(type_id)]
        assert (name, tuple(ours)) == (type_id.name, size)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.0.ffn_gate_exps.weight", "gate"),
        ("blk.0.ffn_up_exps.weight", "up"),
        ("blk.0.ffn_down_exps.weight", "down"),
        ("blk.0.ffn_gate_up_exps.weight", "gate_up"),
        ("blk.0.ffn_gate_chexps.weight", None),
        ("blk.0.ffn_up_chexps.weight", None),
        ("blk.0.ffn_down_chexps.weight", None),
        ("blk.0.ffn_gate_exps.bias", None),
        ("blk.0.ffn_down_exps.scale", None),
        ("blk.0.ffn_gate_exps.lora_a", None),
        ("blk.0.ffn_gate.lora_a", None),
        ("blk.0.ffn_gate_shexp.weight", None),
        ("blk.0.ffn_norm_exps.weight", None),
        ("blk.0.ffn_gate.0.weight", None),
        ("blk.0.ffn_gate_up_chexps.weight", None),
        ("xblk.0.ffn_gate_exps.weight", None),
    ],
)
def test_what_an_expert_tensor_is(tmp_path, name, expected):
    f = gguf_facts.read(write_tiny(tmp_path / "m.gguf", tensors={name: np.zeros((4, 32, 64), np.float32)}))
    assert [t.kind for t in f.expert_tensors] == ([expected] if expected else [])


def test_chunk_experts_are_dense(tmp_path):
    """grovemoe: several experts share one chunk expert, and the engine keeps those resident."""
    tensors = {
        "blk.0.ffn_up_exps.weight": np.zeros((4, 32, 64), np.float32),
        "blk.0.ffn_up_chexps.weight": np.zeros((2, 16, 64), np.float32),
    }
    f = gguf_facts.read(write_tiny(tmp_path / "m.gguf", arch="grovemoe", tensors=tensors))
    assert [t.name for t in f.expert_tensors] == ["blk.0.ffn_up_exps.weight"]
    assert f.bytes_per_slot(0) == 32 * 64 * 4


def test_mtp_layers_are_counted_apart(tmp_path):
    f = gguf_facts.read(write_tiny(tmp_path / "m.gguf", n_layer=3, keys=[("qwen3moe.nextn_predict_layers", 1)]))
    assert (f.n_layer, f.n_layer_mtp, f.moe_layers) == (2, 1, (0, 1, 2))


def test_a_dense_model_has_nothing_to_stream(tmp_path):
    f = gguf_facts.read(write_tiny(tmp_path / "m.gguf", arch="llama", n_expert=2, tensors={}))
    assert not f.is_moe and f.expert_bytes == 0 and f.dense_bytes == f.tensor_bytes


# --- which files ---


def test_any_shard_and_the_directory_are_the_same_model(tmp_path):
    files = write_split(tmp_path)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"not looked at")
    facts = [gguf_facts.read(p) for p in (*files, tmp_path)]
    assert all(f == facts[0] for f in facts)
    assert facts[0].files == tuple(files)
    assert [t.file_index for t in facts[0].expert_tensors] == [0, 1, 2]
    assert facts[0].total_bytes == sum(p.stat().st_size for p in files)


def test_missing_shard_is_named(tmp_path):
    files = write_split(tmp_path)
    files[1].unlink()
    assert "m-00002-of-00003.gguf" in fails(files[2]).message


def test_swapped_shards(tmp_path):
    files = write_split(tmp_path)
    files[1].rename(tmp_path / "x")
    files[2].rename(files[1])
    (tmp_path / "x").rename(files[2])
    assert "m-00002-of-00003.gguf says that it is shard 2" in fails(files[0]).message


def test_renamed_shard(tmp_path):
    first = write_split(tmp_path)[0]
    renamed = first.rename(tmp_path / "model.gguf")
    assert "one of 3 shards" in fails(renamed).message


def test_missing_file_names_its_neighbours(tmp_path):
    write_tiny(tmp_path / "there.gguf")
    e = fails(tmp_path / "here.gguf")
    assert "here.gguf" in e.message and "there.gguf" in e.hint


def test_directories(tmp_path):
    assert "no GGUF model" in fails(tmp_path).message
    write_tiny(tmp_path / "a.gguf")
    assert gguf_facts.read(tmp_path).files == (tmp_path / "a.gguf",)
    write_tiny(tmp_path / "b.gguf")
    e = fails(tmp_path)
    assert "2 models" in e.message and "a.gguf" in e.message and "a.gguf" in e.hint


# --- broken files ---


def test_truncated_data_names_tensor_and_sizes(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    full = path.stat().st_size
    os.truncate(path, full - 64)
    e = fails(path)
    assert "blk.1.ffn_down_exps.weight" in e.message and str(full) in e.message and str(full - 64) in e.message


def test_every_truncation_of_a_header_is_an_error(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    for n in range(0, gguf_facts.read(path).expert_tensors[0].offset, 29):
        path.write_bytes(data[:n])
        fails(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 and so on", "0x504b0304"),
        (raw(version=1), "version 1"),
        (raw(version=0x03000000), "byte order"),
        (raw(n_tensor=-1), "tensor count -1"),
        (raw(n_tensor=1 << 40), "tensor count"),
        (raw(n_kv=1 << 40), "key count"),
        (raw(), "general.architecture"),
        (raw(kv=keys()), "block_count"),
        (raw(kv=keys(block_count=1 << 30)), "absurd qwen3moe.block_count"),
        (raw(kv=keys(block_count=2, expert_count=100_001)), "absurd qwen3moe.expert_count: 100001"),
        (raw(kv=keys(block_count=2, expert_count=2, expert_used_count=3)), "expert_used_count 3"),
        (raw(kv=keys(block_count=2, nextn_predict_layers=3)), "nextn_predict_layers"),
        (raw(kv=[("general.alignment", 4, struct.pack("<I", 33))]), "alignment 33"),
        (raw(kv=[("a", 99, b"")]), "unknown type 99"),
        (raw(kv=[("a", 9, struct.pack("<IQ", 8, 1 << 62))]), "array a"),
        (raw(kv=[("a", 9, struct.pack("<IQ", 4, 1 << 20))]), "ends inside its header"),
        (raw(kv=[("a", 8, struct.pack("<Q", 1 << 60))]), "ends inside its header"),
        (raw([("t", (32, -1), 0, 0)], keys(block_count=1)), "negative"),
        (raw([("t", (32, 1, 1, 1, 1), 0, 0)], keys(block_count=1)), "5 dimensions"),
        (raw([("t", (32,), 31, 0)], keys(block_count=1)), "type 31"),
        (raw([("t", (33,), 2, 0)], keys(block_count=1)), "block of 32"),
        (raw([("t", (1 << 40, 1 << 40), 0, 0)], keys(block_count=1)), "absurd shape"),
        (raw([("t", (32,), 0, (1 << 64) - 32)], keys(block_count=1)), "absurd offset"),
        (raw([("t", (32,), 0, 7)], keys(block_count=1)), "absurd offset"),
        (raw([("t", (32,), 0, 1 << 40)], keys(block_count=1)), "truncated: tensor t"),
        (raw([("t", (8,), 0, 0), ("t", (8,), 0, 0)], keys(block_count=1), tail=bytes(99)), "two tensors"),
        (
            raw([("blk.0.ffn_up_exps.weight", (32, 2, 3), 0, 0)], keys(block_count=1, expert_count=2), tail=bytes(9999)),
            "3 experts",
        ),
        (
            raw([("blk.7.ffn_up_exps.weight", (32, 2, 2), 0, 0)], keys(block_count=1, expert_count=2), tail=bytes(9999)),
            "layer 7",
        ),
    ],
)
def test_broken_headers(tmp_path, data, said):
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    e = fails(path)
    assert said in e.message and "broken.gguf" in e.message


def test_random_bytes_never_escape_as_another_exception(tmp_path):
    rng = np.random.default_rng(5)
    good = write_tiny(tmp_path / "good.gguf").read_bytes()[:1600]
    path = tmp_path / "broken.gguf"
    for _ in range(500):
        data = bytearray(good)
        for at in rng.integers(4, len(data), 4):
            data[at] = int(rng.integers(256))
        path.write_bytes(data)
        with pytest.raises(MoestreamError):
            gguf_facts.read(path)


# --- header only ---


def test_only_the_header_is_read(tmp_path, monkeypatch):
    """16 GiB of experts (a hole in the file) and a large vocabulary: milliseconds, and not a byte of a weight wanted."""
    path = write_tiny(tmp_path / "big.gguf", n_vocab=50_000)
    header = gguf_facts.read(path)
    big = raw(
        [("blk.0.ffn_up_exps.weight", (2048, 65536, 128), 0, 0)],
        [*keys(block_count=1, expert_count=128, expert_used_count=8), *_vocabulary(150_000)],
    )
    path.write_bytes(big)
    os.truncate(path, len(big) + 2048 * 65536 * 128 * 4)
    read_to = 0
    pread = os.pread

    def counting(fd, n, at):
        nonlocal read_to
        read_to = max(read_to, at + n)
        return pread(fd, n, at)

    monkeypatch.setattr(os, "pread", counting)
    start = time.monotonic()
    facts = gguf_facts.read(path)
    assert time.monotonic() - start < 1
    assert facts.expert_bytes == 64 << 30 and facts.n_vocab == 150_000 and header.n_vocab == 50_000
    assert read_to < len(big) + 256 * 1024


def _vocabulary(n: int) -> list[tuple[str, int, bytes]]:
    strings = b"".join(struct.pack("<Q", 6) + b"token " for _ in range(n))
    return [("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, n) + strings)]
