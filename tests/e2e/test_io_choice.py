"""How experts are read is measured at start, follows from the figures, and leaves nothing in the page cache."""

from __future__ import annotations

import ctypes
import errno
import platform
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
from fixture_models import tool
from llama_server import LlamaServer, environment
from page_cache import PAGE, cached_pages, drop_from_cache, expert_runs

from bench import synthetic

DOC = Path(__file__).resolve().parents[2] / "docs" / "stats.md"
FIELDS_OF_A_RATE = {"mode", "backend", "in_flight", "bytes_per_s"}


@pytest.fixture(scope="module")
def model(disk_folder: Path) -> Path:
    """113 MB of experts: enough to be worth measuring, and they fit into memory."""
    return synthetic.write_model(
        disk_folder / "small.gguf", n_layer=2, n_expert=64, n_used=4, d_model=1024, d_ff=512, n_head=8, n_head_kv=2
    )


@pytest.fixture(scope="module")
def too_big(disk_folder: Path) -> Path:
    """More experts than memory: a file that is one hole behind its header."""
    wanted = psutil.virtual_memory().available * 1.1
    if wanted > 2**40:
        pytest.skip("a file larger than this machine's memory is larger than some file systems take")
    path = disk_folder / "too-big.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_make", lambda tensor, _seed: tensor.size_bytes)
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", leave_a_hole)
        expert_bytes = 3 * 2048 * 2048 * 18 // 32
        synthetic.write_model(
            path, n_layer=int(wanted / (64 * expert_bytes)) + 1, n_expert=64, n_used=1, d_model=2048, d_ff=2048, n_head=8,
            n_head_kv=2,
        )  # fmt: skip
    return path


def leave_a_hole(writer: gguf.GGUFWriter, size: int) -> None:
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    out.truncate(out.tell() + -(-size // 32) * 32)
    out.seek(0, 2)


def start_line(server: LlamaServer) -> str:
    match = re.search(r"moestream: reads: .*", server.text())
    assert match, server.text()
    return match[0]


def best(rates: list[dict[str, Any]], **wanted: Any) -> int:
    return max((r["bytes_per_s"] for r in rates if all(r[k] == v for k, v in wanted.items())), default=0)


def test_what_fits_is_read_through_the_page_cache(model: Path, tmp_path: Path) -> None:
    drop_from_cache(model)
    with LlamaServer(model, tmp_path / "log", "--moe-slots", "8") as server:
        # Reading the header reads ahead; the last tensor of experts is far behind that.
        begin, end = expert_runs(model)[-1]
        assert not any(cached_pages(model)[max(begin, end - 30_000_000) // PAGE : end // PAGE])
        stats, line = server.stats(), start_line(server)
        assert stats["totals"]["bytes_read"] == 0
        server.complete("The", 3)
    io = stats["io"]
    assert (io["mode"], io["requested"], io["reason"].split(";")[0]) == (
        "buffered",
        "auto",
        "the page cache can hold the experts",
    )
    rates = io["probe"]["rates"]
    assert rates or io["probe"]["note"]
    assert all(set(rate) == FIELDS_OF_A_RATE and rate["bytes_per_s"] > 0 for rate in rates)
    if rates and best(rates, mode="direct"):
        assert {rate["mode"] for rate in rates} == {"direct"}, "nothing is to be chosen but the number"
        assert f"measured: direct {best(rates, mode='direct') / 1e9:.2f} GB/s" in io["reason"]
    assert f"reads: buffered, {io['in_flight']} in flight by {io['threads']} threads" in line
    assert io["reason"] in line


def test_what_exceeds_memory_is_read_directly_unless_that_is_far_slower(too_big: Path, tmp_path: Path) -> None:
    with LlamaServer(too_big, tmp_path / "log", "--moe-slots", "1") as server:
        stats, line = server.stats(), start_line(server)
        begin, end = expert_runs(too_big)[-1]
        assert not any(cached_pages(too_big)[max(begin, end - 2**30) // PAGE : end // PAGE])
    io = stats["io"]
    rates = io["probe"]["rates"]
    assert re.search(r"[\d.]+ GiB of experts exceed the [\d.]+ GiB available", io["reason"])
    direct, buffered = best(rates, mode="direct"), best(rates, mode="buffered")
    assert direct
    assert io["mode"] == ("buffered" if buffered > 1.5 * direct else "direct")
    assert ("buffered reads are much faster" in io["reason"]) == (io["mode"] == "buffered")
    assert f"reads: {io['mode']}, {io['in_flight']} in flight" in line
    assert io["in_flight"] in (2, 4, 8)


@pytest.mark.parametrize(("arguments", "note"), [
    (("--moe-io", "direct"), "--moe-io says how to read"),
    (("--moe-io-threads", "3"), "nothing is left to choose"),
], ids=" ".join)  # fmt: skip
def test_settings_that_leave_no_choice_skip_the_measurement(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], note: str
) -> None:
    with LlamaServer(model, tmp_path / "log", "--moe-slots", "8", *arguments) as server:
        assert server.stats()["io"]["probe"] == {"note": note, "rates": []}


def test_few_experts_are_not_measured(demo: Path, tmp_path: Path) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "8") as server:
        assert server.stats()["io"]["probe"] == {"note": "the experts are few", "rates": []}


def test_the_documented_fields() -> None:
    part = DOC.read_text().split("### In each of `io.probe.rates`")[1].split("###")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == FIELDS_OF_A_RATE


def forbid_uring() -> None:
    """As container runtimes do: a filter under which io_uring_setup fails with EPERM."""
    io_uring_setup = 425  # on every architecture
    rules = ((0x20, 0, 0, 0), (0x15, 0, 1, io_uring_setup), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, errno.errorcode[ctypes.get_errno()]  # PR_SET_SECCOMP


@pytest.mark.skipif(platform.system() != "Linux", reason="seccomp")
@pytest.mark.parametrize(("backend", "told"), [("uring", True), ("auto", False)])
def test_a_kernel_without_io_uring_reads_by_threads(demo: Path, tmp_path: Path, backend: str, told: bool) -> None:
    done = subprocess.run(
        [tool("llama-results"), "-m", demo, "-o", tmp_path / "out.gguf", "-p", "The command", "-c", "64", "-t", "1", "--moe-slots", "8",
         "--moe-io", "buffered", "--moe-io-backend", backend],
        env=environment(), capture_output=True, text=True, preexec_fn=forbid_uring, timeout=60, check=True,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "reads: buffered, 4 in flight by 4 threads (as asked" in output
    assert ("no io_uring: io_uring_setup failed: Operation not permitted" in output) == told
