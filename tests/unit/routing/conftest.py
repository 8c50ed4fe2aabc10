from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import trace_bytes


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    def write(*args: Any, name: str = "t", **kwargs: Any) -> Path:
        path = tmp_path / name
        path.write_bytes(trace_bytes(*args, **kwargs))
        return path

    return write
