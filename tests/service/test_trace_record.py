"""``moestream trace record`` with a program that only pretends to record: what stays when it fails or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from trace_files import trace_bytes
from waiting import until

from moestream import paths
from moestream.commands import trace
from moestream.errors import MoestreamError

GOOD = trace_bytes([(0, [[0, 1]]), (1, [[0, 299]])])
# Takes the arguments of llama-completion; the text says what to do.
FAKE = f"""#!{sys.executable}
import json, os, pathlib, sys, time
args = dict(zip(sys.argv[1:], sys.argv[2:]))
text, out = args["-p"], pathlib.Path(args["--moe-trace"])
out.write_bytes({GOOD!r})
if text == "fail":
    print("llama: error loading model: --moe-slots auto: no room; hint: --moe-slots 6 or a smaller context (-c)", file=sys.stderr)
    sys.exit(1)
if text == "refuse":
    print("llama: error loading model: no experts; hint: leave out --moe-slots", file=sys.stderr)
    sys.exit(1)
if text == "wait":
    time.sleep(600)
if text != "help":
    totals = {{"hits": 1, "misses": 3}}
    print(f"recording the trace '{{out}}' has ended: enough", file=sys.stderr)
    stats = {{"streaming": True, "slots": 8, "policy": "lru", "totals": totals}}
    pathlib.Path(os.environ["MOESTREAM_STATS_FILE"]).write_text(json.dumps(stats))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "fake"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(trace.engines, "in_use", lambda backend: SimpleNamespace(tool=lambda name: program))
    return program


def record(out: Path, text: str, **more: Any) -> Any:
    return trace.record(str(paths.demo_model()), out, **{"text": text, "tokens": 1, "limit": 1, **more})


def test_recorded(fake: Path, tmp_path: Path) -> None:
    out = tmp_path / "a b.map"
    result = record(out, "hi")
    assert out.read_bytes() == GOOD
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert (result.data["trace"], result.data["stats"]["policy"]) == (str(out), "lru")
    assert result.data["notice"] == f"recording the trace '{out}' has ended: enough"
    assert f"moestream map make '{out}' --out '{out}.map'" in result.text
    record(out, "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a b.map", "fake"]


@pytest.mark.parametrize(("text", "message", "hint"), [
    ("fail", "nothing was recorded: --slots auto: no room", "--slots 6 or a smaller context (--ctx)"),
    ("refuse", "nothing was recorded: no experts", None),
    ("help", "nothing was recorded: llama-completion loaded no model", "what follows -- is passed on to llama-completion as it is"),
])  # fmt: skip
def test_a_trace_that_is_there_outlives_failures(fake: Path, tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    (tmp_path / "t").write_bytes(GOOD + b"old")
    with pytest.raises(MoestreamError) as caught:
        record(tmp_path / "t", text)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert (tmp_path / "t").read_bytes() == GOOD + b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fake", "t"]


def test_what_is_not_recorded_over_or_with(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    with pytest.raises(MoestreamError, match="text: the file exists and holds no trace"):
        record(tmp_path / "text", "hi")
    assert (tmp_path / "text").read_text() == "mine"
    with pytest.raises(MoestreamError, match=r"cannot write the trace .*: No such file or directory"):
        record(tmp_path / "no" / "t", "hi")
    with pytest.raises(MoestreamError, match="--slots map: expected a number of expert slots per layer, auto, all or off"):
        record(tmp_path / "t", "hi", slots="map")
    with pytest.raises(MoestreamError, match=r"--prompt x+: File name too long"):
        record(tmp_path / "t", None, prompt=Path("x" * 300))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_program_outlives_the_command(fake: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "t").write_bytes(GOOD + b"old")
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace; from moestream import cli\n"
        "from moestream.commands import trace\n"
        "trace.engines.in_use = lambda backend: SimpleNamespace(tool=lambda name: Path(sys.argv[1]))\n"
        "cli.main(['trace', 'record', sys.argv[2], '--out', sys.argv[3], '--text', 'wait'])\n"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code, str(fake), str(paths.demo_model()), str(tmp_path / "t")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def programs() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if str(fake) in (p.info["cmdline"] or [])[:2]]

    started = until(programs, "the program runs")
    command.send_signal(number)
    _, said = command.communicate(timeout=20)
    psutil.wait_procs(started, timeout=20)
    assert programs() == []
    assert (tmp_path / "t").read_bytes() == GOOD + b"old"
    if number != signal.SIGKILL:
        assert command.returncode == 130
        assert said.strip().splitlines()[-1] == "error: stopped before the trace was whole: nothing was recorded"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["fake", "t"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
