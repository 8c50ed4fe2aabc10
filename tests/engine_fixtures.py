"""Session fixtures of the tests that need a built engine; the conftest files of identity/ and e2e/ take them from here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fixture_models import cached

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"


@pytest.fixture(scope="session")
def disk_folder() -> Iterator[Path]:
    """A folder on the disk of the checkout: the system's own for temporary files may be in memory, without direct reads."""
    base = ROOT / "build" / "test-models"
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def model(disk_folder: Path) -> Callable[[str, str], Path]:
    """``model(layout, type)``, see fixture_models.cached."""
    folder = disk_folder / "models"
    folder.mkdir()
    return cached(folder)


@pytest.fixture(scope="session")
def demo() -> Path:
    """The model that ships with the project: qwen3moe, 8 layers, 64 experts, 6 used, Q4_0."""
    assert DEMO.is_file()
    return DEMO


@pytest.fixture
def demo_copy(disk_folder: Path) -> Iterator[Path]:
    """A copy that a test may damage."""
    path = disk_folder / "demo-copy.gguf"
    shutil.copyfile(DEMO, path)
    try:
        yield path
    finally:
        path.unlink()
