"""What a trace or a map belongs to: the routers of one model, whatever types its experts are in.

The engine's twin is ``fingerprint_of`` in engine/hooks/model-files.cpp; a test holds both to the same answer.
"""

from __future__ import annotations

import os
import struct

from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts

ROUTER_BYTES = 4096  # of each router; enough to tell fine-tunes apart
_OFFSET, _PRIME, _MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def fnv1a(data: bytes, value: int = _OFFSET) -> int:
    """FNV-1a of 64 bits (Fowler, Noll, Vo), going on from ``value``."""
    for byte in data:
        value = (value ^ byte) * _PRIME & _MASK
    return value


def fingerprint(facts: GgufFacts) -> str:
    """16 lower-case hex digits: FNV-1a of the architecture and a 0 byte, then of each block that has experts, in ascending order: its
    number and its experts (int32 each, little-endian) and the first 4096 bytes of its router, where it has one of that name.

    Raises:
        MoestreamError: a router cannot be read.
    """
    value = fnv1a(facts.architecture.encode() + b"\0")
    routers = {router.layer: router for router in facts.routers}
    for layer in facts.moe_layers:
        value = fnv1a(struct.pack("<ii", layer, facts.layer_tensors(layer)[0].n_expert), value)
        if router := routers.get(layer):
            path, n = facts.files[router.file_index], min(ROUTER_BYTES, router.size_bytes)
            try:
                with path.open("rb", buffering=0) as file:
                    if hasattr(os, "posix_fadvise"):  # the experts behind it are not to be read ahead
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                    data = os.pread(file.fileno(), n, router.offset)
            except OSError as error:
                raise MoestreamError(f"cannot read the router of layer {layer} from {path}: {error.strerror}") from error
            if len(data) < n:
                raise MoestreamError(
                    f"{path} ends inside the router of layer {layer}", hint="the file is truncated; download it again"
                )
            value = fnv1a(data, value)
    return f"{value:016x}"
