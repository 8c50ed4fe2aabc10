"""nvidia-smi, asked. What the answers mean is the callers' business."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

NOT_INSTALLED = "nvidia-smi is not installed"
DEFAULT_TIMEOUT_S = 30.0  # the driver of many cards starts slowly


@dataclass(frozen=True)
class Answer:
    """What nvidia-smi says of each GPU.

    Attributes:
        rows: a row for each line of its answer that has all fields, as text: ``[N/A]``, too. A single field takes any line.
        problem: why there are none, in one line; empty where there are some.
    """

    rows: tuple[tuple[str, ...], ...] = ()
    problem: str = ""


def ask(*fields: str, timeout_s: float = DEFAULT_TIMEOUT_S, program: str = "nvidia-smi") -> Answer:
    """Ask for fields of ``nvidia-smi --help-query-gpu``; sizes are in MiB. Never raises.

    Args:
        fields: the first alone may have commas in its value, as names of GPUs do.
        timeout_s: for its answer.
    """
    path = shutil.which(program)
    if path is None:
        return Answer(problem=NOT_INSTALLED)
    command = [path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=timeout_s
        )
    except OSError as error:
        return Answer(problem=f"nvidia-smi: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return Answer(problem=f"nvidia-smi says nothing for {timeout_s:g} s")
    lines = (line.rsplit(",", len(fields) - 1) for line in done.stdout.splitlines() if line.strip())
    rows = tuple(tuple(part.strip() for part in parts) for parts in lines if len(parts) == len(fields))
    if done.returncode or not rows:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Answer(problem=f"nvidia-smi: {said[0][:200] if said else 'finds no GPU'}")
    return Answer(rows)


def visible(cards: Sequence[tuple[str, str]], wanted: str) -> list[int]:
    """Which cards, by place, CUDA_VISIBLE_DEVICES shows, in its order: up to the first that names none, as CUDA reads it.

    Args:
        cards: index and uuid of each, as nvidia-smi says them. Its indices are CUDA's where all cards are alike or CUDA_DEVICE_ORDER is
            PCI_BUS_ID.
        wanted: the variable's value. Parts of cards (``MIG-…``) are nobody here.
    """
    found: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        named = [
            i for i, (index, uuid) in enumerate(cards) if index == name or (name.startswith("GPU-") and uuid.startswith(name))
        ]
        if len(named) != 1:
            break
        if named[0] in found:
            return []  # CUDA then shows none
        found.append(named[0])
    return found
