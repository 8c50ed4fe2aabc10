"""The page cache of a real file, the memory of a real process, GPUs by a made-up nvidia-smi, and what is said to disturb."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moestream import paths
from moestream.errors import MoestreamError
from moestream.measuring import machine
from moestream.measuring.machine import Conditions, Cpu, Seen, disturbances


@pytest.fixture
def on_disk() -> Path:
    """A file whose page cache can be emptied: the folder for temporary files may be in memory."""
    folder = paths.shipped_root() / "build"
    folder.mkdir(exist_ok=True)
    path = folder / f"cache-{os.getpid()}"
    path.write_bytes(os.urandom(3 << 20))
    yield path
    path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="the page cache is looked at on Linux alone")
def test_the_cache_of_files_is_emptied(on_disk: Path) -> None:
    on_disk.read_bytes()
    assert machine.cached_share([on_disk]) == 1
    machine.drop_cache([on_disk])
    assert machine.cached_share([on_disk]) == 0
    with on_disk.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(1)
    assert 0 < machine.cached_share([on_disk]) < 0.5


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MoestreamError, match=r"cannot empty the page cache of .*none: No such file"):
        machine.drop_cache([tmp_path / "none"])
    assert machine.cached_share([tmp_path / "none"]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_peak_of_a_process_is_kept() -> None:
    code = "import sys; x = bytearray(64 << 20); print(1, flush=True); sys.stdin.readline(); del x; print(2, flush=True); sys.stdin.readline()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    watch = machine.Watch(child.pid, None)
    try:
        child.stdout.readline()
        watch.look()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        watch.look()
    finally:
        watch.close()
        child.communicate("\n")
    assert watch.peak_rss_bytes > 64 << 20 and watch.peak_anon_bytes > 64 << 20
    assert watch.peak_vram_bytes is None


def test_vram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.vram_used_bytes() is None
    program.write_text("#!/bin/sh\necho 100\necho 23\n")
    program.chmod(0o755)
    assert machine.vram_used_bytes() == 123 << 20
    watch = machine.Watch(os.getpid(), 120 << 20)
    watch.look()
    watch.close()
    assert watch.peak_vram_bytes == 3 << 20
    program.write_text("#!/bin/sh\necho '[Insufficient Permissions]'\n")
    assert machine.vram_used_bytes() is None
    program.write_text("#!/bin/sh\necho 5\nexit 9\n")
    assert machine.vram_used_bytes() is None


def test_others_are_what_the_process_did_not_use() -> None:
    before = Cpu(busy_s=100, total_s=200, steal_s=0, process_s=10)
    after = Cpu(busy_s=106, total_s=210, steal_s=0, process_s=14)
    assert after.others_since(before) == pytest.approx(0.2)
    assert replace(after, process_s=30).others_since(before) == 0
    assert replace(before, total_s=200.1).others_since(before) is None


QUIET = Conditions(n_core=4, load=0.1, swapped_bytes=5, throttles=1, oom_kills=2, cpu_quota=None)


def test_a_quiet_machine_disturbs_nothing() -> None:
    assert disturbances(QUIET, QUIET, Seen(others=[0.01, 0.02])) == []
    assert disturbances(Conditions(n_core=1), Conditions(n_core=1), Seen()) == []


@pytest.mark.parametrize(("before", "after", "seen", "line"), [
    ({"load": 3.456}, {}, Seen(), "the load average was 3.46 on 4 cores at the start"),
    ({"busy": (("cc1plus", 7, 0.97),)}, {}, Seen(), "cc1plus (pid 7) used 97% of a core at the start"),
    ({}, {}, Seen(others=[0.05, 0.4, 0.2]), "other processes used up to 40% of all cores, and more than 10% in 2 of 3 runs"),
    ({}, {"swapped_bytes": 5 + (3 << 20)}, Seen(), "3.0 MiB went to or came from swap"),
    ({"cpu_quota": 1.5}, {}, Seen(), "the cgroup allows 1.5 of 4 cores"),
    ({}, {"throttles": 9}, Seen(), "the cgroup was held back 8 times for its processor time"),
    ({}, {"oom_kills": 3}, Seen(), "the kernel ended 1 process for want of memory"),
    ({}, {}, Seen(warm_starts=[0.3, 0.5]),
     "2 cold runs were not cold: up to 50% of the model stayed in the page cache (another process has it open?)"),
])  # fmt: skip
def test_what_disturbs(before: dict, after: dict, seen: Seen, line: str) -> None:
    assert disturbances(replace(QUIET, **before), replace(QUIET, **after), seen) == [line]


def test_a_busy_process_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert child.stdout
    try:
        child.stdout.readline()
        found = machine.conditions(look_s=0.5)
    finally:
        child.kill()
        child.communicate()
    assert child.pid in [pid for _, pid, _ in found.busy] or len(found.busy) == 5
    assert os.getpid() not in [pid for _, pid, _ in found.busy]
    assert found.n_core >= 1 and found.load is not None
