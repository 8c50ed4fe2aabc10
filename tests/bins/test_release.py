"""A release from end to end: the portable engine that was really built is packed, downloaded into an empty home, and serves.

``make test-bins`` builds it first: every file of the CPU kernels is compiled for fourteen families of processors, which takes
a quarter of an hour with one job. So this is no part of ``make test``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from releases import ReleaseServer, serving

from moestream.upstream import pack
from moestream.upstream.build import PRODUCT_TARGETS

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"
PROMPT = "The command reads the file named on the command line and writes each line to standard output, numbered. " * 4
OF_GLIBC = re.compile(r"linux-vdso|/ld-linux|lib(c|m|dl|rt|pthread)\.so")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReleaseServer]:
    """Packed from the engine of ``moestream build --portable``, behind a server."""
    folder = tmp_path_factory.mktemp("release")
    pack.pack(pack.engine_to_pack("cpu"), folder)
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def home(release: ReleaseServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that was empty before the release's engine was downloaded into it."""
    folder = tmp_path_factory.mktemp("home")
    done = moestream(folder, "download-bins", "--json", MOESTREAM_BINS_URL=release.url)
    assert done.returncode == 1 and "HTTP 404" in done.stderr  # no release with the tag of this version there
    done = moestream(folder, "download-bins", "--from", release.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["installed"] is True
    return folder


def moestream(home: Path, *arguments: str, module: str = "moestream.cli", **more: str) -> subprocess.CompletedProcess[str]:
    """moestream with next to nothing in its environment."""
    environment = {"MOESTREAM_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **more}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, cwd=home, timeout=120
    )  # fmt: skip


@pytest.fixture(scope="module")
def bin_dir(home: Path) -> Path:
    return Path(moestream(home, "engines", "--path").stdout.strip())


def test_only_glibc_comes_from_the_system(bin_dir):
    """Of what the programs and our libraries load, and of what that loads in turn."""
    ours = [
        file
        for file in sorted(bin_dir.iterdir())
        if file.name in PRODUCT_TARGETS or re.match(r"lib(ggml|llama|mtmd)", file.name)
    ]
    assert len(ours) > len(PRODUCT_TARGETS) + 14
    for file in ours:
        loaded = subprocess.run(["ldd", file], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True).stdout
        assert "libc.so" in loaded
        strange = [line for line in loaded.splitlines() if f"=> {bin_dir}/" not in line and not OF_GLIBC.search(line)]
        assert strange == [], file


@pytest.mark.parametrize("tool", PRODUCT_TARGETS)
def test_every_program_starts(bin_dir, tool):
    done = subprocess.run([bin_dir / tool, "--help"], env={}, cwd="/", capture_output=True, text=True, timeout=60)
    assert "usage" in (done.stdout + done.stderr).lower()


def test_the_demo_model_answers(home):
    done = moestream(home, "--once", "--port", "0", module="moestream.demo")
    assert done.returncode == 0, done.stderr
    assert "x86_64-portable (cpu)" in done.stdout and "grep - print lines that match patterns." in done.stdout


def variants(folder: Path) -> list[str]:
    return sorted(match[1] for file in folder.iterdir() if (match := re.fullmatch(r"libggml-cpu-(.+)\.so", file.name)))


def logits(folder: Path, output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [folder / "llama-results", "-m", DEMO, "-p", PROMPT, "-t", "1", "-o", output, *arguments]
    environment = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)


def test_streaming_has_stocks_bits_with_the_kernels_of_every_processor_that_this_one_can_be(bin_dir, tmp_path):
    """Each CPU module alone; those for other processors refuse to be loaded, and then there is none."""
    compared = []
    for variant in variants(bin_dir):
        folder = tmp_path / variant
        shutil.copytree(bin_dir, folder, symlinks=True)
        for other in set(variants(bin_dir)) - {variant}:
            os.unlink(folder / f"libggml-cpu-{other}.so")
        if logits(folder, tmp_path / "stock").returncode != 0:
            assert variant not in ("x64", "sse42"), "these run on all of CI's processors"
            continue
        for slots in ("6", "64"):
            done = logits(folder, tmp_path / "streamed", "--moe-slots", slots)
            assert done.returncode == 0, done.stderr
            assert (tmp_path / "stock").read_bytes() == (tmp_path / "streamed").read_bytes(), (variant, slots)
        compared.append(variant)
        shutil.rmtree(folder)
    assert {"x64", "sse42"} <= set(compared)
    print(f"compared: {', '.join(compared)}")


def test_the_working_directory_brings_no_kernels(bin_dir, tmp_path):
    """A file of that name in a folder of downloads must not run."""
    source = "#include <unistd.h>\nint ggml_backend_score(void) { return 1 << 30; }\n__attribute__((constructor)) static void f(void) { _exit(99); }\n"
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", tmp_path / "libggml-cpu-zzz.so"]
    subprocess.run(command, input=source, text=True, check=True)
    arguments = ["-m", DEMO, "-p", "a", "-o", tmp_path / "logits"]
    done = subprocess.run([bin_dir / "llama-results", *arguments], cwd=tmp_path, env={}, capture_output=True, timeout=60)
    assert done.returncode == 0
