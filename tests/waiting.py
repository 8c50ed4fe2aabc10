"""Waiting without sleeping longer than needed, and ports nobody uses: for every test that starts processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest


def until(condition: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
    """Wait until ``condition`` is true and return its value; fail with ``what`` when it stays false."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.02)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
