"""``moestream verify`` with the demo model: equal, and every way in which it must not say so."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixture_models import expert_ranges, tool
from llama_server import environment
from waiting import until

from moestream import gguf_facts
from moestream.upstream import engines

FEW = ("--tokens", "16")


def command(*arguments: str | Path) -> list[str]:
    """One thread, unless it says otherwise: two that spin are slow where tests share a machine."""
    threads = [] if "--" in arguments else ["--", "--threads", "1"]
    return [sys.executable, "-m", "moestream.cli", "verify", *map(str, arguments), *threads]


def settings(home: Path | None = None, **more: str) -> dict[str, str]:
    """The environment, with another MOESTREAM_HOME."""
    kept = {k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"}
    return environment({**kept, **({"MOESTREAM_HOME": str(home)} if home else {}), **more})


def verify(*arguments: str | Path, code: int = 0, home: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, stdin=subprocess.DEVNULL, env=settings(home, **more), timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert ("equal: all" in done.stdout) == (code == 0 and "--json" not in arguments)
    return done


def error(done: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in done.stderr.splitlines() if line.startswith("error: "))


def damage(model: Path, tensor: int) -> None:
    """Give the experts of the second half of an expert tensor the weights of the first half: sound numbers, and the wrong ones."""
    first, end = expert_ranges(model)[tensor]
    half = (end - first) // 2
    with model.open("r+b") as file:
        file.seek(first)
        weights = file.read(half)
        file.write(weights)


@pytest.fixture
def engine_with(tmp_path: Path) -> Callable[[str], Path]:
    """``engine_with(script)``: a home whose engine is the one in use, but for llama-results, which is this shell script; ``$REAL`` is
    the program itself."""

    def make(script: str) -> Path:
        engine = engines.in_use("cpu")
        folder = tmp_path / "home" / "data" / "engines" / engine.id
        (folder / "bin").mkdir(parents=True)
        (folder / "engine.json").write_bytes((engine.path / "engine.json").read_bytes())
        program = folder / "bin" / "llama-results"
        program.write_text(f"#!/bin/sh\nREAL={tool('llama-results')}\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "home"

    return make


def test_equal(demo: Path) -> None:
    # settings for other programs must not make the reference stream
    done = verify(demo, *FEW, "--json", LLAMA_ARG_MOE_SLOTS="8")
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["schema"], found["verdict"], found["difference"]) == ("moestream/verify/1", "equal", None)
    assert (found["reference"]["kind"], found["text"]) == ("loaded", None)
    rows = found["comparisons"]
    n = found["tokens"]
    assert 16 <= n <= 32
    assert found["widths"] == [4, n, 1]
    assert [(row["slots"], row["width"]) for row in rows] == [(s, w) for w in (4, n, 1) for s in (6, 24)]
    assert all(row["equal"] and row["scarce"] and row["misses"] for row in rows)
    assert all(row["evictions"] > 0 and row["tokens_decode"] == n for row in rows if row["width"] == 1)
    assert all(row["tokens_prefill"] == n for row in rows if row["width"] == n)
    assert found["logits"] == 6 * n * gguf_facts.read(demo).n_vocab
    assert "1/9 without streaming, 4 tokens at a time" in done.stderr
    assert "9/9 24 slots, 1 token at a time" in done.stderr


def test_mapped_with_a_text_and_the_engines_flags(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("A harbor is a place where ships wait for the tide, and for the pilots.")
    done = verify(
        demo, "--file", tmp_path / "t", *FEW, "--reference", "mapped", "--slots", "6", "--", "--moe-staging", "ring", "-t", "2"
    )
    assert "without streaming, the file mapped, plain kernels" in done.stdout
    assert "equal: all" in done.stdout


def test_a_damaged_expert_is_found(demo: Path, demo_copy: Path, engine_with: Callable[[str], Path]) -> None:
    damage(demo_copy, 3)
    home = engine_with(
        f'case " $* " in *" --moe-slots "*) ;; *) exec "$REAL" "$@";; esac\n'
        f'shift 2; exec "$REAL" -m {demo_copy} "$@"'
    )  # fmt: skip
    done = verify(demo, *FEW, "--json", code=3, home=home)
    found = json.loads(done.stdout)
    where = found["difference"]
    assert found["verdict"] == "different"
    assert (where["slots"], where["width"], where["layer"], where["expert"]) == ("6", 4, None, None)
    assert 0 <= where["position"] < found["tokens"]
    assert where["expected_bits"] != where["got_bits"]
    assert 0 < where["n_different"] <= where["n_logits"]
    assert [row["equal"] for row in found["comparisons"]] == [False]
    assert "streamed logits differ, 6 slots, 4 tokens at a time" in error(done)


def test_an_expert_that_changed_in_memory_is_named(demo: Path, demo_copy: Path, engine_with: Callable[[str], Path]) -> None:
    damage(demo_copy, 0)
    # what the engine says with MOESTREAM_CHECK=1, as tests of the engine itself provoke it
    home = engine_with(
        f'if [ -n "$MOESTREAM_CHECK" ]; then echo "moestream: layer 5: slot 3 changed while it held expert 17" >&2; exit 1; fi\n'
        f'case " $* " in *" --moe-slots "*) shift 2; exec "$REAL" -m {demo_copy} "$@";; esac\n'
        f'exec "$REAL" "$@"'
    )  # fmt: skip
    done = verify(demo, *FEW, code=3, home=home)
    assert "the first difference: 6 slots, 4 tokens at a time, behind token " in done.stdout
    assert "expert 17 of layer 5 changed while it was in memory" in done.stdout


def test_a_machine_that_is_not_sure_of_itself(
    demo: Path, demo_copy: Path, engine_with: Callable[[str], Path], tmp_path: Path
) -> None:
    damage(demo_copy, 0)
    # without streaming, the first time alone, another model
    home = engine_with(
        f'if [ ! -e {tmp_path}/done ]; then touch {tmp_path}/done; shift 2; exec "$REAL" -m {demo_copy} "$@"; fi\n'
        f'exec "$REAL" "$@"'
    )  # fmt: skip
    done = verify(demo, "--tokens", "97", code=4, home=home)
    assert "this machine gives other logits each time" in error(done)


@pytest.mark.parametrize(("slots", "why"), [
    ("all", "every expert had a slot, and none lost it"),
    ("63", "no expert lost its slot with 63 slots"),
])  # fmt: skip
def test_nothing_is_proven(demo: Path, slots: str, why: str) -> None:
    assert why in error(verify(demo, *FEW, "--slots", slots, code=4))


def test_a_killed_program(demo: Path, engine_with: Callable[[str], Path]) -> None:
    home = engine_with('case " $* " in *" --moe-slots "*) kill -9 $$;; esac\nexec "$REAL" "$@"')
    done = verify(demo, *FEW, code=1, home=home)
    assert error(done) == "error: 6 slots, 4 tokens at a time: llama-results was killed (SIGKILL)"
    assert "--reference mapped" in done.stderr


def test_an_engine_that_ignores_slots(demo: Path, engine_with: Callable[[str], Path]) -> None:
    home = engine_with('case " $* " in *" --moe-slots 6 "*) exec "$REAL" "$@" --moe-slots 24;; esac\nexec "$REAL" "$@"')
    done = verify(demo, *FEW, code=1, home=home)
    assert error(done) == "error: 6 slots, 4 tokens at a time: the engine computed with 24 slots"


def test_an_engine_that_does_not_stream(demo: Path, engine_with: Callable[[str], Path]) -> None:
    home = engine_with('exec "$REAL" $(echo "$*" | sed "s/--moe-slots [^ ]*//")')
    done = verify(demo, *FEW, code=1, home=home)
    assert error(done) == "error: 6 slots, 4 tokens at a time: the engine did not stream"


def test_a_reference_that_streams(demo: Path, engine_with: Callable[[str], Path]) -> None:
    done = verify(demo, *FEW, code=1, home=engine_with('exec "$REAL" "$@" --moe-slots 24'))
    assert error(done) == "error: the reference streamed: it would be compared with itself"


def test_stopped(demo: Path, engine_with: Callable[[str], Path], tmp_path: Path) -> None:
    home = engine_with(f"echo $$ >{tmp_path}/pid; exec sleep 600")
    process = subprocess.Popen(
        command(demo), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, env=settings(home)
    )
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the program has started")
    child = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "stopped before everything was compared: nothing is proven" in err
    assert not psutil.pid_exists(child)


def test_refusals(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("Hi")
    assert "tokens, about 64 are needed" in error(verify(demo, "--file", tmp_path / "short", code=1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in error(verify(demo, "--file", tmp_path / "binary", code=1))
    assert "no such file" in error(verify(demo, "--file", tmp_path / "gone", code=1))
    assert "too few, a token of" in error(verify(demo, "--slots", "5", code=1))
    assert "the text that is built in has" in error(verify(demo, "--tokens", "4096", code=1))
    assert "no engine is built" in error(verify(demo, code=1, home=tmp_path / "empty"))
    assert error(verify(tmp_path / "gone.gguf", code=1)).startswith("error: ")


def test_a_model_without_experts(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "is not a mixture-of-experts model" in error(verify(path, code=1))
