"""``moestream doctor`` as a user sees it: text, JSON, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moestream.doctor.survey import CHECKS
from moestream.models.store import ModelFile, ModelStore, PulledModel
from moestream.server.address import free_port
from moestream.upstream import engines
from moestream.upstream.pin import load_pin

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with an engine of this version, whose server is a shell script."""
    home = tmp_path / "home"
    source, sources, cpu = load_pin().version, engines.sources_hash(), engines.cpu_kind()
    name = engines.engine_id(source, sources, "cpu", cpu)
    engine = engines.Engine(
        id=name, path=home / "data" / "engines" / name, source=source, sources_sha256=sources, backend="cpu", cpu=cpu,
        built_at="2026-01-02T03:04:05+00:00", targets=("llama-server",), tools=("llama-server",), cmake_args=(),
        extra_cmake_args=(), web_ui=False, test_series_sha256="",
    )  # fmt: skip
    engine.bin_dir.mkdir(parents=True)
    (engine.bin_dir / "llama-server").write_text("#!/bin/sh\nexit 0\n")
    (engine.bin_dir / "llama-server").chmod(0o755)
    engines.write_description(engine, engine.path)
    return home


@pytest.fixture
def doctor(home: Path, tmp_path: Path):
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MOESTREAM_")}
        return subprocess.run(
            [sys.executable, "-m", "moestream.cli", "doctor", *arguments],
            env={"MOESTREAM_PORT": str(free_port("127.0.0.1")), **kept, "MOESTREAM_HOME": str(home), "PYTHONPATH": str(ROOT), **variables},
            cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip

    return run


def line(text: str, name: str) -> str:
    (found,) = re.findall(rf"^\w+ +{name} .*(?:\n +hint: .*)?", text, re.MULTILINE)
    return found


def test_nothing_failed(doctor) -> None:
    done = doctor(str(DEMO))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    names = [text.split()[1] for text in done.stdout.splitlines()[:-1] if not text.startswith(" ")]
    assert names == [check.name for check in CHECKS]
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail, \d+ skipped", done.stdout.splitlines()[-1])
    assert re.fullmatch(r"ok +engine +\S+: cpu, for this processor; matches moestream \S+", line(done.stdout, "engine"))
    size = "37.8 MiB in 1 file, 6 of 64 experts used"
    assert line(done.stdout, "model").split(None, 2)[2] == f"{DEMO}: qwen3moe, {size}"


def test_json(doctor, home: Path) -> None:
    done = doctor(str(DEMO), "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    assert report["schema"] == "moestream/doctor/1"
    assert list(report) == ["schema", "moestream_version", "model", "counts", "checks"]
    assert report["model"] == str(DEMO) and report["counts"]["fail"] == 0
    assert sum(report["counts"].values()) == len(report["checks"]) == len(CHECKS)
    assert all(list(c) == ["name", "status", "case", "found", "hint", "data"] for c in report["checks"])
    (model,) = [c["data"] for c in report["checks"] if c["name"] == "model"]
    assert (model["size_bytes"], model["n_expert"]) == (DEMO.stat().st_size, 64)
    (space,) = [c["data"] for c in report["checks"] if c["name"] == "home-space"]
    assert space["path"] == str(home / "data")


def test_a_failure_is_exit_code_3_and_the_report_is_whole(doctor, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(DEMO.read_bytes()[:-1000])
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        done = doctor("broken.gguf", MOESTREAM_PORT=str(port))
        as_json = doctor("broken.gguf", "--json", MOESTREAM_PORT=str(port))
    assert (done.returncode, done.stderr) == (3, "")
    found = line(done.stdout, "model")
    assert found.startswith("fail     model          broken.gguf is truncated: tensor ")
    assert found.endswith("hint: download the file again; the copy is incomplete")
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()} " in line(done.stdout, "port")
    assert ", 2 fail, " in done.stdout.splitlines()[-1]
    assert (as_json.returncode, as_json.stderr) == (3, "")
    report = json.loads(as_json.stdout)
    assert [c["name"] for c in report["checks"] if c["status"] == "fail"] == ["port", "model"]
    assert report["model"] == "broken.gguf"


def test_no_engine(doctor, home: Path) -> None:
    for file in home.rglob("engine.json"):
        file.unlink()
    done = doctor()
    assert (done.returncode, done.stderr) == (3, "")
    assert line(done.stdout, "engine").startswith("fail     engine         no engine is built")
    assert "hint: moestream build" in line(done.stdout, "engine")


def test_hash(doctor, home: Path, tmp_path: Path) -> None:
    """The demo model as one that was pulled: by its name, whole, and with one byte that no header tells."""
    data = bytearray(DEMO.read_bytes())
    file = ModelFile("demo-Q4_0.gguf", len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    store = ModelStore(home / "data" / "models")
    record = PulledModel("org/demo", "Q4_0", "Q4_0", "0123456789abcdef", str(store.folder / "org/demo"), (file,), 1.0)
    store.write(record, pending=False)
    record.paths[0].parent.mkdir(parents=True)
    record.paths[0].write_bytes(data)
    done = doctor("hf:org/demo", "--hash")
    assert done.returncode == 0
    assert line(done.stdout, "model-content").split(None, 2)[2] == "1 of 1 files are what the hub said at commit 0123456789"
    assert done.stderr.splitlines()[-1] == "comparing: 37 of 37 MiB"
    data[-5] ^= 1
    record.paths[0].write_bytes(data)
    assert doctor("hf:org/demo").returncode == 0
    done = doctor("hf:org/demo", "--hash")
    assert done.returncode == 3
    assert f"{record.paths[0]} is not what the hub said: sha256" in line(done.stdout, "model-content")


def test_hash_without_a_model(doctor) -> None:
    done = doctor("--hash")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --hash without a model\nhint: moestream doctor MODEL --hash\n"


def test_a_report_that_cannot_be_written(doctor, home: Path) -> None:
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "MOESTREAM_HOME": str(home), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "moestream.cli", "doctor"], env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 74 and done.stderr.startswith("error: cannot write to stdout: ")
