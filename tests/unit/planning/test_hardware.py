"""What a machine has: a fake root for cores, a fake nvidia-smi, real files for the drive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moestream import gguf_facts
from moestream.planning import hardware

MIB = 1 << 20
DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"


def test_cores_under_a_quota(tmp_path: Path) -> None:
    everything = hardware.cores(tmp_path)
    assert 1 <= everything <= len(os.sched_getaffinity(0))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    limit = tmp_path / "sys/fs/cgroup/a/cpu.max"
    limit.parent.mkdir(parents=True)
    for text, n in (("100000 100000", 1), ("20000 100000", 1), ("max 100000", everything), ("99900000 100000", everything)):
        limit.write_text(f"{text}\n")
        assert hardware.cores(tmp_path) == n


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("NVIDIA A, rev 2, 8192, 7000, 0, GPU-aa1", "NVIDIA B, 4096, 100, 1, GPU-ab2", "C, [N/A], [N/A], 2, GPU-c")
    fake_smi(tmp_path, "; ".join(f"echo '{line}'" for line in lines), monkeypatch)
    first, second = hardware.Gpu("NVIDIA A, rev 2", 8192 * MIB, 7000 * MIB), hardware.Gpu("NVIDIA B", 4096 * MIB, 100 * MIB)
    assert hardware.gpus(environment={}) == [first, second]
    for wanted, seen in (
        ("0", [first]), ("1,0", [second, first]), ("GPU-ab", [second]), ("GPU-aa1, 1", [first, second]), ("1,9,0", [second]), ("1,1", []), ("GPU-a", []),
        ("", []), ("-1", []), ("G", []), ("MIG-1", []),
    ):  # fmt: skip
        assert hardware.gpus(environment={"CUDA_VISIBLE_DEVICES": wanted}) == seen, wanted


def test_no_gpus_where_nvidia_smi_fails_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo 'NVIDIA A, 8192, 7000, 0, GPU-a'; exit 9", monkeypatch)
    assert hardware.gpus() == []
    assert hardware.gpus("no-such-nvidia-smi") == []


def test_drive_of_a_model_that_is_here() -> None:
    facts = gguf_facts.read(DEMO)
    drive = hardware.probe_model(facts, limit_s=0.04)
    assert drive.request_bytes == 20736 == hardware.request_bytes(facts)
    if drive.note:  # a file system without direct reads says so
        assert drive.bytes_s is None and DEMO.name in drive.note
        return
    assert set(drive.rates) == {1, 2, 4, 8}
    assert drive.bytes_s == max(drive.rates.values()) == drive.rates[drive.in_flight] > 0


def test_drive_of_a_folder_needs_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    drive = hardware.probe_folder(tmp_path / "not" / "there", 20736, limit_s=0.04)
    assert drive.bytes_s is None and drive.note == f"no large file below {tmp_path} to read from"


def test_drive_of_a_file_that_ends_is_an_error_that_is_told(tmp_path: Path) -> None:
    drive = hardware._probe((tmp_path / "gone",), [(0, 0, 4096)], 0.04)
    assert drive.bytes_s is None and "gone" in drive.note


def test_rates_are_positive() -> None:
    assert hardware.memory_rate(2, limit_s=0.01) > 0
    # a wide product is never slower than a narrow one, and cores add up
    narrow, wide = hardware.matmul_flops(1, 1, limit_s=0.01), hardware.matmul_flops(1, limit_s=0.01)
    assert wide > narrow > 0 and hardware.matmul_flops(1000, 1, limit_s=0.01) > wide
    assert hardware.page_cache_rate(20736, limit_s=0.01) > 0
