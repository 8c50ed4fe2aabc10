from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from bench import io_read
from bench.io_read import Row, Way
from moestream.errors import MoestreamError


def test_ways_share_depths_evenly() -> None:
    assert io_read.ways([1, 3], [1, 2, 8, 9], workers=2) == [
        Way("threads", 1, 1), Way("threads", 3, 3),
        Way("uring", 1, 1), Way("uring", 2, 2), Way("uring", 8, 2), Way("uring", 9, 1),
    ]  # fmt: skip
    assert all(way.n % way.workers == 0 for way in io_read.ways([], range(1, 65), workers=5))


def test_both_sides_read_alike() -> None:
    way = Way("uring", 8, 2)
    ours = io_read.ours_argv(Path("p"), Path("f"), 5000, 2, "direct", way, 7)
    assert ours == ["p", "f", "5000", "2", "direct", "uring", "2", "4", "7"]
    fio = io_read.fio_argv(Path("f"), 5000, 2, "direct", way, 7)
    for wanted in (
        "--bs=8192",
        "--direct=1",
        "--ioengine=io_uring",
        "--iodepth=4",
        "--numjobs=2",
        "--randseed=7",
        "--runtime=2000ms",
    ):
        assert wanted in fio
    threads = io_read.fio_argv(Path("f"), 8192, 2, "buffered", Way("threads", 3, 3), 7)
    for wanted in ("--bs=8192", "--direct=0", "--ioengine=psync", "--numjobs=3"):
        assert wanted in threads


def test_what_fio_says() -> None:
    job = {"usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 4000, "read": {"bw_bytes": 500, "io_bytes": 2_000_000_000}}
    text = "note: both\n" + json.dumps({"jobs": [job]})
    assert io_read.parse_fio(text) == (500.0, 0.5)
    for broken in ("", "nothing", "{}", '{"jobs": []}', json.dumps({"jobs": [{**job, "read": {}}]})):
        with pytest.raises(MoestreamError, match="not understood"):
            io_read.parse_fio(broken)


def test_medians_and_their_quotient() -> None:
    row = Row(Way("uring", 4, 2), ours=[1e9, 9e9, 2e9], fio=[4e9, 1e9, 5e9], ours_cpu=[0.1, 0.2, 0.3], fio_cpu=[0.4, 0.5, 0.6])
    assert row.ratio == 0.5
    assert (
        io_read.table([row]).splitlines()[-1] == "| io_uring 4 by 2 | 2.00 (1.00-9.00) | 4.00 (1.00-5.00) | 0.50 | 0.20, 0.50 |"
    )


@pytest.mark.parametrize("text", ["", "0", "1,0", "-1"])
def test_numbers(text: str) -> None:
    assert io_read.numbers("1,2,") == [1, 2]
    with pytest.raises(argparse.ArgumentTypeError):
        io_read.numbers(text)


@pytest.mark.parametrize("flag", ["--workers", "--runs", "--slab"])
@pytest.mark.parametrize("text", ["0", "-1", "x", "9" * 5000])
def test_positive_numbers(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        io_read.main(["file", flag, text])
    assert "expected a number from 1" in capsys.readouterr().err


def test_a_file_of_one_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    (tmp_path / "f").write_bytes(bytes(199))
    assert io_read.main([str(tmp_path / "f"), "--slab", "100"]) == 1
    assert "must hold at least 2 slabs of 100 bytes" in capsys.readouterr().err


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert io_read.main([str(tmp_path / "none")]) == 1
    assert "hint: --make-gib 6 writes one" in capsys.readouterr().err
    (tmp_path / "there").touch()
    assert io_read.main([str(tmp_path / "there"), "--make-gib", "1"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "there").exists()
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert io_read.main([str(tmp_path / "there")]) == 1
    assert "fio is not installed" in capsys.readouterr().err
