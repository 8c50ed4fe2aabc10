"""What is compared with what. Pure: facts of the model, memory and wishes in; numbers and arguments out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moestream.errors import MoestreamError
from moestream.server.arguments import flag_of

FEW_TOKENS = 4  # the width between one token and all at once
MIN_TOKENS = 16  # fewer evict next to nothing
MAX_TOKENS = 4096
CHARS_PER_TOKEN = 5  # of prose, rarely more: what is cut so has about as many tokens as are wanted, or more
# What a model takes beside its weights, which are copied where upstream repacks them: context, logits, compute buffers.
_BESIDE_WEIGHTS_BYTES = 512 << 20

# Arguments that are set here.
_OWNED = {
    "-m": "MODEL", "--model": "MODEL", "-f": "--file", "--file": "--file", "-p": "--file", "--prompt": "--file", "-o": None,
    "--output": None, "--output-file": None, "-c": "--tokens", "--ctx-size": "--tokens", "-b": None, "--batch-size": None,
    "-ub": None, "--ubatch-size": None, "--moe-slots": "--slots", "-lm": "--reference", "--load-mode": "--reference",
    "--mmap": "--reference", "--no-mmap": "--reference", "--check": None,
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """The side without streaming.

    Attributes:
        kind: ``loaded``: the whole model in memory, with the kernels that upstream prefers. ``mapped``: the file is mapped and read page by
            page as it is used, which any memory is enough for; only plain kernels compute with what lies in a file.
        reason: why that one.
    """

    kind: str
    reason: str

    @property
    def args(self) -> tuple[str, ...]:
        """Of the reference alone."""
        return ("--load-mode", "mmap") if self.kind == "mapped" else ()

    @property
    def kernel_args(self) -> tuple[str, ...]:
        """Of both sides: they must compute with the same kernels."""
        return ("--no-repack",) if self.kind == "mapped" else ()

    @property
    def text(self) -> str:
        if self.kind == "mapped":
            return "the same engine without streaming, the file mapped, plain kernels (--no-repack) on both sides"
        return "the same engine without streaming, the whole model in memory"


def choose_reference(asked: str, tensor_bytes: int, available_bytes: int) -> Reference:
    """``auto`` loads the model where that fits."""
    needed = tensor_bytes + tensor_bytes // 32 + _BESIDE_WEIGHTS_BYTES
    sizes = f"it takes {needed / 2**30:.1f} GiB, {available_bytes / 2**30:.1f} GiB are available"
    if asked != "auto":
        return Reference(asked, f"asked for; {sizes}")
    if needed <= available_bytes:
        return Reference("loaded", f"the model fits into memory: {sizes}")
    return Reference("mapped", f"the model does not fit into memory: {sizes}")


def split_extra(extra: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments after ``--``: those of both sides, and those of streaming, which have no meaning without.

    Raises:
        MoestreamError: one is set by ``moestream verify`` itself, or lacks its value.
    """
    both: list[str] = []
    streamed: list[str] = []
    rest = list(extra)
    while rest:
        argument = rest.pop(0)
        flag = flag_of(argument)
        if flag in _OWNED:
            ours = _OWNED[flag]
            raise MoestreamError(
                f"{argument} after -- collides with moestream verify, which sets it itself",
                hint=f"use {ours}" if ours else f"leave out {argument}",
            )
        if not flag.startswith("--moe-"):
            both.append(argument)
            continue
        if not rest:
            raise MoestreamError(f"{argument} after -- needs a value", hint=f"{argument} VALUE; see llama-cli --help")
        streamed += [argument, rest.pop(0)]
    return tuple(both), tuple(streamed)


def cut(text: str, n_chars: int) -> str:
    """The first ``n_chars`` characters, without the half word at the end."""
    if len(text) <= n_chars:
        return text
    head = text[:n_chars]
    if not text[n_chars].isspace() and (words := head.rstrip().rsplit(None, 1)) and len(words) == 2:
        return words[0]
    return head.rstrip()


def room(text: str) -> int:
    """Tokens that a text can have at most: a vocabulary may have one for each byte, and mark the beginning and the end."""
    return -(-(len(text.encode()) + 8) // 256) * 256
