"""The pure parts of ``moestream verify``: what is compared with what, and where logits part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import psutil
import pytest

from moestream import gguf_facts, paths
from moestream.commands import verify
from moestream.errors import MoestreamError
from moestream.verify import compare, memory, plan, results

GIB = 1 << 30


def write(path: Path, values: Any, tokens: Any = (7, 8, 9)) -> Path:
    """As llama-results does: the shape the wrong way round, the values token by token."""
    writer = gguf.GGUFWriter(path, "x")
    values = np.array(values, dtype=np.float32)
    writer.add_tensor("tokens", np.array(tokens, dtype=np.int32))
    writer.add_tensor("logits", values.reshape(values.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LOGITS = [[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]]


def test_equal(tmp_path: Path) -> None:
    a, b = (compare.read(write(tmp_path / name, LOGITS)) for name in "ab")
    assert (a.n_tokens, a.values.shape) == (3, (3, 2))
    assert compare.first_difference(a, b) is None
    assert a.says_something()


@pytest.mark.parametrize(("value", "bits", "max_abs", "n_choices"), [
    (-0.0, "0x80000000", 0.0, 0),
    (np.nextafter(np.float32(0), np.float32(1)), "0x00000001", pytest.approx(1.4e-45, rel=0.01), 0),
    (4.0, "0x40800000", 4.0, 1),
    (np.nan, "0x7fc00000", None, 1),
])  # fmt: skip
def test_one_logit_differs(tmp_path: Path, value: float, bits: str, max_abs: Any, n_choices: int) -> None:
    other = [list(row) for row in LOGITS]
    other[1][1] = value
    want, got = compare.read(write(tmp_path / "a", LOGITS)), compare.read(write(tmp_path / "b", other))
    found = compare.first_difference(want, got)
    assert found is not None
    assert (found.position, found.token, found.vocab) == (1, 8, 1)
    assert (found.expected, found.expected_bits, found.got_bits) == (0.0, "0x00000000", bits)
    assert (found.n_different, found.n_logits, found.max_abs, found.n_choices) == (1, 6, max_abs, n_choices)


def test_a_nan_with_the_same_bits_is_equal_and_says_nothing(tmp_path: Path) -> None:
    a = compare.read(write(tmp_path / "a", [[np.nan, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert compare.first_difference(a, a) is None
    assert not a.says_something()
    assert not compare.read(write(tmp_path / "b", [[1.0, 1.0], [3.0, 4.0], [5.0, 6.0]])).says_something()


def test_other_texts_are_not_compared(tmp_path: Path) -> None:
    a = compare.read(write(tmp_path / "a", LOGITS))
    for b in (write(tmp_path / "b", LOGITS, (7, 8, 0)), write(tmp_path / "c", LOGITS[:2], (7, 8))):
        with pytest.raises(MoestreamError, match="different tokens: 3 and"):
            compare.first_difference(a, compare.read(b))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + bytes(16)])
def test_no_logits(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(MoestreamError, match="no logits that can be read"):
        compare.read(tmp_path / "a")


@pytest.mark.parametrize(("asked", "available", "kind"), [
    ("auto", 20 * GIB, "loaded"), ("auto", 16 * GIB, "mapped"), ("loaded", GIB, "loaded"), ("mapped", 20 * GIB, "mapped"),
])  # fmt: skip
def test_reference(asked: str, available: int, kind: str) -> None:
    side = plan.choose_reference(asked, 16 * GIB, available)
    assert side.kind == kind
    assert side.kernel_args == (("--no-repack",) if kind == "mapped" else ())
    assert f"{available / GIB:.1f} GiB are available" in side.reason


def test_memory_is_what_the_cgroups_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    (tmp_path / "proc/self").mkdir(parents=True)
    outer, inner = tmp_path / "sys/fs/cgroup/a", tmp_path / "sys/fs/cgroup/a/b"
    inner.mkdir(parents=True)
    assert memory.available_bytes(tmp_path) == 10_000  # no cgroups
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for folder, limit in ((outer, "5000"), (inner, "max")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("4000")
        (folder / "memory.stat").write_text("anon 1000\nactive_file 100\ninactive_file 2000\n")
    assert memory.available_bytes(tmp_path) == 5000 - (4000 - 2100)
    (inner / "memory.max").write_text("2000")
    assert memory.available_bytes(tmp_path) == 100
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/gone\n0::/\n")
    first = tmp_path / "sys/fs/cgroup/memory"
    first.mkdir()
    (first / "memory.limit_in_bytes").write_text(str(1 << 63))
    (first / "memory.usage_in_bytes").write_text("4000")
    assert memory.available_bytes(tmp_path) == 10_000
    (first / "memory.limit_in_bytes").write_text("6000")
    (first / "memory.stat").write_text("total_active_file 1500\ntotal_inactive_file 0\n")
    assert memory.available_bytes(tmp_path) == 3500


def test_slots() -> None:
    facts = gguf_facts.read(paths.demo_model())
    assert verify.slot_counts(facts, None) == ["6", "24"]
    assert verify.slot_counts(facts, "8, 8,all,AUTO") == ["8", "all", "auto"]
    for bad in ("5", "65", "off", "map", "8,", "x"):
        with pytest.raises(MoestreamError, match="--slots"):
            verify.slot_counts(facts, bad)


def test_arguments_after_the_dashes() -> None:
    assert plan.split_extra(["--threads", "2", "--moe-io", "direct", "-fa", "off"]) == (
        ("--threads", "2", "-fa", "off"),
        ("--moe-io", "direct"),
    )
    for bad, hint in (
        (["--moe_slots", "3"], "use --slots"),
        (["-ub", "3"], "leave out -ub"),
        (["--moe-ram"], "--moe-ram VALUE"),
    ):
        with pytest.raises(MoestreamError) as caught:
            plan.split_extra(bad)
        assert caught.value.hint is not None and caught.value.hint.startswith(hint)


def test_text_is_cut_between_words() -> None:
    assert plan.cut("one two three", 9) == "one two"
    assert plan.cut("one two three", 7) == "one two"
    assert plan.cut("one two three", 99) == "one two three"
    assert plan.cut("川の水が増える", 3) == "川の水"
    assert plan.room("a" * 248) == 256 and plan.room("é" * 125) == 512


def row(count: str, width: int, **more: Any) -> dict[str, Any]:
    return {"slots_requested": count, "width": width, "scarce": True, "misses": 9, "evictions": 3,
            "tokens_decode": 20 if width < 20 else 0, "tokens_prefill": 20 if width == 20 else 0, **more}  # fmt: skip


ROWS = [row("6", width) for width in (4, 20, 1)]


@pytest.mark.parametrize(("rows", "why"), [
    (ROWS, None),
    ([*ROWS, *(row("all", width, scarce=False, evictions=0, tokens_prefill=0) for width in (4, 20, 1))], None),
    ([row("all", width, scarce=False, evictions=0) for width in (4, 20, 1)], "every expert had a slot"),
    ([*ROWS[:2], row("6", 1, evictions=0)], "no expert lost its slot with 6 slots"),
    ([*ROWS[:2], row("6", 1, tokens_decode=0)], "no token went through slots"),
    ([ROWS[0], row("6", 20, tokens_prefill=0), ROWS[2]], "20 tokens at once did not go through staging"),
    ([ROWS[0], row("6", 20, misses=0), ROWS[2]], "no expert was read"),
])  # fmt: skip
def test_what_equal_bits_prove(rows: list[dict[str, Any]], why: str | None) -> None:
    found = verify._proven(rows, 20)
    assert found["verdict"] == ("not proven" if why else "equal")
    assert why is None or why in found["why"]


def test_failures_in_the_programs_own_words() -> None:
    error = results.failure(
        "6 slots", 1, "x\nllama: error loading model: no room; hint: --moe-slots 6 or a smaller context (-c)\n"
    )
    assert (error.message, error.hint) == ("6 slots: no room", "--slots 6 or a smaller context (--ctx)")
    error = results.failure("6 slots", -9, "")
    assert "was killed (SIGKILL)" in error.message and "uses too much memory" in (error.hint or "")
    assert (
        results.failure("6 slots", -11, "a\n").message
        == "6 slots: llama-results was ended by SIGSEGV; its last lines were:\n  a"
    )
