"""Which NVIDIA cards a cuda engine is compiled for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from moestream.errors import MoestreamError

_ARCHITECTURE = re.compile(r"\d{2,3}[af]?(-real|-virtual)?")
_HINT = (
    "name the architectures, for example: moestream build --backend cuda --cuda-archs 86,90 (a compute capability of 8.6 is 86)"
)
_QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
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
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise MoestreamError("no NVIDIA card can be seen: nvidia-smi not found", hint=_HINT) from None
    except subprocess.TimeoutExpired:
        raise MoestreamError(f"no NVIDIA card can be seen: nvidia-smi gave no answer in {_TIMEOUT_S} s", hint=_HINT) from None
    said = (done.stdout + done.stderr).strip()
    capabilities = re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not capabilities:
        raise MoestreamError(f"no NVIDIA card can be seen: nvidia-smi says {said[:200]!r}", hint=_HINT)
    return tuple(f"{number}-real" for number in sorted({int(major + minor) for major, minor in capabilities}))
