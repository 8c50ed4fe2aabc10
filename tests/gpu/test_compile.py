"""Our kernels compile, without a warning, for the oldest and the newest card of the compiler at hand. Needs nvcc, and no card."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moestream.upstream.build import find_cuda_compiler

ROOT = Path(__file__).resolve().parents[2]
GGML = ROOT / "vendor" / "llama.cpp" / "ggml" / "include"
NVCC = find_cuda_compiler()[0]

pytestmark = pytest.mark.skipif(not NVCC or not shutil.which("g++"), reason="needs nvcc: the CUDA toolkit is not installed")


def architectures() -> list[str]:
    """Those that the compiler makes code for, oldest first, as ``sm_90``."""
    done = subprocess.run((NVCC, "--list-gpu-code"), capture_output=True, text=True, check=True)
    return sorted(done.stdout.split(), key=lambda name: int("".join(filter(str.isdigit, name))))


@pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
def test_the_kernels_compile(tmp_path: Path, which: int) -> None:
    assert (GGML / "ggml.h").is_file(), "build an engine first: moestream build"
    flags = ("-std=c++17", "-Werror", "all-warnings", f"-arch={architectures()[which]}", "-I", ROOT / "engine", "-I", GGML)
    source, made = ROOT / "engine" / "moe-cuda.cu", tmp_path / "moe-cuda.o"
    done = subprocess.run([str(a) for a in (NVCC, *flags, "-c", source, "-o", made)], capture_output=True, text=True)
    assert done.returncode == 0 and made.is_file(), done.stderr
