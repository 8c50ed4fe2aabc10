"""The helpers lie one folder up and beside this file, and pytest's importlib mode puts neither on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from engine_fixtures import demo, disk_folder  # noqa: F401
