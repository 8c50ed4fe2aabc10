"""Files of logits, and where two of them part. Values are compared as bits: -0 is not 0, and a NaN is equal to itself alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moestream.errors import MoestreamError


@dataclass(frozen=True)
class Logits:
    """What ``llama-results`` has written.

    Attributes:
        tokens: the tokens of the text, ``(n_tokens,)`` int32.
        values: the logits behind each of them as bits, ``(n_tokens, n_vocab)`` uint32.
    """

    tokens: np.ndarray
    values: np.ndarray

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def says_something(self) -> bool:
        """Whether these are numbers, and not the same one everywhere: equal to that would be anything that fails the same way."""
        numbers = self.values.view(np.float32)
        return bool(np.isfinite(numbers).all() and (numbers.min(axis=1) < numbers.max(axis=1)).all())


@dataclass(frozen=True)
class Difference:
    """The first logit that is not the same.

    Attributes:
        position: of the token in the text, from 0.
        token: its number in the vocabulary; the logits are what the model expects behind it.
        vocab: of which token of the vocabulary the logit is.
        expected, got: its values; None for what is no number, which ``*_bits`` tell.
        n_different: logits that differ, of ``n_logits``.
        max_abs: the largest difference; None when something is no number.
        n_choices: positions at which another token is the likeliest.
    """

    position: int
    token: int
    vocab: int
    expected: float | None
    got: float | None
    expected_bits: str
    got_bits: str
    n_different: int
    n_logits: int
    max_abs: float | None
    n_choices: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> Logits:
    """Read a file of ``llama-results``.

    Raises:
        MoestreamError: it is no such file.
    """
    try:
        tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
        tokens = np.array(tensors["tokens"], dtype=np.int32).reshape(-1)
        # the writer has one token's logits behind the other's, whatever the shape says
        values = np.array(tensors["logits"], dtype=np.float32).reshape(len(tokens), -1).view(np.uint32)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise MoestreamError(
            f"llama-results has written no logits that can be read: {error}", hint="is the disk of TMPDIR full?"
        ) from error
    return Logits(tokens, values)


def first_difference(want: Logits, got: Logits) -> Difference | None:
    """None when every bit is the same.

    Raises:
        MoestreamError: they are of different texts, and so cannot be compared.
    """
    if want.values.shape != got.values.shape or not np.array_equal(want.tokens, got.tokens):
        raise MoestreamError(
            f"the sides computed different tokens: {want.n_tokens} and {got.n_tokens} of them",
            hint="has the model's file changed meanwhile? run it again",
        )
    different = want.values != got.values
    n_different = int(np.count_nonzero(different))
    if not n_different:
        return None
    position, vocab = (int(i) for i in np.unravel_index(int(np.argmax(different)), different.shape))
    a, b = want.values.view(np.float32), got.values.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    return Difference(
        position=position,
        token=int(want.tokens[position]),
        vocab=vocab,
        expected=_number(a[position, vocab]),
        got=_number(b[position, vocab]),
        expected_bits=f"0x{int(want.values[position, vocab]):08x}",
        got_bits=f"0x{int(got.values[position, vocab]):08x}",
        n_different=n_different,
        n_logits=want.values.size,
        max_abs=gap if math.isfinite(gap) else None,
        n_choices=int(np.count_nonzero(a.argmax(axis=1) != b.argmax(axis=1))),
    )


def _number(value: np.float32) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(value) if math.isfinite(value) else None
