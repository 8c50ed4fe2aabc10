"""A made-up ``/`` for /proc and /sys, and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed import tiny

from moestream import gguf_facts
from moestream.gguf_facts import GgufFacts


class Root:
    """Files below a folder that stands for ``/``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        folder.mkdir()

    def write(self, name: str, text: str = "") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def memory(self, available_mib: int, total_mib: int = 8192, swap_mib: int = 0, swap_free_mib: int = 0) -> Path:
        kib = {"MemTotal": total_mib, "MemAvailable": available_mib, "SwapTotal": swap_mib, "SwapFree": swap_free_mib}
        self.write("proc/meminfo", "".join(f"{name}:{mib * 1024:>12} kB\n" for name, mib in kib.items()))
        return self.path

    def disk(self, name: str, device: str, *, rotational: int = 0, read_ahead_kib: int = 128, vendor: str = "ATA") -> Path:
        """A disk with one partition, which has the number ``device``; returns the disk's folder."""
        folder = self.path / "sys/devices/x/block" / name
        self.write(f"sys/devices/x/block/{name}/queue/rotational", f"{rotational}\n")
        self.write(f"sys/devices/x/block/{name}/queue/read_ahead_kb", f"{read_ahead_kib}\n")
        self.write(f"sys/devices/x/block/{name}/device/vendor", vendor)
        self.write(f"sys/devices/x/block/{name}/{name}1/partition", "1\n")
        link = self.path / "sys/dev/block" / device
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / f"{name}1")
        return folder

    def mounts(self, *lines: tuple[str, str, str, str]) -> Path:
        """Lines of (mount point, device number, file system, source)."""
        text = "".join(f"{i} 1 {dev} / {point} rw - {fs} {source} rw\n" for i, (point, dev, fs, source) in enumerate(lines))
        self.write("proc/self/mountinfo", text)
        return self.path


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny().write())
    return path


@pytest.fixture
def facts(model_file: Path) -> GgufFacts:
    return gguf_facts.read(model_file)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of moestream of its own, and no settings from elsewhere."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MOESTREAM_HOME", str(folder))
    for name in ("MOESTREAM_PORT", "MOESTREAM_MODEL", "MOESTREAM_BACKEND", "CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDACXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return folder
