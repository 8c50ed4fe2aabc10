"""What Linux says of memory and processors, and control groups of both versions: all of it below fake roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestream import proc
from moestream.proc import Limit, Memory

MIB = 1 << 20
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
        return proc.available_memory(self.folder)


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


def test_limits_with_what_they_leave(tmp_path: Path) -> None:
    root = Root(tmp_path, 900 * MIB, V2_LINE).v2("/a/b", 300 * MIB, 10 * MIB).v2("/a", 200 * MIB, 80 * MIB, 30 * MIB)
    root.v2("", "max", 10 * MIB)
    assert proc.memory_limits(root.folder) == [Limit("/a/b", 300 * MIB, 290 * MIB), Limit("/a", 200 * MIB, 150 * MIB)]
    assert proc.tightest(root.folder) == Limit("/a", 200 * MIB, 150 * MIB)
    assert proc.tightest(tmp_path / "nothing") is None
    root.v2("/a", 200 * MIB, 300 * MIB)
    assert proc.tightest(root.folder) == Limit("/a", 200 * MIB, 0)


def test_both_versions_at_once(tmp_path: Path) -> None:
    """Hybrid systems have version 2 beside the hierarchies of version 1, which have the controllers."""
    root = Root(tmp_path, 900 * MIB, V1_LINES + V2_LINE).v1("/a", 500 * MIB, 100 * MIB)
    assert root.memory() == Memory(400 * MIB, "cgroup /a")


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "nonsense"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "cpu.max": "150000 100000"}, 0.5),
        ("0::/a/b\n", {}, None),
        ("4:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2.0),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/a\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("5:memory:/a\n", {"memory/a/cpu.cfs_quota_us": "50000", "memory/a/cpu.cfs_period_us": "100000"}, None),
        ("nonsense\n\n", {}, None),
    ],
)
def test_quotas(tmp_path: Path, lines: str, files: dict[str, str], quota: float | None) -> None:
    root = Root(tmp_path, None, lines)
    for name, text in files.items():
        root.file(f"sys/fs/cgroup/{name}", f"{text}\n")
    assert proc.cpu_quota(root.folder) == quota


def test_throttles(tmp_path: Path) -> None:
    root = Root(tmp_path, None, V2_LINE)
    assert proc.throttles(root.folder) is None
    root.file("sys/fs/cgroup/a/cpu.stat", "usage_usec 9\nnr_throttled 7\n")
    assert proc.throttles(root.folder) == 7


def test_numbers_in_files(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_text("Name:\tx\nVmHWM:\t  12 kB\nread_bytes: 7\nVmHWM: 13 kB\nActive(file): 3 kB\nnr 4\nbad ٣\n\nalone\n")
    assert proc.fields(path) == {"VmHWM": 12, "read_bytes": 7, "Active(file)": 3, "nr": 4}
    assert proc.field(path, "VmHWM") == 12 and proc.field(path, "gone") is None and proc.field(tmp_path, "VmHWM") is None
    for text, value in (("12\n", 12), ("max\n", None), ("-1\n", None), ("", None), ("٣\n", None)):
        path.write_text(text)
        assert proc.number(path) == value
    assert proc.number(tmp_path / "gone") is None and proc.text(tmp_path / "gone") == ""
