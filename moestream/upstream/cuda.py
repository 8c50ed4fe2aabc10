"""Which NVIDIA cards a cuda engine is compiled for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moestream import nvidia_smi
from moestream.errors import MoestreamError

_ARCHITECTURE = re.compile(r"\d{2,3}[af]?(-real|-virtual)?")
_HINT = (
    "name the architectures, for example: moestream build --backend cuda --cuda-archs 86,90 (a compute capability of 8.6 is 86)"
)
_TIMEOUT_S = 60  # the driver of many cards starts slowly


def architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    """The values of cmake's ``CMAKE_CUDA_ARCHITECTURES``: those that are wanted, else those of the cards in this machine.

    Args:
        wanted: architectures as cmake writes them, each item one or several with commas between.

    Returns:
        Each once, in order, for example ``("86-real", "90-real")``.

    Raises:
        MoestreamError: something wanted is no architecture; nothing is wanted and no card can be seen.
    """
    named = [item.strip() for text in wanted for item in text.split(",")]
    for item in named:
        if not _ARCHITECTURE.fullmatch(item):
            raise MoestreamError(f"--cuda-archs {','.join(wanted)}: {item!r} is no CUDA architecture", hint=_HINT)
    return tuple(dict.fromkeys(named)) if named else _of_cards()


def _of_cards() -> tuple[str, ...]:
    answer = nvidia_smi.ask("compute_cap", timeout_s=_TIMEOUT_S)
    said = [row[0] for row in answer.rows]
    capabilities = [found for found in map(re.compile(r"(\d+)\.(\d+)").fullmatch, said) if found]
    if not capabilities:
        problem = answer.problem or f"nvidia-smi: {' '.join(said)[:200]}"
        raise MoestreamError(f"no NVIDIA card can be seen: {problem}", hint=_HINT)
    return tuple(f"{number}-real" for number in sorted({int(found[1] + found[2]) for found in capabilities}))
