"""The wheel, installed outside the checkout: it builds the engine and serves the demo model.

The engine is compiled a second time here, from the wheel's own patches and sources; a compiler cache makes that quick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moestream import paths

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, with nothing of the checkout in the environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MOESTREAM_HOME")}
    # cmake and ninja may be this environment's wheels; the package itself must not come from there.
    kept["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env={**kept, **environment}, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT, folder=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_carries_what_a_build_needs_and_nothing_of_upstream(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name.removeprefix("moestream/_shipped/") for name in names if name.startswith("moestream/_shipped/")}
    wanted = {"vendor/pin.toml", paths.demo_model().relative_to(ROOT).as_posix()}
    for folder in ("engine", "patches"):
        wanted |= {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*") if file.is_file()}
    assert wanted <= shipped
    assert [name for name in names if name.startswith(("tests/", "bench/")) or "vendor/llama.cpp" in name] == []


def test_installed_it_builds_the_engine_and_answers_a_question(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python, command = tmp_path / "venv/bin/python", tmp_path / "venv/bin/moestream"
    run(python, "-m", "pip", "install", "--quiet", wheel, folder=tmp_path)
    home = {"MOESTREAM_HOME": str(tmp_path / "home")}

    where = run(python, "-c", "import moestream; print(moestream.__file__)", folder=tmp_path).stdout
    assert where.startswith(str(tmp_path / "venv"))
    built = json.loads(run(command, "build", "--no-ui", "--json", folder=tmp_path, **home).stdout)
    assert built["built"] is True
    assert Path(built["bin_dir"]).is_relative_to(tmp_path / "home")
    again = json.loads(run(command, "build", "--no-ui", "--json", folder=tmp_path, **home).stdout)
    assert (again["built"], again["id"]) == (False, built["id"])
    assert run(command, "engines", "--path", folder=tmp_path, **home).stdout.strip() == built["bin_dir"]

    answer = run(python, "-m", "moestream.demo", "--once", "--port", "0", folder=tmp_path, **home).stdout
    assert "slots" in answer
