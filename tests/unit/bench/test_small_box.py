"""The comparison with fake programs in place of the engine's: what is counted, and what is refused."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from bench import small_box
from bench.small_box import Run, Side
from moestream.errors import MoestreamError

STOCK = small_box.stock_side("mmap")
MOE = Side("moestream 32 slots", ("--moe-slots", "32"), streams=True)
STATS = {
    "schema": "moestream/stats/1",
    "streaming": True,
    "slots": 32,
    "totals": {"hits": 75, "misses": 25, "bytes_needed": 100, "bytes_read": 25, "stall_us": 1_500_000},
    "memory": {"total_bytes": 1000},
}

FAKE_BENCH = """
import json, os, sys, time
args = sys.argv
if '--help' in args:
    print('--moe-slots N'); sys.exit()
print('llama-bench: benchmark 1/1: generation run 1/2', file=sys.stderr, flush=True)
print('llama-bench: benchmark 1/1: generation run 2/2', file=sys.stderr, flush=True)
time.sleep(.2)
print(json.dumps({'samples_ns': [2_000_000_000, 1_000_000_000], 'args': args}), flush=True)
time.sleep(.2)
if '--moe-slots' in args:
    open(os.environ['MOESTREAM_STATS_FILE'], 'w').write(STATS)
"""
FAKE_RESULTS = """
import sys, gguf, numpy as np
args = sys.argv
w = gguf.GGUFWriter(args[args.index('-o') + 1], 'none')
w.add_tensor('tokens', np.zeros(4, np.int32))
logits = np.arange(12, dtype=np.float32)
if '--moe-slots' in args and args[args.index('-ub') + 1] == DIFFERS_AT:
    logits[7] = np.nextafter(logits[7], np.float32(8))
w.add_tensor('logits', logits)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
"""


def program(folder: Path, name: str, code: str, **constants: object) -> None:
    path = folder / name
    head = "".join(f"{k} = {v!r}\n" for k, v in constants.items())
    path.write_text(f"#!{sys.executable}\n{head}{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def bench(folder: Path) -> small_box.Bench:
    return small_box.Bench(
        bin_dir=folder, files=(folder / "model.gguf",), threads=2, layout=None, memory_bytes=None, disk_bytes_per_s=None,
        disk=None, timeout_s=60, drop=False,
    )  # fmt: skip


def test_the_last_lap_counts(tmp_path):
    program(tmp_path, "llama-bench", FAKE_BENCH, STATS=json.dumps(STATS))
    run = bench(tmp_path).llama_bench(STOCK, "tg", 32)
    assert run.tok_per_s == 32
    assert run.bytes_per_token is not None
    assert run.stall_share is None and run.failure is None and run.phase == "tg32"


def test_statistics_of_moestream(tmp_path):
    program(tmp_path, "llama-bench", FAKE_BENCH, STATS=json.dumps(STATS))
    run = bench(tmp_path).llama_bench(MOE, "pp", 64)
    assert run.tok_per_s == 64
    assert run.stall_share == pytest.approx(0.5)  # 1.5 s of both laps' 3 s
    assert run.hit_rate == 0.75 and run.read_share == 0.25 and run.predicted_bytes == 1000


def test_statistics_of_another_schema_are_refused(tmp_path):
    program(tmp_path, "llama-bench", FAKE_BENCH, STATS=json.dumps({"schema": "moestream/stats/9"}))
    with pytest.raises(MoestreamError, match="stats/9"):
        bench(tmp_path).llama_bench(MOE, "tg", 32)


def test_out_of_memory_is_a_result_and_has_no_speed(tmp_path):
    program(tmp_path, "llama-bench", "import os\nos.kill(os.getpid(), 9)")
    run = bench(tmp_path).llama_bench(STOCK, "tg", 32)
    assert run.failure == "killed (out of memory)" and run.tok_per_s is None
    assert "killed" in small_box.table(small_box.summarise([run]))


def test_a_failing_program_is_an_error_with_its_last_words(tmp_path):
    program(tmp_path, "llama-bench", "import sys\nprint('no such model', file=sys.stderr)\nsys.exit(1)")
    with pytest.raises(MoestreamError, match="no such model") as e:
        bench(tmp_path).llama_bench(STOCK, "tg", 32)
    assert "llama-bench -m" in e.value.hint


def test_a_missing_program(tmp_path):
    with pytest.raises(MoestreamError, match="no llama-bench"):
        bench(tmp_path).llama_bench(STOCK, "tg", 32)


def test_equal_logits_pass(tmp_path):
    program(tmp_path, "llama-results", FAKE_RESULTS, DIFFERS_AT="never")
    report = small_box.check_identity(bench(tmp_path), STOCK, [MOE], n_parallel=4)
    assert report["equal"] and report["logits_bytes"] == {"decode": 48, "prompt": 48, "np4": 48}


@pytest.mark.parametrize(("ubatch", "phase"), [("1", "decode"), ("512", "prompt"), ("4", "np4")])
def test_one_different_bit_is_refused(tmp_path, ubatch, phase):
    program(tmp_path, "llama-results", FAKE_RESULTS, DIFFERS_AT=ubatch)
    with pytest.raises(MoestreamError, match=f"outputs differ.*{phase}: byte 28 of 48"):
        small_box.check_identity(bench(tmp_path), STOCK, [MOE], n_parallel=4)


def test_first_difference():
    assert small_box.first_difference(b"abc", b"abc") is None
    assert small_box.first_difference(b"abc", b"abd") == 2
    assert small_box.first_difference(b"abc", b"ab") == 2


def test_flags_of_both_sides():
    a = small_box.parser().parse_args(
        ["m.gguf", "--slots", "24", "--moe-io-threads", "6", "--moe-arg=-lm", "--moe-arg", "none"]
    )
    side = small_box.moestream_side(a, a.slots)
    assert side.args == (
        "--moe-slots", "24", "--moe-io", "auto", "--moe-policy", "lru", "--moe-overlap", "on", "--moe-io-threads", "6", "-lm", "none",
    )  # fmt: skip
    other = small_box.moestream_side(a, a.slots, "--moe-policy heat --moe-overlap off")
    assert other.args == (*side.args, "--moe-policy", "heat", "--moe-overlap", "off")
    assert other.name == "moestream 24 slots policy heat overlap off"
    assert small_box.stock_side("none").args == ("-lm", "none")
    assert small_box.stock_side("none").kernels("llama-bench") == ("--repack", "0")
    assert small_box.stock_side("none").kernels("llama-server") == ("--no-repack",)
    assert small_box.stock_side("none", repack=True).kernels("llama-server") == ()


@pytest.mark.parametrize(("kernels", "repack"), [("default", True), ("plain", False)])
def test_stock_in_a_box_is_never_repacked(kernels: str, repack: bool) -> None:
    a = small_box.parser().parse_args(["m.gguf", "--kernels", kernels])
    assert small_box.moestream_side(a, "8").repack is repack
    assert not small_box.stock_side("mmap", repack).repack


def runs() -> list[Run]:
    speeds = {("a", "tg32"): (1.0, 3.0, 1.5), ("b", "tg32"): (6.0, 5.0, 9.0), ("a", "pp512"): (10.0,), ("b", "pp512"): (20.0,)}
    return [Run(s, p, tok_per_s=v, bytes_per_token=2e6, peak_rss_bytes=2**30) for (s, p), vs in speeds.items() for v in vs]


def test_medians_ratios_and_table():
    rows = small_box.summarise(runs())
    assert [(r["side"], r["phase"], r["tok_per_s"], r["runs"]) for r in rows] == [
        ("a", "tg32", 1.5, 3), ("b", "tg32", 6.0, 3), ("a", "pp512", 10.0, 1), ("b", "pp512", 20.0, 1),
    ]  # fmt: skip
    assert small_box.ratios(rows, "a") == {"tg32 b": 4.0, "pp512 b": 2.0}
    head, first, *_ = small_box.table(rows).splitlines()
    assert head.split()[:4] == ["side", "phase", "runs", "tok/s"]
    assert first.split() == ["a", "tg32", "3", "1.50", "1.00-3.00", "2.0", "-", "-", "1.00", "-", "-", "-"]


def test_a_failed_run_takes_the_speed_of_its_row():
    rows = small_box.summarise([*runs(), Run("a", "tg32", failure="killed (out of memory)")])
    assert rows[0]["tok_per_s"] is None and rows[0]["failure"]
    assert small_box.ratios(rows, "a") == {"pp512 b": 2.0}


def test_peak_against_the_plan():
    rows = small_box.summarise([Run("a", "tg32", tok_per_s=1.0, peak_cgroup_bytes=1040, predicted_bytes=1000)])
    assert small_box.table(rows).splitlines()[1].split()[-1] == "1.040"


def test_an_unpatched_engine_is_said(tmp_path):
    program(tmp_path, "llama-bench", "print('usage')")
    assert not small_box.has_flag(str(tmp_path / "llama-bench"), "--moe-slots")
    program(tmp_path, "llama-bench", FAKE_BENCH, STATS="")
    assert small_box.has_flag(str(tmp_path / "llama-bench"), "--moe-slots")
