"""What a command returns, and the one place that renders it as text or as versioned JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO


@dataclass(frozen=True)
class Result:
    """The outcome of a command.

    Attributes:
        kind: what is reported, for example ``"status"``; part of the JSON schema name.
        data: JSON-serialisable fields; units last in the names (``size_bytes``, ``elapsed_s``).
        text: the same for a person; printed to stdout as is. May be empty.
        version: raised when a field of ``data`` changes its meaning or goes away.
    """

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    version: int = 1


def emit(result: Result, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Print a result to stdout: text, or one JSON object with ``schema`` first."""
    out = stream or sys.stdout
    if as_json:
        json.dump({"schema": f"moestream/{result.kind}/{result.version}", **result.data}, out, indent=2)
        out.write("\n")
    elif result.text:
        out.write(result.text.rstrip("\n") + "\n")
    out.flush()
