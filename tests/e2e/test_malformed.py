"""Damaged files and what is no file: refused at once with exit code 1 and a reason, never a signal, a hang or a full load.

malformed.py makes them; what Python says of the same files is in tests/unit/test_gguf_malformed.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixture_models import split, tool
from llama_server import environment
from malformed import CASES, F32, I16, LARGE, LARGE_FILE, U16, U32, fuzzed, number, set_key, tiny, truncations
from waiting import free_port

DEADLINE_S = 10.0  # a hang; on an idle machine a refusal takes a twentieth of a second
MAX_RESIDENT_KIB = 300 * 1024  # the programs alone take some 50 MiB

ARGUMENTS = {
    "llama-server": ("--port", "1", "--no-ui", "-t", "1", "-c", "64"),
    "llama-completion": ("-p", "abc", "-n", "2", "-no-cnv", "-t", "1", "-c", "64"),
}


@dataclass(frozen=True)
class Ended:
    returncode: int
    output: str
    resident_kib: int


def peak_kib(pid: int) -> int:
    """The largest that the process was since it became its program; the kernel's accounts at its end also know what it was forked from."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) if peak else 0


def end_of(program: str, model: Path | str, log: Path, *more: str, slots: str = "4") -> Ended:
    """Run to the end, in at most DEADLINE_S."""
    command = [tool(program), "-m", model, "--moe-slots", slots, "--no-repack", *ARGUMENTS[program], *more]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment())
    end = time.monotonic() + DEADLINE_S
    resident_kib = 0
    try:
        while process.poll() is None:
            resident_kib = max(resident_kib, peak_kib(process.pid))
            assert time.monotonic() < end, f"{program} does not end: {log.read_text(errors='replace')}"
            time.sleep(0.003)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    return Ended(process.returncode, log.read_text(errors="replace"), resident_kib)


def refusal(program: str, model: Path | str, log: Path, *more: str) -> str:
    """What is said; fails unless it was refused properly."""
    ended = end_of(program, model, log, *more)
    assert ended.returncode == 1, f"ended with {ended.returncode}:\n{ended.output}"
    assert ended.resident_kib < MAX_RESIDENT_KIB
    assert "moestream: streaming" not in ended.output  # loaded after all
    return ended.output


@pytest.mark.parametrize("program", ARGUMENTS)
@pytest.mark.parametrize("name", CASES)
def test_cases(tmp_path: Path, name: str, program: str) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(CASES[name].write())
    said = CASES[name].engine
    if said is not None:
        assert said in refusal(program, model, tmp_path / "log")
    elif program == "llama-completion":
        ended = end_of(program, model, tmp_path / "log")
        assert ended.returncode == 0, ended.output


@pytest.mark.parametrize("place", truncations())
def test_truncations(tmp_path: Path, place: str) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(tiny().write()[: truncations()[place]])
    output = refusal("llama-server", model, tmp_path / "log")
    assert any(part in output for part in ("failed to read", "failed to seek", "data is not within the file bounds"))


@pytest.mark.parametrize("name", LARGE)
def test_lengths_that_fit_a_large_file(tmp_path: Path, name: str) -> None:
    """Without a look before the reader's these are allocated first, and take all memory there is."""
    model = tmp_path / "bad.gguf"
    model.write_bytes(LARGE[name].write())
    os.truncate(model, LARGE_FILE)  # a hole: takes no space
    assert (LARGE[name].engine or "failed to load model") in refusal("llama-server", model, tmp_path / "log")


@pytest.mark.parametrize("name", ["fifo", "loop", "empty", "folder", "/dev/zero", "/dev/null", "none"])
def test_no_model_files(tmp_path: Path, name: str) -> None:
    path = Path(name) if name.startswith("/") else tmp_path / f"{name}.gguf"
    match name:
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "empty":
            path.touch()
        case "folder":
            path.mkdir()
    said = {"loop": "Too many levels of symbolic links", "empty": "failed to read magic", "none": "No such file or directory"}
    for program in ARGUMENTS:
        output = refusal(program, path, tmp_path / "log")
        assert said.get(name, f"'{path}' is no regular file; hint: give the path of a .gguf file") in output


def test_no_permission(tmp_path: Path) -> None:
    model = tmp_path / "secret.gguf"
    model.write_bytes(tiny().write())
    model.chmod(0)
    if os.access(model, os.R_OK):
        model.unlink()  # whoever runs this may read anything; what has no name cannot be read either
    output = refusal("llama-server", model, tmp_path / "log")
    assert "failed to open GGUF file" in output and str(model) in output


def with_number(source: Path, key: str, kind: int, value: float, target: Path) -> Path:
    """A copy in which this key, of a kind of four bytes, has another value."""
    data = source.read_bytes()
    written = key.encode() + kind.to_bytes(4, "little")
    at = data.index(written) + len(written)
    target.write_bytes(data[:at] + number(kind, value) + data[at + 4 :])
    return target


def test_what_upstream_asserts_when_it_computes(model: Callable[[str, str], Path], tmp_path: Path) -> None:
    """llama-server computes two tokens when it starts, and that is guarded like loading."""
    bad = with_number(model("deepseek2", "f32"), "deepseek2.attention.temperature_scale", F32, 0.5, tmp_path / "bad.gguf")
    ended = end_of("llama-server", bad, tmp_path / "log")
    assert ended.returncode == 1, ended.output
    assert "moestream: cannot load the model: llama.cpp ends with" in ended.output
    assert "GGML_ASSERT(n_attn_temp_floor_scale != 0) failed" in ended.output


def test_a_rope_that_would_never_end(model: Callable[[str, str], Path], tmp_path: Path) -> None:
    bad = with_number(model("qwen35moe", "f32"), "qwen35moe.rope.dimension_count", U32, 0, tmp_path / "bad.gguf")
    said = "rope.dimension_count is 0: expected an even number from 2; hint: "
    assert said in refusal("llama-completion", bad, tmp_path / "log")


# --- splits ---


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(tiny().write())
    return split(model, tmp_path / "m")


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def u16_key(key: str, value: int) -> bytes:
    return key.encode() + U16.to_bytes(4, "little") + value.to_bytes(2, "little")


def test_the_shards_are_served(tmp_path: Path, shards: list[Path]) -> None:
    ended = end_of("llama-completion", shards[0], tmp_path / "log")
    assert ended.returncode == 0, ended.output


@pytest.mark.parametrize("damage", ["missing", "not the first", "empty", "fifo", "twice", "another's", "count", "number", "number's type"])  # fmt: skip
def test_splits(tmp_path: Path, shards: list[Path], damage: str) -> None:
    model, second = shards[0], shards[1]
    match damage:
        case "missing":
            second.unlink()
            said = f"failed to load GGUF split from {second}"
        case "not the first":
            model = second
            said = "illegal split file idx: 1"
        case "empty":
            second.write_bytes(b"")
            said = f"failed to load GGUF split from {second}"
        case "fifo":
            second.unlink()
            os.mkfifo(second)
            said = f"'{second}' is no regular file"
        case "twice":
            second.write_bytes(shards[2].read_bytes())
            said = "invalid split file idx: 2"
        case "another's":
            g = tiny()
            set_key("split.no", U16, 1)(g)
            second.write_bytes(g.write())
            said = "is duplicated"
        case "count":
            rewrite(model, u16_key("split.count", 3), u16_key("split.count", 65535))
            said = "invalid split file name"
        case "number":
            rewrite(second, u16_key("split.no", 1), u16_key("split.no", 65535))
            said = "invalid split file idx: 65535"
        case _:
            rewrite(second, b"split.no" + U16.to_bytes(4, "little"), b"split.no" + I16.to_bytes(4, "little"))
            said = "moestream: cannot load the model: llama.cpp ends with"
    assert said in refusal("llama-server", model, tmp_path / "log")


# --- anything ---


def test_random_damage(tmp_path: Path) -> None:
    """Refused, or served; whatever it is, without a signal."""
    model, log = tmp_path / "bad.gguf", tmp_path / "log"
    for seed in range(150):
        model.write_bytes(fuzzed(seed, vocabulary=False))
        ended = end_of("llama-completion", model, log)
        assert ended.returncode in (0, 1), f"malformed.fuzzed({seed}) ended with {ended.returncode}:\n{ended.output}"
        assert ended.resident_kib < MAX_RESIDENT_KIB, f"malformed.fuzzed({seed}) takes {ended.resident_kib} KiB"
        assert ended.returncode == 0 or "failed to load" in ended.output or "moestream: cannot load" in ended.output, seed


# --- moestream start ---


@pytest.mark.parametrize("name", [
    "used > count", "overlap experts", "dims overflow", "magic",  # found by Python
    "groups no divisor", "eps nan", "rope 8", "type I32 dense", "up missing",  # by the engine
])  # fmt: skip
def test_start_says_why(tmp_path: Path, name: str) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(CASES[name].write())
    command = [
        sys.executable,
        "-m",
        "moestream.cli",
        "start",
        "--model",
        model,
        "--slots",
        "4",
        "--no-map",
        "--port",
        str(free_port()),
    ]
    env = environment({k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"})
    done = subprocess.run([*command, "--", "-t", "1"], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert (CASES[name].python or CASES[name].engine or "?") in done.stderr
    assert "error: " in done.stderr and "hint: " in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
