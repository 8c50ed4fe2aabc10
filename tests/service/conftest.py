"""The fixture ``home``. The helpers lie beside it and one folder up, and pytest's importlib mode puts neither on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from service_harness import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A MOESTREAM_HOME with the fake engine; whatever the test leaves running is ended."""
    made = Home(tmp_path)
    try:
        yield made
    finally:
        made.clean()
