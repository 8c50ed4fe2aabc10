"""Models as they lie on disk: split, linked, in folders, under odd names. What Python makes of a path is in tests/unit/test_gguf_layouts.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fixture_models import run, tool
from llama_server import environment
from malformed import tiny, write_shards
from waiting import free_port

ODD_NAME = "a b, ü 模型 [1] 100%"


def answer(model: Path, cwd: Path, *more: str) -> str:
    """What the model writes behind a prompt. Few slots, so that every file is read."""
    arguments = ["-p", "abc", "-n", "12", "-no-cnv", "-t", "1", "-c", "64", "--temp", "0", "--no-repack", "--ignore-eos"]
    done = run(tool("llama-completion"), "-m", model, "--moe-slots", "2", *arguments, *more, env=environment(), cwd=cwd)
    assert "moestream: streaming" in done.stderr
    return done.stdout


@pytest.fixture
def expected(tmp_path: Path) -> str:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(tiny().write())
    text = answer(whole, tmp_path)
    assert len(text) > 12
    return text


@pytest.mark.parametrize("n_shard", [2, 5])
def test_shards(tmp_path: Path, expected: str, n_shard: int) -> None:
    assert answer(write_shards(tmp_path, "m", n_shard)[0], tmp_path) == expected


@pytest.mark.parametrize("load_mode", ["none", "mmap", "dio"])
def test_shards_in_every_load_mode(tmp_path: Path, expected: str, load_mode: str) -> None:
    assert answer(write_shards(tmp_path, "m", 3)[0], tmp_path, "--load-mode", load_mode) == expected


def test_links_and_relative_paths(tmp_path: Path, expected: str) -> None:
    blobs, names = tmp_path / "blobs", tmp_path / "names"
    blobs.mkdir()
    names.mkdir()
    for i, file in enumerate(write_shards(blobs, "m", 3)):
        (names / file.name).symlink_to(os.path.relpath(file.rename(blobs / f"{i:064x}"), names))
    assert answer(Path("names/m-00001-of-00003.gguf"), tmp_path) == expected
    assert answer(Path("../names/m-00001-of-00003.gguf"), blobs) == expected


def test_odd_names(tmp_path: Path, expected: str) -> None:
    folder = tmp_path / ODD_NAME
    folder.mkdir()
    assert answer(write_shards(folder, ODD_NAME, 2)[0], tmp_path) == expected


def moestream(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = environment({k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"})
    command = [sys.executable, "-m", "moestream.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("given", ["folder", "third shard", "link"])
def test_start(tmp_path: Path, given: str) -> None:
    """``moestream start`` finds the first shard, whatever of the model it is given, and says the model is being served."""
    folder = tmp_path / ODD_NAME
    folder.mkdir()
    shards = write_shards(folder, ODD_NAME, 5)
    (tmp_path / "current.gguf").symlink_to(shards[0])
    model = {"folder": ODD_NAME, "third shard": f"{ODD_NAME}/{shards[2].name}", "link": "current.gguf"}[given]
    port = free_port()
    extra = ("--", "-t", "1", "--no-ui")
    done = moestream(
        "start", "--model", model, "--slots", "2", "--port", str(port), "--no-map", "--detach", "--json", *extra, cwd=tmp_path
    )
    try:
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["model"] == str(shards[0])
        assert report["stats"]["model"] == shards[0].name
        body = {"prompt": "abc", "n_predict": 4}
        assert httpx.post(f"{report['address']}/completion", json=body, timeout=60, trust_env=False).status_code == 200
    finally:
        moestream("stop", "--port", str(port), cwd=tmp_path)


def test_start_with_two_models_in_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(tiny().write())
    done = moestream("start", "--model", tmp_path, "--slots", "2", "--port", str(free_port()), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: 2 models in the directory {tmp_path}: a.gguf, b.gguf" in done.stderr
    assert f"hint: name one of them, for example {tmp_path}/a.gguf" in done.stderr
