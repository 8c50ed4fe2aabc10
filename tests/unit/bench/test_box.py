"""Where controllers and disks are found, what is written to them, and that it is undone. No root, no real cgroup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import box
from moestream.errors import MoestreamError

V1 = """\
tmpfs /sys/fs/cgroup tmpfs rw,relatime,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate 0 0\n"


def test_version_1_and_hybrid():
    layout = box.cgroup_layout(V1)
    assert layout == box.CgroupLayout(1, Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/blkio"))


def test_version_2():
    root = Path("/sys/fs/cgroup")
    assert box.cgroup_layout(V2, controllers="cpuset cpu io memory pids") == box.CgroupLayout(2, root, root)
    assert box.cgroup_layout(V2, controllers="cpu memory") == box.CgroupLayout(2, root, None)


def test_no_memory_controller():
    with pytest.raises(MoestreamError, match="no cgroup memory controller"):
        box.cgroup_layout(V2, controllers="cpu io")
    with pytest.raises(MoestreamError, match="no cgroup memory controller"):
        box.cgroup_layout("proc /proc proc rw 0 0\n")


def names(group: box.Cgroup) -> dict[str, str]:
    return {file.name: value for file, value in group.settings()}


def test_settings_of_both_versions():
    v1, v2 = box.cgroup_layout(V1), box.cgroup_layout(V2, controllers="io memory")
    assert names(box.Cgroup(v1, 8 << 30, 200_000_000, "254:0")) == {
        "memory.limit_in_bytes": str(8 << 30),
        "memory.swappiness": "0",
        "blkio.throttle.read_bps_device": "254:0 200000000",
    }
    assert names(box.Cgroup(v2, 8 << 30, 200_000_000, "254:0")) == {
        "memory.max": str(8 << 30),
        "memory.swap.max": "0",
        "io.max": "254:0 rbps=200000000",
    }
    assert names(box.Cgroup(v1, None)) == {}
    assert box.Cgroup(v1, 1).peak_file.name == "memory.max_usage_in_bytes"
    assert box.Cgroup(v2, 1).peak_file.name == "memory.peak"


def test_throttle_needs_its_controller():
    with pytest.raises(MoestreamError, match="cannot be throttled"):
        box.Cgroup(box.cgroup_layout(V2, controllers="memory"), None, 1000, "254:0")


def fake_disk(tmp_path: Path, partition: bool) -> Path:
    """A tree as below /sys; returns its dev/block folder."""
    disk = tmp_path / "devices" / "vdz"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "read_ahead_kb").write_text("8192\n")
    (disk / "dev").write_text("254:16\n")
    node = disk
    if partition:
        node = disk / "vdz1"
        node.mkdir()
        (node / "partition").write_text("1\n")
        (node / "dev").write_text("254:17\n")
    dev = tmp_path.stat().st_dev
    block = tmp_path / "block"
    block.mkdir()
    (block / f"{os.major(dev)}:{os.minor(dev)}").symlink_to(node)
    return block


@pytest.mark.parametrize("partition", [False, True])
def test_disk_of_a_file(tmp_path, partition):
    disk = box.disk_of(tmp_path, fake_disk(tmp_path, partition))
    assert disk.device == "254:16"
    assert (disk.queue / "read_ahead_kb").exists()


def test_no_disk_below(tmp_path):
    with pytest.raises(MoestreamError, match="not lie on a block device"):
        box.disk_of(tmp_path, tmp_path)


def test_read_ahead_is_put_back(tmp_path):
    disk = box.disk_of(tmp_path, fake_disk(tmp_path, False))
    file = disk.queue / "read_ahead_kb"
    with pytest.raises(RuntimeError), box.read_ahead(disk, 128) as kib:
        assert kib == 128 and file.read_text() == "128"
        raise RuntimeError
    assert file.read_text() == "8192"
    with box.read_ahead(disk, None) as kib:
        assert kib == 8192


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_read_ahead_is_put_back_after_a_signal(tmp_path, number):
    disk = box.disk_of(tmp_path, fake_disk(tmp_path, False))
    code = (
        "import time; from pathlib import Path; from bench import box\n"
        f"disk = box.Disk('254:16', Path({str(disk.queue)!r}))\n"
        "with box.signals_as_exceptions(), box.read_ahead(disk, 128):\n"
        "    print('ready', flush=True); time.sleep(60)\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root) as p:
        assert p.stdout.readline() == b"ready\n"
        assert (disk.queue / "read_ahead_kb").read_text() == "128"
        p.send_signal(number)
        assert p.wait(10) != 0
    assert (disk.queue / "read_ahead_kb").read_text() == "8192"


def test_cached_bytes_of_a_file_just_written(tmp_path):
    f = tmp_path / "f"
    f.write_bytes(bytes(10_000))
    assert box.cached_bytes(f) == 10_000
    f.write_bytes(b"")
    assert box.cached_bytes(f) == 0


def test_proc_files():
    assert box.proc_io("rchar: 10\nread_bytes: 4096\n") == {"rchar": 10, "read_bytes": 4096}
    status = "Name:\tllama-bench\nVmHWM:\t  1234 kB\nRssAnon:\t 12 kB\n"
    assert box.proc_status_kib(status, "VmHWM") == 1234
    assert box.proc_status_kib(status, "RssAnon") == 12
    assert box.proc_status_kib(status, "VmSwap") is None


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_process_lines_usage_and_exit_code():
    seen = []
    code = (
        "import sys,time; x = bytearray(40_000_000); print('out'); print('err', file=sys.stderr); time.sleep(.3); sys.exit(3)"
    )
    with box.Process(python(code), None, lambda *line: seen.append(line)) as p:
        usage = p.wait(20)
    assert sorted(seen) == [("err", "err"), ("out", "out")]
    assert usage.exit_code == 3 and not usage.killed
    assert usage.peak_rss_bytes > 40_000_000
    assert p.read_bytes() is None


def test_killed_process_is_known_as_such():
    with box.Process(python("import os; os.kill(os.getpid(), 9)"), None) as p:
        assert p.wait(20).killed


def test_a_process_does_not_outlive_its_block(tmp_path):
    code = "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); time.sleep(60)"
    with pytest.raises(RuntimeError), box.Process(python(code), None) as p:
        while not p.out:
            time.sleep(0.01)
        grandchild = int(p.out[0])
        raise RuntimeError
    assert p.popen.poll() is not None
    for _ in range(100):
        stat = Path(f"/proc/{grandchild}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {grandchild} is still running")


def test_timeout_kills():
    with box.Process(python("import time; time.sleep(60)"), None) as p, pytest.raises(MoestreamError, match="did not end"):
        p.wait(0.3)
    assert p.popen.returncode == -9
