"""The helpers lie one folder up, and pytest's importlib mode does not put that folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
