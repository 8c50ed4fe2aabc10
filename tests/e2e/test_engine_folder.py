"""The folder of a built engine: complete, and able to move."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from moestream.upstream import engines
from moestream.upstream.build import PRODUCT_TARGETS
from moestream.upstream.pin import load_pin


@pytest.mark.parametrize("tool", PRODUCT_TARGETS)
def test_every_program_is_there_and_starts(tool):
    done = subprocess.run([engines.in_use("cpu").tool(tool), "--help"], capture_output=True, text=True, timeout=60)
    assert "usage" in (done.stdout + done.stderr).lower()


def test_the_version_names_the_pinned_commit():
    server = engines.in_use("cpu").tool("llama-server")
    done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert load_pin().llama_cpp_commit in done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="ldd is Linux's")
def test_a_moved_engine_loads_the_libraries_beside_it(tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(engines.in_use("cpu").bin_dir, moved, symlinks=True)
    done = subprocess.run(["ldd", moved / "llama-server"], capture_output=True, text=True, check=True)
    ours = [line for line in done.stdout.splitlines() if "libllama" in line or "libggml" in line]
    assert len(ours) >= 4
    assert [line for line in ours if f"=> {moved}/" not in line] == []
