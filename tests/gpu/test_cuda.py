"""Slots in the memory of an NVIDIA card: the same bits, what is in force, what is refused, and batches that fail.

Skipped where no card can be seen. With one, engines are needed that have the test programs: ``make test-gpu`` builds them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import prove
import pytest
from fixture_models import run
from fixture_variants import make_mtp

from moestream import nvidia_smi
from moestream.errors import MoestreamError
from moestream.upstream import cuda, engines
from moestream.upstream.build import find_cuda_compiler

MIB = 1 << 20


def why_not() -> str:
    try:
        cuda.architectures([])
    except MoestreamError as error:
        return f"needs a GPU: {error.message}"
    return ""


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
N_CARDS = 0 if WHY_NOT else len(nvidia_smi.ask("name", timeout_s=60).rows)
# Of the toolkit that compiles the engine; an engine that was downloaded needs no toolkit.
NVCC = find_cuda_compiler()[0]
SANITIZER = shutil.which("compute-sanitizer") or (NVCC and shutil.which("compute-sanitizer", path=str(Path(NVCC).parent)))


def tool(name: str) -> Path:
    return engines.in_use("cuda").tool(name)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **prove.STRICT, **more}


@pytest.mark.parametrize(
    ("slots", "flags"),
    [
        ("used,used+25,used+42,all", ()),
        ("used,used+25,used+42", ("--moe-prefetch", "on", "--moe-warm", "9")),
        ("used,used+25,used+42", ("--moe-prefetch", "on", "--moe-ram", "1MiB")),
        ("used,used+25", ("--moe-ram", "none", "--moe-io", "direct")),
        ("used,used+25,all", ("--moe-gpu-path", "copy")),
        ("used,used+25,all", ("--moe-gpu-path", "copy", "--moe-io", "direct", "--moe-io-backend", "uring")),
        ("used,used+25,all", ("--moe-pool", "host")),
        ("used,used+25", ("--moe-policy", "lfu", "--moe-warm", "9")),
    ],
)
@pytest.mark.parametrize("sequences", [1, 4])
def test_the_same_bits(demo: Path, slots: str, flags: tuple[str, ...], sequences: int) -> None:
    arguments = ("--gpu-layers", "99", "--ubatch", "1,4,8,10,80", "--tokens", "160", "--sequences", str(sequences))
    done = run(tool("moe-identity"), "-m", demo, "--slots", slots, *arguments, *flags, env=environment())
    found = prove.parse(done.stdout, "demo", sequences, "")
    assert [c.verdict for c in found] == ["ok"] * 5 * len(slots.split(",")), done.stdout
    for c in found:
        if c.slots == 64 and not flags:
            assert (c.via_slots, c.via_staging) == (0, 0), c  # all experts are in their places
            continue
        # a card takes as many tokens through slots as its kernels look at one by one, and as there are slots for
        through_slots = c.ubatch <= 8 and (c.ubatch * 6 <= c.slots or c.slots == 64)
        assert (c.via_slots, c.via_staging) == ((160, 0) if through_slots else (0, 160)), c


def test_ten_thousand_tokens_with_a_slow_host(demo: Path) -> None:
    """Slabs for no more than a request needs, so that the host is asked all the time; it answers late, and what gives way is poisoned."""
    flags = ("--slots", "used+3", "--ubatch", "1", "--tokens", "10000", "--moe-ram", "none", "--moe-prefetch", "on")
    done = run(tool("moe-identity"), "-m", demo, "--gpu-layers", "99", *flags, env=environment(MOESTREAM_ANSWER_DELAY_US="100"))
    (found,) = prove.parse(done.stdout, "demo", 1, "")
    assert (found.verdict, found.via_slots) == ("ok", 10000), done.stdout
    assert found.misses > 10000


def test_a_host_that_never_answers_is_an_error_and_no_hang(demo: Path) -> None:
    arguments = (
        "-p",
        "Once upon a time",
        "-n",
        "4",
        "-no-cnv",
        "-c",
        "256",
        "-ngl",
        "99",
        "--moe-slots",
        "8",
        "--device",
        "CUDA0",
    )
    env = environment(MOESTREAM_MUTE="1", MOESTREAM_ANSWER_TIMEOUT_MS="300")
    done = run(tool("llama-completion"), "-m", demo, *arguments, "-ub", "1", env=env, ok=False)
    assert done.returncode != 0
    assert "the host did not bring expert" in done.stderr and "hint: --moe-gpu-path copy" in done.stderr


@pytest.mark.skipif(not SANITIZER, reason="needs compute-sanitizer of the CUDA toolkit")
def test_memcheck(demo: Path) -> None:
    """Slots that have never held anything, and a device so slow that its threads come in any order."""
    check = (SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
    arguments = ("--gpu-layers", "99", "--slots", "used,used+9", "--ubatch", "1,6", "--tokens", "12", "--moe-prefetch", "on")
    done = run(*check, tool("moe-identity"), "-m", demo, *arguments, env=environment(), ok=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [c.verdict for c in prove.parse(done.stdout, "demo", 1, "")] == ["ok"] * 4
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_contexts_in_turn_and_at_once(demo: Path) -> None:
    done = run(tool("moe-replay"), "-m", demo, "--gpu-layers", "99", "--slots", "used,used+10", env=environment())
    seed, calls, *lines = done.stdout.splitlines()
    assert seed.startswith("seed ") and calls.startswith("calls ") and len(lines) == 6, done.stdout
    assert all(line.startswith("ok ") for line in lines), done.stdout


@pytest.mark.parametrize("layout", ["glm4moe", "qwen35moe"])
def test_a_head_that_predicts_the_token_after_next(model: Callable[[str, str], Path], disk_folder: Path, layout: str) -> None:
    """Its drafts and hidden states, and the model's, bit for bit; the head is layer 4, behind 0 to 3, with slots of its own."""
    made = make_mtp(layout, model, disk_folder)
    done = run(tool("moe-mtp"), "-m", made, "--gpu-layers", "99", "--steps", "20", env=environment(), ok=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert len(lines) == 3 and all(line.startswith("ok ") and "last_layer=4" in line for line in lines), done.stdout


@pytest.mark.parametrize("path", ["mailbox", "copy"])
def test_batches_that_failed(demo: Path, tmp_path: Path, path: str) -> None:
    """The caller gets the right logits again, in each way that it has to go on."""
    copy = tmp_path / "demo.gguf"
    shutil.copyfile(demo, copy)
    ram = ("--moe-ram", "none") if path == "mailbox" else ()
    flags = ("--gpu-layers", "99", "--slots", "used", "--moe-gpu-path", path, *ram)
    done = run(tool("moe-failed-batch"), "-m", copy, *flags, env=environment(), ok=False)
    scenes = [f"ok {scene} {way} " for scene in ("token", "ubatch", "two-ubatches") for way in ("again", "clear", "restore")]
    seed, *lines = done.stdout.splitlines()
    assert seed.startswith("seed ") and len(lines) == 1 + len(scenes), done.stdout + done.stderr
    for line, begin in zip(lines, ["ok first ", *scenes], strict=True):
        assert line.startswith(begin), done.stdout


# Layers are on two cards only where there are two: one card cannot stand for them, and CI and most machines have none or one.
@pytest.mark.skipif(not WHY_NOT and N_CARDS < 2, reason="needs two cards")
@pytest.mark.parametrize("flags", [(), ("--moe-prefetch", "on"), ("--moe-gpu-path", "copy")])
def test_layers_on_two_cards(demo: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Each layer's slots are on the card that computes it."""
    arguments = ("--gpu-layers", "99", "--slots", "used,used+25,all", "--ubatch", "1,8,80", "--tokens", "160")
    done = run(tool("moe-identity"), "-m", demo, *arguments, *flags, env=environment())
    assert [c.verdict for c in prove.parse(done.stdout, "demo", 1, "")] == ["ok"] * 9, done.stdout
    stats = in_force(demo, tmp_path, "--moe-slots", "16", "-ngl", "99", "--device", "CUDA0,CUDA1", *flags)
    assert re.fullmatch(r"CUDA0 \(\d layers\), CUDA1 \(\d layers\)", stats["placement"]), stats["placement"]


def in_force(demo: Path, tmp_path: Path, *flags: str) -> dict:
    stats = tmp_path / "stats.json"
    arguments = ("-p", "Once upon a time", "-n", "12", "--temp", "0", "-no-cnv", "-c", "512")
    run(tool("llama-completion"), "-m", demo, *arguments, *flags, env=environment(MOESTREAM_STATS_FILE=str(stats)))
    return json.loads(stats.read_text())


def fails(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """One token on the first card, of a run that is to fail."""
    brief = ("--device", "CUDA0", "-fit", "off", "-p", "x", "-n", "1", "-no-cnv")
    return run(tool("llama-completion"), "-m", model, *brief, *flags, ok=False)


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        (("-ngl", "99"), "CUDA0"),
        (("-ngl", "99", "--cpu-moe"), "cpu"),
        (("-ngl", "99", "-ncmoe", "3"), "CUDA0 (5 layers), cpu (3 layers)"),
        (("-ngl", "5"), "CUDA0 (4 layers), cpu (4 layers)"),
        (("-ngl", "0"), "cpu"),
    ],
)
def test_what_is_in_force_is_reported(demo: Path, tmp_path: Path, flags: tuple[str, ...], placement: str) -> None:
    stats = in_force(demo, tmp_path, "--moe-slots", "16", "--device", "CUDA0", *flags)
    assert stats["placement"] == placement
    memory = stats["memory"]
    assert memory["pool_bytes"] == 16 * 8 * 3 * 96 * 384 * 18 // 32
    assert stats["totals"]["tokens_decode"] > 0 and stats["totals"]["read_errors"] == 0
    assert (stats["gpu_path"] or {}).get("in_force") == ("mailbox" if "CUDA0" in placement else None)
    if placement == "CUDA0":
        assert memory["device_bytes"] >= memory["pool_bytes"] + memory["staging_bytes"] + memory["kv_bytes"]
    if flags == ("-ngl", "0"):
        assert memory["device_bytes"] < 64 * MIB  # no weights; upstream reserves a compute buffer all the same


def test_auto_takes_what_the_card_has(demo: Path, tmp_path: Path) -> None:
    stats = in_force(demo, tmp_path, "--moe-slots", "auto", "-ngl", "99", "--device", "CUDA0")
    assert (stats["slots"], stats["slots_requested"], stats["placement"]) == (64, "auto", "CUDA0")
    assert stats["gpu_path"]["in_force"] == "resident"
    assert stats["memory"]["staging_bytes"] == stats["memory"]["ram_bytes"] == 0


@pytest.mark.parametrize(
    ("flags", "path", "reason"),
    [
        ((), "mailbox", ""),
        (("--moe-gpu-path", "mailbox"), "mailbox", "as asked"),
        (("--moe-gpu-path", "copy"), "copy", "as asked"),
        (("--moe-policy", "heat"), "copy", "--moe-policy heat"),
        (("--moe-pool", "host"), "copy", "--moe-pool host"),
    ],
)
def test_who_looks_after_the_slots(demo: Path, tmp_path: Path, flags: tuple[str, ...], path: str, reason: str) -> None:
    stats = in_force(demo, tmp_path, "--moe-slots", "16", "-ngl", "99", "--device", "CUDA0", *flags)
    assert stats["gpu_path"] == {"in_force": path, "reason": reason}
    assert (stats["memory"]["ram_bytes"] > 0) == (path == "mailbox")
    assert stats["ram_requested"] == ("default" if path == "mailbox" else "none")


def test_memory_that_cannot_be_locked(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CUDA_NO_PINNED", "1")
    stats = in_force(demo, tmp_path, "--moe-slots", "16", "-ngl", "99", "--device", "CUDA0")
    assert stats["gpu_path"] == {"in_force": "copy", "reason": "the memory for it cannot be locked"}
    done = fails(demo, "-ngl", "99", "--moe-slots", "16", "--moe-ram", "8MiB")
    assert done.returncode == 1
    assert "--moe-ram: the memory for it cannot be locked; hint: a smaller --moe-ram" in done.stderr


def test_a_bounded_ram_tier_is_bounded(demo: Path, tmp_path: Path) -> None:
    stats = in_force(demo, tmp_path, "--moe-slots", "8", "-ngl", "99", "--device", "CUDA0", "--moe-ram", "12MiB", "-ub", "1")
    assert stats["memory"]["ram_bytes"] <= 12 * MIB
    assert stats["totals"]["bytes_read"] > 0 and stats["totals"]["bytes_from_ram"] > 0
    assert stats["totals"]["misses"] > stats["totals"]["ram_hits"]


def test_all_experts_on_the_card_may_be_required(demo: Path, tmp_path: Path) -> None:
    stats = in_force(demo, tmp_path, "--moe-slots", "16", "-ngl", "99", "--device", "CUDA0", "--moe-require-gpu", "on")
    assert stats["placement"] == "CUDA0"


REFUSED = {
    "auto for some layers": (["--moe-slots", "auto", "-ngl", "4"], "--moe-slots auto cannot share memory out between CUDA0 and other places; hint: --moe-slots N"),
    "auto and a context too large": (["--moe-slots", "auto", "-ngl", "99", "-c", "100000000"], "--moe-slots auto: 6 slots a layer, the fewest there can be, take"),
    "ring": (["--moe-slots", "8", "-ngl", "99", "--moe-staging", "ring"], "--moe-staging ring is for experts on the cpu, these are on CUDA0; hint: --moe-staging full, or --cpu-moe"),
    "RAM tier": (["--moe-slots", "8", "-ngl", "99", "--moe-gpu-path", "copy", "--moe-ram", "64MiB"], "--moe-ram: the slots on CUDA0 are looked after by the host (as asked), which has no RAM tier below them"),
    "prefetch": (["--moe-slots", "8", "-ngl", "99", "--moe-gpu-path", "copy", "--moe-prefetch", "on"], "--moe-prefetch on is for experts on the cpu, these are on CUDA0"),
    "mailbox and another policy": (["--moe-slots", "8", "-ngl", "99", "--moe-gpu-path", "mailbox", "--moe-policy", "heat"], "--moe-gpu-path mailbox is not possible: --moe-policy heat"),
    "some layers on the cpu": (["--moe-slots", "8", "-ngl", "5", "--moe-require-gpu", "on"], "--moe-require-gpu: the experts of 4 of 8 layers would be computed on the cpu"),
    "two places": (["--moe-slots", "8", "-ngl", "99", "-ot", "ffn_gate_exps=CPU"], "the experts of layer 0 are in two places, 'blk.0.ffn_gate_exps.weight' on MoE_Pool and 'blk.0.ffn_up_exps.weight' on MoE_Pool_CUDA0"),
    "split-mode row": (["--moe-slots", "8", "-ngl", "99", "--split-mode", "row"], "--moe-slots cannot be combined with --split-mode row"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(demo: Path, name: str) -> None:
    flags, message = REFUSED[name]
    done = fails(demo, *flags)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr


def test_a_card_without_memory_for_the_slots_says_so(demo: Path, tmp_path: Path) -> None:
    """900 MB of slots on a card of which somebody else holds all but 700."""
    big = tmp_path / "big.gguf"
    shape = "--layers 8 --experts 512 --used 2 --d-model 256 --d-ff 512 --heads 4 --kv-heads 2 --d-head 64"
    run("python3", str(prove.ROOT / "bench" / "synthetic.py"), *shape.split(), str(big))
    hog = (
        "import torch; free, total = torch.cuda.mem_get_info(); keep = torch.empty(int(free - 700 * 2**20), dtype=torch.uint8, device='cuda');"
        "print('held', flush=True); input()"
    )
    pytest.importorskip("torch")
    with subprocess.Popen(["python3", "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            done = fails(big, "-ngl", "99", "--moe-slots", "512", "-c", "256")
        finally:
            holder.kill()
    assert done.returncode != 0
    assert "on CUDA0 for expert slots and staging; hint: fewer slots" in done.stderr
