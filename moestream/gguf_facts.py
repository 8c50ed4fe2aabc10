"""What a GGUF model is, read from its header alone: the one opinion in Python of what an expert tensor is.

Nothing beyond the header is read or mapped, so a file of any size answers in milliseconds and leaves no weights in
the page cache. The C++ twin selects by tensor kind in ``engine/``; a test holds both to the same answer.

The selection follows upstream's ``src/llama-arch.cpp``: ``LLM_TENSOR_FFN_{GATE,UP,DOWN,GATE_UP}_EXPS`` and grovemoe's
``LLM_TENSOR_FFN_{GATE,UP,DOWN}_CHEXPS``, suffix ``weight``. Other suffixes of the same tensors (``bias``, ``scale``,
``lora_a``, ``lora_b``) are small and stay with the dense weights.
The format is that of ``ggml/src/gguf.cpp``, versions 2 and 3, little endian.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moestream.errors import MoestreamError

# ggml type id -> (name, values in a block, bytes of a block); ggml 0.25.3. Kept here and not taken from the gguf
# package because its releases lag behind the types upstream can load.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

# The engine's opinion is expert_kinds in engine/hooks/load-begin.cpp; a test compares the two on every architecture. Like there,
# grovemoe's chunk experts (chexps) stay resident.
EXPERT_TENSOR = re.compile(r"blk\.(\d{1,9})\.ffn_(gate|up|down|gate_up)_exps\.weight")
BLOCK_TENSOR = re.compile(r"blk\.(\d{1,9})\.")
ROUTER_TENSOR = re.compile(r"blk\.(\d{1,9})\.ffn_gate_inp\.weight")
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

MAX_EXPERTS = 100_000
MAX_LAYERS = 100_000
# Limits that no real header comes near; a corrupt count must fail at once and not after gigabytes of reading. In a file as
# large as a model nearly every length fits.
MAX_KEYS = 1 << 15
MAX_TENSORS = 1 << 15
MAX_ARRAY = 1 << 28
MAX_STRINGS = 1 << 21  # in arrays, all together: they are stepped over one by one
MAX_STRING_BYTES = 1 << 28
MAX_HEADER_BYTES = 1 << 30
MAX_NAME_BYTES = 63  # of a tensor; upstream's GGML_MAX_NAME is 64
MAX_DIMS = 4
KEPT_ARRAY = 4096  # arrays longer than this (vocabularies) are skipped; per-layer arrays are shorter
KEPT_STRING_BYTES = 1 << 20

# Types of intermediate results and indices: no matmul takes them as weights.
_NO_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}

_INT64_MAX = (1 << 63) - 1
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor that holds a weight matrix of every expert of a layer.

    Attributes:
        name: ``blk.N.ffn_{gate,up,down,gate_up}_exps.weight``.
        layer: N; MTP layers follow the ordinary ones (``layer >= facts.n_layer``).
        kind: ``gate``, ``up``, ``down`` or ``gate_up``.
        type: ggml type name.
        shape: ggml order ``(n_in, n_out, n_expert)``.
        file_index: index into ``GgufFacts.files``.
        offset: bytes from the start of that file; expert e begins at ``offset + e * bytes_per_expert``.
        bytes_per_expert: ``nb[2]``.
    """

    name: str
    layer: int
    kind: str
    type: str
    shape: tuple[int, int, int]
    file_index: int
    offset: int
    bytes_per_expert: int

    @property
    def n_expert(self) -> int:
        return self.shape[2]

    @property
    def size_bytes(self) -> int:
        return self.bytes_per_expert * self.n_expert


@dataclass(frozen=True)
class Router:
    """The weights by which a layer chooses its experts, ``blk.N.ffn_gate_inp.weight``; attributes as those of ExpertTensor."""

    layer: int
    file_index: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFacts:
    """The facts of one model, which may lie in several files.

    Attributes:
        files: the shards in order; one path for a model in one file.
        file_bytes: size of each file on disk.
        end_bytes: where each file ends by its header, with the padding behind its last tensor, which a file may lack.
        architecture: ``general.architecture``.
        name: ``general.name``, empty where missing.
        n_layer: layers without the MTP layers.
        n_layer_mtp: MTP (next-token prediction) layers, numbered after the others.
        n_expert: experts in a layer (``expert_count``), 0 for a model that is not a MoE.
        n_expert_used: experts chosen for a token, the largest of any layer.
        n_ctx_train: context length the model was trained with, in tokens.
        n_embd: width of the residual stream.
        n_head, n_head_kv: attention heads of each layer, MTP layers included; 0 for a layer without attention.
        n_embd_head_k, n_embd_head_v: width of one key and one value head.
        n_vocab: tokens in the vocabulary, 0 where the header does not say.
        expert_tensors: sorted by layer, then name.
        routers: sorted by layer; some architectures have none of this name.
        tensor_bytes: all weights.
        dense_bytes_mtp: of the weights that are no experts, those of MTP layers.
        dense_values: numbers in those weights, without MTP layers and token embeddings.
        token_embd_bytes, token_embd_values, token_embd_type: of ``token_embd.weight``; 0 and empty where it is missing.
        output_is_tied: whether logits come from the token embeddings, there being no ``output.weight``.
        metadata: the header's keys; strings, numbers and arrays up to 4096 entries. Longer arrays (the vocabulary) are left
            out.
    """

    files: tuple[Path, ...]
    file_bytes: tuple[int, ...]
    end_bytes: tuple[int, ...]
    architecture: str
    name: str
    n_layer: int
    n_layer_mtp: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_vocab: int
    expert_tensors: tuple[ExpertTensor, ...]
    routers: tuple[Router, ...]
    tensor_bytes: int
    n_tensor: int
    dense_bytes_mtp: int = 0
    dense_values: int = 0
    token_embd_bytes: int = 0
    token_embd_values: int = 0
    token_embd_type: str = ""
    output_is_tied: bool = False
    metadata: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def is_moe(self) -> bool:
        """Whether there is anything to stream."""
        return bool(self.expert_tensors)

    @property
    def total_bytes(self) -> int:
        """Size of all files on disk, headers and padding included."""
        return sum(self.file_bytes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(t.size_bytes for t in self.expert_tensors)

    @property
    def dense_bytes(self) -> int:
        """Bytes of every weight that is not an expert's."""
        return self.tensor_bytes - self.expert_bytes

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(sorted({t.layer for t in self.expert_tensors}))

    def layer_tensors(self, layer: int) -> tuple[ExpertTensor, ...]:
        return tuple(t for t in self.expert_tensors if t.layer == layer)

    @property
    def moe_layers_served(self) -> tuple[int, ...]:
        """Without those of MTP layers, which a server leaves in the file."""
        return tuple(layer for layer in self.moe_layers if layer < self.n_layer)

    def n_expert_used_in(self, layer: int) -> int:
        """Experts chosen for a token in one layer."""
        value = self.metadata.get(f"{self.architecture}.expert_used_count")
        return int(value[layer]) if isinstance(value, list) else self.n_expert_used

    def bytes_per_slot(self, layer: int) -> int:
        """Bytes that one slot of a layer holds: one expert's part of each of the layer's expert tensors."""
        return sum(t.bytes_per_expert for t in self.layer_tensors(layer))

    def kv_bytes_per_token(self, bytes_k: float = 2.0, bytes_v: float = 2.0) -> float:
        """KV cache of one token over all layers in bytes, for caches of ``bytes_k``/``bytes_v`` a value (F16 is 2).

        An upper bound: it knows neither sliding windows nor latent (MLA) caches.
        """
        return sum(h * (self.n_embd_head_k * bytes_k + self.n_embd_head_v * bytes_v) for h in self.n_head_kv)


def read(path: str | os.PathLike[str]) -> GgufFacts:
    """Read the header of a model.

    Args:
        path: a GGUF file, any shard ``name-00001-of-00005.gguf`` of a split set, or a directory that holds exactly one model
            (files named ``mmproj*`` are not models).

    Raises:
        MoestreamError: the file is missing, not GGUF, truncated, lacks a shard, or says something impossible.
    """
    try:
        files = _shards(_model_file(Path(path)))
    except OSError as e:  # a name too long, a folder that may not be searched
        raise MoestreamError(f"cannot look for the model {path}: {e.strerror}", hint="check the path") from e
    headers = [_read_header(f) for f in files]
    _check_split(files, headers)
    return _facts(files, headers)


class HeaderSource(Protocol):
    """A file of a model, wherever it is.

    Attributes:
        path: what errors call it.
        size_bytes: of the whole file.
    """

    path: Path
    size_bytes: int

    def read_at(self, n_bytes: int, offset: int) -> bytes:
        """Some bytes from ``offset`` on: at least one where the file has it, at most about ``n_bytes``."""
        ...


def read_sources(sources: Sequence[HeaderSource]) -> GgufFacts:
    """Read the header of a model that is not here: its file, or all its shards in order.

    Raises:
        MoestreamError: see ``read``, and what the sources raise.
    """
    files = tuple(source.path for source in sources)
    headers = [_parse(_Cursor(source)) for source in sources]
    _check_split(files, headers)
    return _facts(files, headers)


# --- which files -----------------------------------------------------------------------------------------------------


def _model_file(path: Path) -> Path:
    """The file that stands for the model: the path itself, or the one model of a directory."""
    if path.is_dir():
        found = sorted(
            p for p in path.iterdir() if p.name.endswith(".gguf") and not p.name.startswith("mmproj") and not p.is_dir()
        )
        models: dict[str, Path] = {}
        for p in found:
            split = SPLIT_NAME.fullmatch(p.name)
            models.setdefault(f"{split[1]}-of-{split[3]}" if split else p.name, p)
        if not models:
            raise MoestreamError(f"no GGUF model in the directory {path}", hint="give the path of a .gguf file")
        if len(models) > 1:
            names = ", ".join(p.name for p in list(models.values())[:4])
            more = ", …" if len(models) > 4 else ""
            raise MoestreamError(
                f"{len(models)} models in the directory {path}: {names}{more}",
                hint=f"name one of them, for example {next(iter(models.values()))}",
            )
        return next(iter(models.values()))
    if not path.exists():
        if path.is_symlink():
            raise MoestreamError(f"{path} is a symbolic link that leads to no file", hint="check where it points: ls -l")
        near = sorted(p.name for p in path.parent.glob("*.gguf"))[:4] if path.parent.is_dir() else []
        hint = f"that directory holds {', '.join(near)}" if near else "check the path"
        raise MoestreamError(f"no such model file: {path}", hint=hint)
    if not path.is_file():
        raise MoestreamError(f"not a regular file: {path}", hint="give the path of a .gguf file")
    return path


def _shards(path: Path) -> tuple[Path, ...]:
    """All files of the set that ``path`` belongs to by its name, in order."""
    split = SPLIT_NAME.fullmatch(path.name)
    if not split and path.is_symlink():  # a link under another name; the shards are beside what it names
        target = path.resolve()
        split = SPLIT_NAME.fullmatch(target.name)
        path = target if split else path
    if not split:
        return (path,)
    prefix, count = split[1], int(split[3])
    if count < 1 or not 1 <= int(split[2]) <= count:
        raise MoestreamError(f"impossible shard number in the file name {path.name}", hint="shards count from 00001")
    files = tuple(path.with_name(f"{prefix}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = [f for f in files if not f.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MoestreamError(
            f"shard {missing[0].name}{more} of {count} is missing from {path.parent}",
            hint="download the rest of the split set into the same directory",
        )
    return files


def _check_split(files: tuple[Path, ...], headers: list[_Header]) -> None:
    first = headers[0].kv
    count = first.get("split.count", 0)
    if isinstance(count, int) and count > 1 and len(files) == 1:
        raise MoestreamError(
            f"{files[0].name} is one of {count} shards but its name does not say which",
            hint=f"restore the names the set was split into: name-00001-of-{count:05d}.gguf …",
        )
    for i, (f, h) in enumerate(zip(files, headers, strict=True)):
        number = h.kv.get("split.no", 0)
        if len(files) > 1 and number != i:
            raise MoestreamError(
                f"{f.name} says that it is shard {number} (from 0) and not {i}",
                hint="the shards were renamed or mixed up; download the set again",
            )
        if len(files) > 1 and h.kv.get("split.count", 0) != len(files):
            raise MoestreamError(
                f"{f.name} says that it is one of {h.kv.get('split.count', 0)} shards and not of {len(files)}",
                hint="the shards were renamed or mixed up; download the set again",
            )


# --- the header of one file ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size_bytes: int
    row_bytes: int


@dataclass(frozen=True)
class _Header:
    kv: dict[str, Any]
    array_len: dict[str, int]
    tensors: list[_Tensor]
    file_bytes: int
    end_bytes: int


class _LocalFile:
    """The kernel's read-ahead is switched off for the descriptor: at 8 MiB it would draw weights into the page cache."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd, self.path = fd, path
        self.size_bytes = os.fstat(fd).st_size
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read_at(self, n_bytes: int, offset: int) -> bytes:
        return os.pread(self.fd, n_bytes, offset)


class _Cursor:
    """Sequential reads of a header through a window that slides over the file."""

    CHUNK = 256 * 1024

    def __init__(self, source: HeaderSource) -> None:
        self.source, self.path = source, source.path
        self.file_bytes = source.size_bytes
        self.buf, self.base, self.pos = b"", 0, 0

    def tell(self) -> int:
        return self.base + self.pos

    def ensure(self, n: int, what: str) -> None:
        """Make the next n bytes available in ``buf`` from ``pos`` on."""
        if len(self.buf) - self.pos >= n:
            return
        start, what = self.tell(), _plain(what, 80)
        if MAX_HEADER_BYTES < start + n <= self.file_bytes:
            raise _corrupt(self.path, f"the header does not end within {MAX_HEADER_BYTES} bytes: it is in {what}")
        if n > self.file_bytes - start:
            raise MoestreamError(
                f"{self.path} ends inside its header, in {what}: {start + n} bytes needed, the file has {self.file_bytes}",
                hint="the file is truncated or corrupt; download it again",
            )
        parts, have = [], 0
        while have < n:
            part = self.source.read_at(max(self.CHUNK, n - have), start + have)
            if not part:
                raise MoestreamError(
                    f"{self.path} became shorter while it was read, at byte {start + have}",
                    hint="try again once it is complete",
                )
            parts.append(part)
            have += len(part)
        self.buf, self.base, self.pos = b"".join(parts), start, 0

    def number(self, fmt: str, what: str) -> Any:
        n = struct.calcsize(fmt)
        self.ensure(n, what)
        (value,) = struct.unpack_from(fmt, self.buf, self.pos)
        self.pos += n
        return value

    def numbers(self, fmt: str, count: int, what: str) -> list[Any]:
        """``count`` values of one format."""
        n = count * struct.calcsize(fmt)
        self.ensure(n, what)
        values = struct.unpack_from(f"<{count}{fmt[1:]}", self.buf, self.pos)
        self.pos += n
        return list(values)

    def skip(self, n: int, what: str) -> None:
        """Step over n bytes, without reading what lies beyond the window."""
        if n > self.file_bytes - self.tell():
            self.ensure(n, what)  # raises
        if self.tell() + n > MAX_HEADER_BYTES:
            raise _corrupt(self.path, f"the header does not end within {MAX_HEADER_BYTES} bytes: it is in {_plain(what, 80)}")
        if n <= len(self.buf) - self.pos:
            self.pos += n
        else:
            self.base, self.buf, self.pos = self.tell() + n, b"", 0

    def string(self, what: str) -> str:
        """The next string; an empty one in place of what is too long to be kept."""
        n = self.number("<Q", what)
        if n > MAX_STRING_BYTES and n <= self.file_bytes - self.tell():
            raise _corrupt(self.path, f"absurd length {n} of a string in {what}")
        if n > KEPT_STRING_BYTES:
            self.skip(n, what)
            return ""
        self.ensure(n, what)
        raw = self.buf[self.pos : self.pos + n]
        self.pos += n
        return raw.decode("utf-8", errors="replace")

    def skip_strings(self, count: int, what: str) -> None:
        # Vocabularies have some 300,000 strings: this loop is most of the time that a header takes.
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if len(self.buf) - self.pos < 8:
                self.ensure(8, what)
            (n,) = unpack(self.buf, self.pos)
            end = self.pos + 8 + n
            if end <= len(self.buf):
                self.pos = end
            else:
                self.pos += 8
                self.skip(n, what)


def _plain(text: str, limit: int = 200) -> str:
    """Text of a file as a terminal may have it: names in a damaged file can be long, and hold control characters."""
    text = "".join(c if c.isprintable() else "�" for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"


def _corrupt(path: Path, what: str) -> MoestreamError:
    return MoestreamError(f"{path}: {_plain(what)}", hint="the file is corrupt, or is no model; download it again")


def _read_header(path: Path) -> _Header:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as e:
        raise MoestreamError(f"cannot open {path}: {e.strerror}", hint="check the path and its permissions") from e
    try:
        return _parse(_Cursor(_LocalFile(fd, path)))
    except OSError as e:
        raise MoestreamError(f"cannot read the header of {path}: {e.strerror}", hint="check the disk") from e
    finally:
        os.close(fd)


def _parse(cur: _Cursor) -> _Header:
    path = cur.path
    magic = cur.source.read_at(4, 0)[:4]
    if magic != b"GGUF":
        shown = f"0x{magic.hex()} ({magic.decode('ascii', errors='replace')!r})" if magic else "nothing, it is empty"
        raise MoestreamError(
            f"{path} is not a GGUF file: it begins with {shown}",
            hint="moestream serves models in GGUF format; convert or download one",
        )
    cur.skip(4, "the magic")
    version = cur.number("<I", "the version")
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        why = "its byte order is not this machine's" if swapped else "versions 2 and 3 can be read"
        raise MoestreamError(f"{path} has GGUF version {version}: {why}", hint="convert the model again with a current tool")
    n_tensor = cur.number("<q", "the tensor count")
    n_kv = cur.number("<q", "the key count")
    if not 0 <= n_tensor <= MAX_TENSORS:
        raise _corrupt(path, f"absurd tensor count {n_tensor}")
    if not 0 <= n_kv <= MAX_KEYS:
        raise _corrupt(path, f"absurd key count {n_kv}")

    kv: dict[str, Any] = {}
    array_len: dict[str, int] = {}
    n_strings = 0
    seen: set[str] = set()
    for _ in range(n_kv):
        key = cur.string("a key")
        if not key:
            raise _corrupt(path, f"a key without a name, behind {len(seen)} others")
        if key in seen:
            raise _corrupt(path, f"the key {key} is there twice")
        seen.add(key)
        type_id = cur.number("<I", key)
        if type_id != _ARRAY:
            kv[key] = _scalar(cur, type_id, key)
            continue
        type_id = cur.number("<I", key)
        count = cur.number("<Q", key)
        if count > MAX_ARRAY:
            raise _corrupt(path, f"absurd length {count} of the array {_plain(key, 80)}")
        array_len[key] = count
        if type_id == _STRING:
            n_strings += count
            if n_strings > MAX_STRINGS:
                raise _corrupt(path, f"absurd length {count} of the array {_plain(key, 80)}")
            if count <= KEPT_ARRAY:
                kv[key] = [cur.string(key) for _ in range(count)]
            else:
                cur.skip_strings(count, key)
        elif type_id not in _SCALARS:
            raise _corrupt(path, f"the array {_plain(key, 80)} has unknown type {type_id}")
        elif count <= KEPT_ARRAY:
            kv[key] = cur.numbers(_SCALARS[type_id], count, key)
        else:
            cur.skip(count * struct.calcsize(_SCALARS[type_id]), key)

    alignment = kv.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise _corrupt(path, f"general.alignment {alignment!r} is not a power of two")

    infos = []
    seen = set()
    for _ in range(n_tensor):
        name = cur.string("a tensor name")
        if not name or len(name.encode()) > MAX_NAME_BYTES or "\0" in name:
            raise _corrupt(path, f"impossible tensor name {name[:80]!r}")
        if name in seen:
            raise _corrupt(path, f"two tensors are named {name}")
        seen.add(name)
        n_dims = cur.number("<I", name)
        if n_dims > MAX_DIMS:
            raise _corrupt(path, f"tensor {name} has {n_dims} dimensions")
        shape = tuple(cur.number("<q", name) for _ in range(n_dims)) or (1,)
        type_id = cur.number("<I", name)
        offset = cur.number("<Q", name)
        infos.append((name, type_id, shape, offset))

    data_start = -(-cur.tell() // alignment) * alignment
    tensors = [_tensor(path, info, alignment, data_start) for info in infos]
    for t in tensors:
        if t.offset + t.size_bytes > cur.file_bytes:
            raise MoestreamError(
                f"{path} is truncated: tensor {_plain(t.name)} needs {t.offset + t.size_bytes} bytes, the file has {cur.file_bytes}",
                hint="download the file again; the copy is incomplete",
            )
    # Like upstream: each where the one before it ends, so that none overlaps another.
    expected = data_start
    for t in tensors:
        if t.offset != expected:
            raise _corrupt(
                path, f"tensor {t.name} begins at {t.offset - data_start} of the data, {expected - data_start} is expected"
            )
        expected += -(-t.size_bytes // alignment) * alignment
    return _Header(kv, array_len, tensors, cur.file_bytes, expected)


def _scalar(cur: _Cursor, type_id: int, key: str) -> Any:
    if type_id == _STRING:
        return cur.string(key)
    if type_id not in _SCALARS:
        raise _corrupt(cur.path, f"key {_plain(key, 80)} has unknown type {type_id}")
    return cur.number(_SCALARS[type_id], key)


def _tensor(path: Path, info: tuple[str, int, tuple[int, ...], int], alignment: int, data_start: int) -> _Tensor:
    name, type_id, shape, offset = info
    if type_id not in GGML_TYPES:
        raise MoestreamError(
            f"{path}: tensor {_plain(name)} has unknown ggml type {type_id}",
            hint="the model was made for a newer llama.cpp than the pinned one, or the file is corrupt",
        )
    type_name, block, block_bytes = GGML_TYPES[type_id]
    if min(shape) < 0:
        raise _corrupt(path, f"tensor {name} has a negative dimension: {shape}")
    if shape[0] % block:
        raise _corrupt(path, f"tensor {name}: rows of {shape[0]} values are no multiple of {type_name}'s block of {block}")
    row_bytes = shape[0] // block * block_bytes
    size = row_bytes
    for n in shape[1:]:
        size *= n
    if size > _INT64_MAX:
        raise _corrupt(path, f"tensor {name} has an absurd shape {shape}")
    if offset % alignment or offset > _INT64_MAX - data_start - size:
        raise _corrupt(path, f"tensor {name} has an absurd offset {offset}")
    return _Tensor(name, type_name, shape, data_start + offset, size, row_bytes)


# --- facts of the set ------------------------------------------------------------------------------------------------


def _facts(files: tuple[Path, ...], headers: list[_Header]) -> GgufFacts:
    path, kv = files[0], headers[0].kv
    arch = kv.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise _corrupt(path, "no general.architecture in the header")

    def count(key: str, default: int | None = None, limit: int = 1 << 31) -> int:
        value = kv.get(f"{arch}.{key}", default)
        if value is None:
            raise _corrupt(path, f"no {arch}.{key} in the header")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
            raise _corrupt(path, f"absurd {arch}.{key}: {_plain(repr(value), 60)}")
        return value

    n_layer_all = count("block_count", limit=MAX_LAYERS)
    n_layer_mtp = count("nextn_predict_layers", 0, limit=MAX_LAYERS)
    if n_layer_mtp > n_layer_all:
        raise _corrupt(path, f"{arch}.nextn_predict_layers {n_layer_mtp} exceeds {arch}.block_count {n_layer_all}")
    n_expert = count("expert_count", 0, limit=MAX_EXPERTS)

    def per_layer(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = kv.get(f"{arch}.{key}")
        if value is None:
            return default
        values = value if isinstance(value, list) else [value] * n_layer_all
        if len(values) != n_layer_all or not all(type(v) is int and 0 <= v < 1 << 31 for v in values):
            raise _corrupt(path, f"absurd {arch}.{key}: {_plain(repr(value), 60)}")
        return tuple(values)

    used = per_layer("expert_used_count", (0,) * n_layer_all)
    n_expert_used = max(used, default=0)
    if n_expert_used > n_expert:
        raise _corrupt(path, f"{arch}.expert_used_count {n_expert_used} exceeds {arch}.expert_count {n_expert}")

    n_head = per_layer("attention.head_count", (0,) * n_layer_all)
    n_head_kv = per_layer("attention.head_count_kv", n_head)
    n_embd = count("embedding_length", 0)
    # As in upstream's llama_model::load_hparams: the head width defaults to an even share of the width.
    head = n_embd // max(n_head) if n_head and max(n_head) else 0
    vocab_tokens = next((h.array_len["tokenizer.ggml.tokens"] for h in headers if "tokenizer.ggml.tokens" in h.array_len), 0)

    experts: list[ExpertTensor] = []
    routers: list[Router] = []
    seen: dict[str, Path] = {}
    for i, (f, header) in enumerate(zip(files, headers, strict=True)):
        for t in header.tensors:
            if t.name in seen:
                raise _corrupt(f, f"tensor {t.name} is also in {seen[t.name].name}")
            seen[t.name] = f
            if expert := _expert(f, i, t, arch, n_layer_all, n_expert):
                if not used[expert.layer]:
                    raise _corrupt(f, f"layer {expert.layer} has experts and uses none: {arch}.expert_used_count is 0")
                experts.append(expert)
            if router := ROUTER_TENSOR.fullmatch(t.name):
                routers.append(Router(int(router[1]), i, t.offset, t.size_bytes))
    dense_mtp = sum(
        t.size_bytes
        for h in headers
        for t in h.tensors
        if (block := BLOCK_TENSOR.match(t.name))
        and int(block[1]) >= n_layer_all - n_layer_mtp
        and not EXPERT_TENSOR.fullmatch(t.name)
    )
    embeddings = next((t for h in headers for t in h.tensors if t.name == "token_embd.weight"), None)
    total = kv.get("split.tensors.count")
    if len(files) > 1 and isinstance(total, int) and total != len(seen):
        raise _corrupt(path, f"the split set has {len(seen)} tensors, split.tensors.count says {total}")

    return GgufFacts(
        files=files,
        file_bytes=tuple(h.file_bytes for h in headers),
        end_bytes=tuple(h.end_bytes for h in headers),
        architecture=arch,
        name=str(kv.get("general.name", "")),
        n_layer=n_layer_all - n_layer_mtp,
        n_layer_mtp=n_layer_mtp,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_ctx_train=count("context_length", 0),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_embd_head_k=count("attention.key_length", head),
        n_embd_head_v=count("attention.value_length", head),
        n_vocab=count("vocab_size", vocab_tokens),
        expert_tensors=tuple(sorted(experts, key=lambda t: (t.layer, t.name))),
        routers=tuple(sorted(routers, key=lambda r: r.layer)),
        tensor_bytes=sum(t.size_bytes for h in headers for t in h.tensors),
        n_tensor=len(seen),
        dense_bytes_mtp=dense_mtp,
        dense_values=sum(
            math.prod(t.shape)
            for h in headers
            for t in h.tensors
            if not EXPERT_TENSOR.fullmatch(t.name)
            and t is not embeddings
            and not ((block := BLOCK_TENSOR.match(t.name)) and int(block[1]) >= n_layer_all - n_layer_mtp)
        ),
        token_embd_values=math.prod(embeddings.shape) if embeddings else 0,
        token_embd_bytes=embeddings.size_bytes if embeddings else 0,
        token_embd_type=embeddings.type if embeddings else "",
        output_is_tied=embeddings is not None and "output.weight" not in seen,
        metadata=_merged(h.kv for h in reversed(headers)),
    )


def _merged(dicts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for d in dicts:
        out.update(d)
    return out


def _expert(f: Path, file_index: int, t: _Tensor, arch: str, n_layer: int, n_expert: int) -> ExpertTensor | None:
    match = EXPERT_TENSOR.fullmatch(t.name)
    if not match:
        return None
    layer = int(match[1])
    kind = match[2]
    shape = t.shape[: 3 if t.shape[3:] == (1,) else None] + (1,) * (3 - len(t.shape))
    if len(shape) != 3 or min(shape) < 1:
        raise _corrupt(f, f"expert tensor {t.name} has shape {t.shape}, three dimensions are expected")
    if shape[2] > MAX_EXPERTS:
        raise _corrupt(f, f"expert tensor {t.name} has an absurd number of experts: {shape[2]}")
    # grovemoe's chunk experts are fewer than expert_count: several experts share one.
    if shape[2] != n_expert:
        raise _corrupt(f, f"expert tensor {t.name} has {shape[2]} experts, {arch}.expert_count says {n_expert}")
    if t.type in _NO_WEIGHTS:
        raise _corrupt(f, f"expert tensor {t.name} has type {t.type}, which is no type of weights")
    if layer >= n_layer:
        raise _corrupt(f, f"expert tensor {t.name} belongs to layer {layer}, {arch}.block_count says {n_layer}")
    return ExpertTensor(t.name, layer, kind, t.type, shape, file_index, t.offset, t.row_bytes * shape[1])
