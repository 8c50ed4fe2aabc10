"""The helpers lie one folder up, and pytest's importlib mode does not put that folder on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_fixtures import demo, demo_copy, disk_folder, model  # noqa: F401

from moestream.upstream import engines


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for the tests here in which the engine for the processor is the only one, whatever else is built, and nobody's settings are."""
    engine = engines.in_use("cpu")
    home = tmp_path_factory.mktemp("home")
    folder = home / "data" / "engines"
    folder.mkdir(parents=True)
    (folder / engine.id).symlink_to(engine.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESTREAM_HOME", str(home))
        yield home
