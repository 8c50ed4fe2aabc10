"""A model's fingerprint against the bytes it is defined over (docs/traces.md)."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from moestream import gguf_facts
from moestream.errors import MoestreamError
from moestream.routing.fingerprint import fingerprint, fnv1a

ROUTERS = [np.arange(4 * 512, dtype=np.float32).reshape(4, 512), np.ones((4, 8), np.float32)]


def write(
    path: Path, arch: str = "qwen3moe", routers=ROUTERS, expert_type=np.float32, expert: float = 0
) -> gguf_facts.GgufFacts:
    """Blocks 1 and 2 have experts; block 2 has no router when there is one router alone."""
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(3)
    w.add_expert_count(4)
    w.add_expert_used_count(2)
    w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 8), np.float32))  # of a block without experts
    for i in (2, 1):
        w.add_tensor(f"blk.{i}.ffn_down_exps.weight", np.full((4, 32, 64), expert, expert_type))
    for i, router in enumerate(routers, 1):
        w.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return gguf_facts.read(path)


def defined(arch: str, *blocks: bytes) -> str:
    return f"{fnv1a(arch.encode() + bytes(1) + b''.join(blocks)):016x}"


def test_fnv1a() -> None:
    """Values of the authors' own test vectors."""
    assert [fnv1a(b""), fnv1a(b"a"), fnv1a(b"foobar")] == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C, 0x85944171F73967E8]


def test_definition(tmp_path: Path) -> None:
    first, second = (router.tobytes()[:4096] for router in ROUTERS)
    assert len(ROUTERS[0].tobytes()) > 4096
    blocks = (struct.pack("<ii", 1, 4) + first, struct.pack("<ii", 2, 4) + second)
    assert fingerprint(write(tmp_path / "m.gguf")) == defined("qwen3moe", *blocks)
    assert fingerprint(write(tmp_path / "one.gguf", routers=ROUTERS[:1])) == defined("qwen3moe", blocks[0], blocks[1][:8])
    assert fingerprint(write(tmp_path / "none.gguf", "qwen2moe", routers=[])) == defined(
        "qwen2moe", blocks[0][:8], blocks[1][:8]
    )


def test_experts_do_not_matter_and_routers_do(tmp_path: Path) -> None:
    plain = fingerprint(write(tmp_path / "a.gguf"))
    assert fingerprint(write(tmp_path / "b.gguf", expert_type=np.float16, expert=1)) == plain
    assert fingerprint(write(tmp_path / "c.gguf", routers=[ROUTERS[0] + 1, ROUTERS[1]])) != plain
    assert fingerprint(write(tmp_path / "d.gguf", arch="qwen2moe")) != plain


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    facts = write(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(MoestreamError, match="ends inside the router of layer 1"):
        fingerprint(facts)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(MoestreamError, match=r"cannot read the router of layer 1 from .*: No such file"):
        fingerprint(facts)
