"""The arithmetic and the sides of bench/cuda.py, without a card."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from bench import cuda
from moestream.errors import MoestreamError

STATS = {
    "gpu_path": {"in_force": "mailbox", "reason": ""},
    "totals": {"hits": 300, "misses": 100, "bytes_from_ram": 5000, "tokens_decode": 50, "guess_hits": 40, "guesses": 50},
    "memory": {"ram_bytes": 3 << 30, "bounce_bytes": 1 << 29},
}


def test_sides() -> None:
    sides = {s.name: s for s in cuda.sides_for(["32", "all"], 16)}
    assert sides["stock, -ncmoe 99"].args == ("-ncmoe", "99", "-t", "16", "-lm", "none")
    assert sides["32 slots"].args == ("-t", "8", "--moe-slots", "32", *cuda.WARM)
    assert sides["all slots"].args == ("-t", "8", "--moe-slots", "all")  # filled while loading
    assert [s.name for s in sides.values() if s.prompts] == [
        "stock, all on the card",
        "stock, -ncmoe 99",
        "stock, mapped",
        "32 slots",
        "all slots",
    ]


def test_some_of_the_sides() -> None:
    sides = cuda.sides_for(["32", "all"], 16)

    def names(*parts: str) -> list[str]:
        return [s.name for s in cuda.chosen(sides, parts)]

    assert names() == [s.name for s in sides]
    assert names("32 slots", "-ncmoe 99") == ["stock, -ncmoe 99", "32 slots"], "a whole name is no part of others"
    assert names("prefetch", "drive") == ["32 slots, no prefetch", "32 slots, from the drive"]


def test_medians_in_order_of_first_appearance() -> None:
    runs = [
        cuda.Run("b", {"tg128": 10.0, "pp512": 100.0}, 500, None),
        cuda.Run("a", {"tg128": 1.0}, 900, STATS),
        cuda.Run("b", {"tg128": 30.0, "pp512": 300.0}, 700, None),
        cuda.Run("a", {"tg128": 4.0}, 800, STATS),
        cuda.Run("a", {"tg128": 2.0}, 850, STATS),
    ]
    b, a = cuda.summarise(runs)
    assert (b["side"], b["tok_per_s"], b["card_mib"]) == ("b", {"tg128": 20.0, "pp512": 200.0}, 700)
    assert a["tok_per_s"] == {"tg128": 2.0} and a["hit_rate"] == 0.75 and a["from_ram_bytes_per_token"] == 100.0
    assert cuda.table([b, a]).splitlines() == [
        "| | tg128 | pp512 | card, MiB | hits | page-locked, GiB |",
        "| --- | --- | --- | --- | --- | --- |",
        "| b | 20.0 | 200.0 | 700 |  |  |",
        "| a | 2.0 |  | 900 | 75.0 % | 3.5 |",
    ]


def program(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_logits_that_differ_end_it(tmp_path: Path) -> None:
    ok = "ok T=1 slots=32/128\nok T=8 slots=32/128\nok T=128 slots=32/128"
    assert len(cuda.identity(program(tmp_path, f"printf '{ok}\\n'"), Path("m"), "32")) == 3
    for said in (ok.replace("ok T=8", "FAIL T=8"), "ok T=1 slots=32/128", ""):
        with pytest.raises(MoestreamError, match="logits were not shown to be equal"):
            cuda.identity(program(tmp_path, f"printf '{said}\\n'"), Path("m"), "32")


def test_the_last_repetition_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "smi", lambda query: "77")
    lines = [{"n_prompt": 512, "n_gen": 0, "samples_ts": [1.0, 2.0]}, {"n_prompt": 0, "n_gen": 128, "samples_ts": [3.0, 4.0]}]
    text = (
        "".join(f"echo '{json.dumps(line)}'\n" for line in lines)
        + f"echo '{json.dumps(STATS)}' > $MOESTREAM_STATS_FILE\nsleep 0.6"
    )
    a = Namespace(prompts=[512], tokens=128, timeout_s=30)
    run = cuda.measure(program(tmp_path, text), Path("m.gguf"), cuda.Side("32 slots", ()), a)
    assert run.tok_per_s == {"pp512": 2.0, "tg128": 4.0} and run.stats == STATS and run.card_mib == 77
    with pytest.raises(MoestreamError, match=r"llama-bench \(32 slots\) ended with 3: no such card"):
        cuda.measure(program(tmp_path, "echo no such card >&2; exit 3"), Path("m.gguf"), cuda.Side("32 slots", ()), a)
