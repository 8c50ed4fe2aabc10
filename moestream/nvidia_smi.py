"""nvidia-smi, asked. What the answers mean is the callers' business."""

from __future__ import annotations

import shutil
import subprocess
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
