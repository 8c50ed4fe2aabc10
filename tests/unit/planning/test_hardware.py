"""What a machine has: fake roots for memory and cores, a fake nvidia-smi, real files for the drive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moestream import gguf_facts
from moestream.planning import hardware
from moestream.planning.hardware import Memory

MIB = 1 << 20
DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"
V1_LINES = "5:memory:/a/b\n1:name=systemd:/x\n"
V2_LINE = "0::/a/b\n"


class Root:
    def __init__(self, folder: Path, available: int | None, groups: str = "") -> None:
        self.folder = folder
        if available is not None:
            self.file("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:  {available // 1024} kB\n")
        if groups:
            self.file("proc/self/cgroup", groups)

    def file(self, name: str, text: str) -> Root:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def v1(self, group: str, limit: int, usage: int, active: int = 0, inactive: int = 0) -> Root:
        base = f"sys/fs/cgroup/memory{group}"
        self.file(f"{base}/memory.limit_in_bytes", f"{limit}\n").file(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        return self.file(f"{base}/memory.stat", f"cache 1\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n")

    def v2(self, group: str, limit: int | str, usage: int, active: int = 0, inactive: int = 0) -> Root:
        base = f"sys/fs/cgroup{group}"
        self.file(f"{base}/memory.max", f"{limit}\n").file(f"{base}/memory.current", f"{usage}\n")
        return self.file(f"{base}/memory.stat", f"anon 1\nactive_file {active}\ninactive_file {inactive}\n")

    def memory(self) -> Memory | None:
        return hardware.available_memory(self.folder)


def test_without_meminfo_nothing_is_known(tmp_path: Path) -> None:
    assert Root(tmp_path, None).memory() is None


def test_mem_available_alone(tmp_path: Path) -> None:
    assert Root(tmp_path, 300 * MIB, V1_LINES).memory() == Memory(300 * MIB, "MemAvailable")


def test_v1_file_cache_counts_as_free(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, V1_LINES).v1("/a/b", 500 * MIB, 400 * MIB, 100 * MIB, 50 * MIB)
    assert root.memory() == Memory(250 * MIB, "cgroup /a/b")


def test_v1_huge_number_is_no_limit(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, V1_LINES).v1("/a/b", 9223372036854771712, 400 * MIB)
    assert root.memory() == Memory(900 * MIB, "MemAvailable")


def test_v2_smallest_of_the_groups_around(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, V2_LINE).v2("/a/b", "max", 10 * MIB).v2("/a", 200 * MIB, 80 * MIB, 30 * MIB)
    assert root.memory() == Memory(150 * MIB, "cgroup /a")


def test_v2_wide_groups_around_a_narrow_one_and_more_than_there_is(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, V2_LINE).v2("/a/b", 100 * MIB, 10 * MIB).v2("/a", 500 * MIB, 10 * MIB)
    assert root.memory() == Memory(90 * MIB, "cgroup /a/b")
    root.file("proc/meminfo", f"MemAvailable: {50 * 1024} kB\n")
    assert root.memory() == Memory(50 * MIB, "MemAvailable")


def test_v2_root_of_a_container(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, "0::/\n").v2("", 100 * MIB, 40 * MIB)
    assert root.memory() == Memory(60 * MIB, "cgroup /")


def test_a_full_group_has_one_byte(tmp_path: Path) -> None:
    assert Root(tmp_path, 900 * MIB, V2_LINE).v2("/a/b", 100 * MIB, 120 * MIB).memory() == Memory(1, "cgroup /a/b")


def test_cores_under_a_quota(tmp_path: Path) -> None:
    everything = hardware.cores(tmp_path)
    assert 1 <= everything <= len(os.sched_getaffinity(0))
    root = Root(tmp_path, None, V2_LINE).file("sys/fs/cgroup/a/cpu.max", "100000 100000\n")
    assert hardware.cores(root.folder) == 1
    root.file("sys/fs/cgroup/a/cpu.max", "max 100000\n")
    assert hardware.cores(root.folder) == everything


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo 'NVIDIA A, rev 2, 8192, 7000'; echo 'NVIDIA B, 4096, 100'; echo 'C, [N/A], [N/A]'", monkeypatch)
    assert hardware.gpus() == [
        hardware.Gpu("NVIDIA A, rev 2", 8192 * MIB, 7000 * MIB),
        hardware.Gpu("NVIDIA B", 4096 * MIB, 100 * MIB),
    ]


def test_no_gpus_where_nvidia_smi_fails_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "echo 'NVIDIA A, 8192, 7000'; exit 9", monkeypatch)
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
