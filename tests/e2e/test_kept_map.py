"""The kept router map with the real engine: what one server computes fills the slots of the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from llama_server import completion_body, environment
from waiting import free_port, until

from moestream import gguf_facts
from moestream.routing import maps
from moestream.routing.fingerprint import fingerprint
from moestream.upstream import engines

PROMPT = "The command grep reads its input line by line and prints those lines that match."
N_TOKENS = 24


class Home:
    """A home of its own with the engines that are built; the servers of a test on one port."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "data" / "engines").symlink_to(engines.in_use("cpu").path.parent)
        self.folder = folder
        self.port = free_port()
        self.environment = environment({"MOESTREAM_HOME": str(folder)})

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moestream.cli", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, stdin=subprocess.DEVNULL, timeout=120
        )

    def start(self, model: Path, *more: str) -> tuple[dict[str, Any], str]:
        """The report and what was told."""
        plain = ("--", "-t", "1", "--no-ui", "--no-repack")
        done = self.run("start", "--model", model, "--port", str(self.port), "--detach", "--json", *more, *plain)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    def stop(self) -> None:
        assert self.run("stop", "--port", str(self.port)).stdout == f"port {self.port}: stopped\n"

    def get(self, path: str) -> Any:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=60, trust_env=False).json()

    def ask(self) -> list[int]:
        body = completion_body(PROMPT, N_TOKENS)
        answer = httpx.post(f"http://127.0.0.1:{self.port}/completion", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200
        return answer.json()["tokens"]


@pytest.fixture
def home(tmp_path: Path):
    made = Home(tmp_path)
    yield made
    made.run("stop", "--all")


def test_what_is_computed_fills_the_next_server_s_slots(home: Home, demo: Path) -> None:
    path = home.folder / "data" / "maps" / f"{fingerprint(gguf_facts.read(demo))}.json"
    report, told = home.start(demo, "--slots", "12")
    assert report["stats"]["map"] is None and told == ""
    tokens = home.ask()
    home.stop()
    kept = maps.read(path)
    assert kept.tokens > N_TOKENS
    for layer in kept.layers[:-1]:
        assert sum(layer.counts) == 6 * kept.tokens
    assert sum(kept.layers[-1].counts) == 6 * N_TOKENS, "of a prompt, the last layer computes the last token alone"

    report, told = home.start(demo, "--slots", "12", "--warm", "60")
    assert str(path) in told
    assert report["kept_map"] == {"path": str(path), "used": True, "tokens": kept.tokens, "learning": True, "problem": None}
    stats = report["stats"]
    assert stats["map"] == {"name": f"{home.port}.map", "pin": 0}
    assert [layer["warm_filled"] for layer in stats["layers"]] == [12] * 8
    assert home.run("map", "forget", "--all").returncode == 0  # the engine has a copy of its own
    assert home.ask() == tokens
    home.stop()
    assert maps.read(path).tokens == kept.tokens

    report, told = home.start(demo, "--slots", "12", "--no-map")
    assert report["stats"]["map"] is None and report["kept_map"] is None and told == ""


def test_a_server_that_sleeps_wakes_without_the_kept_map(home: Home, demo: Path) -> None:
    """It loads its model again, with the map and the trace that it has begun with."""
    home.start(demo, "--slots", "12")
    tokens = home.ask()
    home.stop()
    home.port = free_port()
    command = [
        sys.executable, "-m", "moestream.cli", "start", "--model", str(demo), "--slots", "12", "--port", str(home.port),
        "--detach", "--", "-t", "1", "--no-ui", "--no-repack", "--sleep-idle-seconds", "1",
    ]  # fmt: skip
    done = subprocess.run(command, env=home.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "slots are filled by" in done.stderr
    assert home.ask() == tokens
    until(lambda: home.get("/props")["is_sleeping"], "the server to sleep")
    assert home.run("map", "forget", "--all").returncode == 0
    assert home.ask() == tokens
    home.stop()
    (path,) = (home.folder / "data" / "maps").glob("*.json")
    twice = maps.read(path).tokens
    assert twice % 2 == 0 and twice > 2 * N_TOKENS, "both answers, before and after the sleep"


def test_a_map_that_pins(home: Home, demo: Path) -> None:
    home.start(demo, "--slots", "12")
    tokens = home.ask()
    home.stop()
    (path,) = (home.folder / "data" / "maps").glob("*.json")
    before = path.read_bytes()
    report, _ = home.start(demo, "--slots", "12", "--map", os.path.relpath(path), "--router-top-k", "6")
    assert report["stats"]["map"]["pin"] == 6
    assert [layer["pins"] for layer in report["stats"]["layers"]] == [6] * 8
    assert home.ask() == tokens
    home.stop()
    assert path.read_bytes() == before
    done = home.run(
        "start", "--model", demo, "--port", str(home.port), "--map", path, "--slots", "auto", "--router-top-k", "60"
    )
    assert done.returncode == 1
    assert "--router-top-k 60 is too many: layer 0 has" in done.stderr and "hint: --router-top-k " in done.stderr
