"""A llama.cpp of a few files, as the source distribution carries it, and a home of its own for each test."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from moestream.upstream.fetch import sha256_of
from moestream.upstream.pin import Pin

FILES = {
    "CMakeLists.txt": 'project("llama.cpp")\n',
    "include/llama.h": "// llama.h\n",
    "src/llama.cpp": "one\ntwo\nthree\nfour\nfive\nsix\nseven\n",
    "tests/test-llama-archs.cpp": "alpha\nbeta\ngamma\n",
    "LICENSE": "MIT\n",
    "licenses/other": "also MIT\n",
    ".git": "gitdir: ../../.git/modules/vendor/llama.cpp\n",
}
PREFIX = "llama_cpp_python-9.9.9/vendor/llama.cpp/"


def write_archive(path: Path, files: dict[str, str], extra: Iterable[tarfile.TarInfo] = ()) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(text.encode()), 1_600_000_000
            tar.addfile(info, io.BytesIO(text.encode()))
        for info in extra:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return path


@pytest.fixture
def make_archive(tmp_path: Path) -> Callable[..., Path]:
    """Writes an archive of FILES with changes: ``make_archive(name, {"src/llama.cpp": None})`` leaves one out."""

    def make(name: str = "upstream.tar.gz", changes: dict[str, str | None] | None = None, extra=()) -> Path:
        files = {**FILES, **(changes or {})}
        inside = {PREFIX + name: text for name, text in files.items() if text is not None}
        inside["llama_cpp_python-9.9.9/setup.py"] = "raise SystemExit('must not run')\n"
        return write_archive(tmp_path / name, inside, extra)

    return make


@pytest.fixture
def archive(make_archive) -> Path:
    return make_archive()


@pytest.fixture
def pin(archive: Path) -> Pin:
    return Pin("llama-cpp-python", "9.9.9", sha256_of(archive), "vendor/llama.cpp", "abcdef0")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def write_program(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a shell script into ``bin/`` of the test's folder."""

    def write(name: str, script: str) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + script, encoding="utf-8")
        path.chmod(0o755)
        return path

    return write
