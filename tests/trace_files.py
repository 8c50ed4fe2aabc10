"""Traces written byte by byte, as docs/traces.md describes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

HEADER = {
    "model": {"fingerprint": "0123456789abcdef", "architecture": "qwen3moe", "name": "m.gguf"},
    "n_expert_used": 2,
    "layers": [{"layer": 1, "n_expert": 4}, {"layer": 3, "n_expert": 300}],
}
Record = tuple[int, Sequence[Sequence[int]]]


def trace_bytes(records: Sequence[Record] = (), header: Any = HEADER, version: int = 1) -> bytes:
    """``records``: (index of the layer, the experts of each token)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    out = b"MOETRACE" + struct.pack("<II", version, len(text)) + text
    layers = header["layers"] if isinstance(header, dict) else HEADER["layers"]
    for index, tokens in records:
        wide = index < len(layers) and layers[index]["n_expert"] > 256
        ids = [e for token in tokens for e in token]
        out += struct.pack("<HHI", index, len(tokens[0]), len(tokens)) + struct.pack(f"<{len(ids)}{'H' if wide else 'B'}", *ids)
    return out
