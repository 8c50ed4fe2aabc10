"""Upstream's own tests of llama-server, run on the patched one: with streaming on they pass and fail exactly as with streaming off.

README.md says what is run and what is not. With MOESTREAM_STOCK_SERVER set to the path of an unpatched llama-server of the same
version, its outcomes are compared as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from expected import FAILS, FILES, LEFT_OUT
from fixture_models import split, tool
from llama_server import environment
from waiting import free_port

from moestream import paths

HERE = Path(__file__).parent
SLOTS = "8"
DEADLINE_S = 900

# The same for every variant: bits that do not depend on streaming, and a chat template that upstream knows without Jinja.
SETTINGS = {"LLAMA_ARG_REPACK": "0", "LLAMA_ARG_THREADS": "1", "LLAMA_ARG_CHAT_TEMPLATE": "chatml"}


def entries(listed: dict[str, tuple[str, ...]]) -> list[str]:
    return [entry for tests in listed.values() for entry in tests]


def upstream_tests() -> Path:
    """The folder in the source tree that the engine was built from."""
    folder = paths.workspace_dir() / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    assert (folder / "conftest.py").is_file()
    return folder


@dataclass(frozen=True)
class Result:
    collected: list[str]
    outcomes: dict[str, dict[str, str]]
    output: str
    stats: dict[str, Any] | None  # of the model that was freed last

    def failed(self) -> set[str]:
        return {test for test, how in self.outcomes.items() if how["outcome"] == "failed"}


def start(name: str, server: Path, settings: dict[str, str], shards: Path, demo: Path, folder: Path) -> subprocess.Popen[bytes]:
    env = environment(settings) | SETTINGS | {
        "LLAMA_SERVER_BIN_PATH": str(server),
        "LLAMA_CACHE": str(folder / f"{name}-cache"),
        "PORT": str(free_port()),
        "UPSTREAM_MODEL": str(demo),
        "UPSTREAM_SHARDS": str(shards),
        "UPSTREAM_OUTCOMES": str(folder / f"{name}.json"),
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "local_models", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"]
    command += [f"--basetemp={folder / f'{name}-tmp'}"]
    command += [f"--deselect=unit/{test}" for test in entries(LEFT_OUT)]
    command += [f"unit/{file}" for file in FILES]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=upstream_tests(), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def results(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("upstream")
    shards = split(demo, folder / "demo")[0]
    server = tool("llama-server")
    on = {"LLAMA_ARG_MOE_SLOTS": SLOTS, "MOESTREAM_STATS_FILE": str(folder / "stats.json")}
    variants = {"off": (server, {}), "on": (server, on)}
    if stock := os.environ.get("MOESTREAM_STOCK_SERVER"):
        variants["stock"] = (Path(stock), {})
    processes = {name: start(name, program, settings, shards, demo, folder) for name, (program, settings) in variants.items()}
    found: dict[str, Result] = {}
    try:
        for name, process in processes.items():
            status = process.wait(DEADLINE_S)
            output = (folder / f"{name}.log").read_text(errors="replace")
            assert status in (0, 1), f"pytest of '{name}' ended with {status}:\n{output[-3000:]}"
            result = json.loads((folder / f"{name}.json").read_text())
            stats = json.loads((folder / "stats.json").read_text()) if name == "on" else None
            outcomes = {test.removeprefix("unit/"): how for test, how in result["outcomes"].items()}
            found[name] = Result([t.removeprefix("unit/") for t in result["collected"]], outcomes, output, stats)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return found


def matching(entry: str, tests: list[str]) -> set[str]:
    """The tests that an entry of a list means: a test, or one test function with all its parameters."""
    return {test for test in tests if test == entry or test.startswith(entry + "[")}


def test_streaming_changes_no_outcome(results: dict[str, Result]) -> None:
    off, on = results["off"], results["on"]
    different = {test: (how, on.outcomes.get(test)) for test, how in off.outcomes.items() if how != on.outcomes.get(test)}
    assert different == {}, on.output[-20000:]
    assert on.outcomes.keys() == off.outcomes.keys()
    assert on.stats and on.stats["streaming"] and on.stats["slots"] == int(SLOTS)


@pytest.mark.skipif("MOESTREAM_STOCK_SERVER" not in os.environ, reason="an unpatched llama-server is not part of an engine")
def test_stock_has_the_same_outcomes(results: dict[str, Result]) -> None:
    assert results["stock"].outcomes == results["off"].outcomes


def test_exactly_the_listed_tests_fail(results: dict[str, Result]) -> None:
    off = results["off"]
    listed = set().union(*(matching(entry, off.collected) for entry in entries(FAILS)))
    assert off.failed() - listed == set(), off.output[-20000:]
    assert listed - off.failed() == set(), "listed as failing, and passed: take them off the list"


def test_most_tests_pass(results: dict[str, Result]) -> None:
    passed = sum(how["outcome"] == "passed" for how in results["on"].outcomes.values())
    assert passed > 2 * len(results["on"].failed())


@pytest.mark.parametrize("entry", entries(FAILS) + entries(LEFT_OUT))
def test_a_listed_test_exists(results: dict[str, Result], entry: str) -> None:
    assert matching(entry, results["off"].collected)


def test_every_file_of_upstreams_is_run_or_explained(results: dict[str, Result]) -> None:
    readme = (HERE / "README.md").read_text()
    left_out = {path.name for path in (upstream_tests() / "unit").glob("test_*.py")} - set(FILES)
    assert {name for name in left_out if f"`{name}`" not in readme} == set()
    assert {name for name in FILES if f"`{name}`" not in readme} == set()


def test_nothing_is_left_in_upstreams_tree(results: dict[str, Result]) -> None:
    folder = upstream_tests()
    assert not [path for path in folder.rglob("*") if path.name in ("__pycache__", ".pytest_cache", "tmp")]
