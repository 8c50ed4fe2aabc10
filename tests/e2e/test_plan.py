"""``moestream plan`` against the real engine: what it refuses with, what it reports to have taken, and ``plan --check``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixture_models import run, tool
from llama_server import LlamaServer, environment
from page_cache import PAGE, cached_pages, drop_from_cache
from waiting import free_port

from moestream import gguf_facts
from moestream.planning import check, memory
from moestream.planning.memory import Wishes
from moestream.planning.state import ContextShape
from moestream.upstream import engines

# Full attention; latent caches with one dense layer; recurrent layers; sliding windows, and merged gate and up.
LAYOUTS = ("demo", "qwen3moe", "deepseek2", "qwen35moe", "gemma4")
Model = Callable[[str, str], Path]


def path_of(layout: str, model: Model, demo: Path) -> Path:
    return demo if layout == "demo" else model(layout, "q4_0")


PLENTY = 1 << 34  # experts are then read through the page cache, as they are here

SETTINGS = {
    "few slots, one at a time": (("-c", "2048", "-np", "1"), Wishes(ContextShape(2048, 1, False), slots=6)),
    "unified, odd context": (("-c", "3000", "-np", "4", "-kvu"), Wishes(ContextShape(3000, 4, True), slots=7)),
    "streams, small batches": (("-c", "2048", "-np", "2", "-ub", "128"), Wishes(ContextShape(2048, 2, False, 128), slots=6)),
    "tier, ring": (
        ("-c", "1024", "-np", "1", "--moe-ram", "1MiB", "--moe-staging", "ring"),
        Wishes(ContextShape(1024, 1, False), slots=6, ram_tier_bytes=1 << 20, staging="ring"),
    ),
    "all": (("-c", "1024", "-np", "1"), Wishes(ContextShape(1024, 1, False), slots=1 << 20)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_are_those_that_the_engine_reports(layout: str, name: str, model: Model, demo: Path, tmp_path: Path) -> None:
    path = path_of(layout, model, demo)
    arguments, wishes = SETTINGS[name]
    facts = gguf_facts.read(path)
    slots = "all" if wishes.slots == 1 << 20 else str(wishes.slots)
    with LlamaServer(path, tmp_path / "log", *arguments, "--moe-slots", slots, "--moe-io", "buffered") as server:
        stats = server.stats()
    # the tests' servers have plain kernels: nothing is converted, and no read needs a buffer
    plan = memory.decide(facts, replace(wishes, repacked=frozenset()), PLENTY)
    predicted = {k: v for k, v in plan.sizes.as_json().items() if k not in ("bounce_bytes", "total_bytes")}
    reported = {k: v for k, v in stats["memory"].items() if k in predicted}
    assert (plan.slots, plan.staging) == (stats["slots"], stats["staging"])
    assert check.failed(check.memory(predicted, reported)) == []
    for exact in ("pool_bytes", "staging_bytes", "ram_bytes", "guess_bytes"):
        assert predicted[exact] == reported[exact], exact
    total = check.Deviation("total", sum(predicted.values()), sum(reported.values()), check.BYTES_TOLERANCE)
    assert total.held, total


@pytest.mark.parametrize("layout", (*LAYOUTS, "openai-moe"))
def test_the_engine_reckons_alike(layout: str, model: Model, demo: Path) -> None:
    """With a context that fits nowhere the engine says what it reckons with, to a tenth of a MiB."""
    path = path_of(layout, model, demo)
    facts = gguf_facts.read(path)
    n_ctx = 100_000_000
    done = run(
        tool("llama-completion"), "-m", path, "-c", str(n_ctx), "-p", "x", "-n", "1", "-no-cnv", "--moe-slots", "auto",
        env=environment(), ok=False,
    )  # fmt: skip
    pattern = (
        r"auto: (\d+) slots a layer, the fewest there can be, take ([\d.]+) MiB \(([\d.]+) of them KV cache for a context of (\d+)\), "
        r"and with a margin ([\d.]+) of the ([\d.]+) MiB available"
    )
    said = re.search(pattern, done.stdout + done.stderr)
    assert said, done.stderr
    slots, take, _, ctx, usable, available = (float(x) for x in said.groups())
    plan = memory.decide(facts, Wishes(ContextShape(int(ctx))), round(available * 2**20))
    assert int(ctx) == n_ctx and plan.slots < plan.least_slots == slots
    assert plan.least_bytes / 2**20 == pytest.approx(take, abs=0.06)
    assert plan.usable_bytes / 2**20 == pytest.approx(usable, abs=0.2)


class Home:
    """A home of its own with the engines that are built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        (folder / "data" / "engines").symlink_to(engines.in_use("cpu").path.parent)
        self.port = free_port()
        self.environment = environment({"MOESTREAM_HOME": str(folder)})

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moestream.cli", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, stdin=subprocess.DEVNULL, timeout=120
        )


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.run("stop", "--all")


def by_name(checked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {d["name"]: d for d in checked["deviations"]}


def test_plan_then_start_then_check(home: Home, demo: Path) -> None:
    planned = json.loads(home.run("plan", demo, "--slots", "12", "--ctx", "1024", "--parallel", "2", "--json").stdout)
    assert "--slots 12 --ctx 1024 --parallel 2" in planned["command"]
    more = ("--slots", "12", "--ctx", "1024", "--parallel", "2", "--port", str(home.port), "--detach", "--no-map")
    assert home.run("start", "--model", demo, *more, "--", "--no-ui").returncode == 0
    done = home.run("plan", "--check", "--json")
    checked = json.loads(done.stdout)
    found = by_name(checked)
    # how fast this machine is just now is not the test's business; that it decides about the exit code is
    assert done.returncode == (0 if checked["held"] else 1), done.stderr
    assert checked["held"] == (found["tokens_per_s"]["held"] is not False)  # None: what limits is a bound, and no promise
    assert all(d["held"] in (True, None) for name, d in found.items() if name != "tokens_per_s")
    assert {name for name, d in found.items() if d["held"]} >= {"slots", "pool_bytes", "kv_bytes", "dense_bytes", "total_bytes"}
    assert found["pool_bytes"]["predicted"] == planned["memory"]["expected"]["pool_bytes"]
    assert found["tokens_per_s"]["reported"] > 0 and found["hit_rate"]["reported"] > 0
    assert checked["tokens_per_s_from"] == "a completion of 48 tokens"
    assert checked["staging_predicted"] == checked["staging_reported"]
    assert json.loads(home.run("plan", "--check", "--json").stdout)["tokens_per_s_from"].startswith("/metrics, ")


def test_check_of_slots_that_the_engine_chose(home: Home, demo: Path) -> None:
    more = ("--ctx", "1024", "--port", str(home.port), "--detach", "--no-map", "--", "--no-ui", "-ctk", "q8_0")
    assert home.run("start", "--model", demo, *more).returncode == 0
    found = by_name(json.loads(home.run("plan", "--check", "--json").stdout))
    assert found["slots"]["predicted"] == found["slots"]["reported"] == 64
    assert found["kv_bytes"]["held"] and found["total_bytes"]["held"]


def checking(name: str, predicted: dict[str, int], reported: dict[str, int]) -> check.Deviation:
    return next(d for d in check.memory(predicted, reported) if d.name == name)


def started(home: Home, model: Path, *more: str) -> dict[str, Any]:
    common = ("--ctx", "1024", "--parallel", "1", "--port", str(home.port), "--detach", "--no-map", "--json")
    done = home.run("start", "--model", model, *common, *more, "--", "--no-ui")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "more",
    [
        ("--ram", "60MiB"),
        ("--ram", "64MiB", "--ram-tier", "4MiB"),
        ("--ram", "70MiB", "--slots", "8", "--ram-tier", "auto"),
        ("--ram", "1GiB"),
    ],
    ids=" ".join,
)
def test_a_planned_start_takes_what_was_planned(home: Home, demo: Path, more: tuple[str, ...]) -> None:
    """Slots, staging, tier and every part of memory, as the engine reports them; and all of it within the budget."""
    planned = json.loads(home.run("plan", demo, "--ctx", "1024", "--parallel", "1", *more, "--json").stdout)
    report = started(home, demo, *more)
    stats, plan = report["stats"], report["plan"]
    assert (stats["slots"], stats["staging"]) == (plan["slots"], plan["staging"]) == (planned["slots"], planned["staging"])
    assert plan["expected"] == planned["memory"]["expected"]
    for exact in ("pool_bytes", "staging_bytes", "ram_bytes", "guess_bytes"):
        assert stats["memory"][exact] == plan["expected"][exact], exact
    assert plan["budgeted_bytes"] <= plan["usable_bytes"] < plan["available_bytes"]
    assert stats["memory"]["total_bytes"] <= plan["available_bytes"]
    for name in ("kv_bytes", "dense_bytes", "total_bytes"):
        assert checking(name, plan["expected"], stats["memory"]).held, name
    if "--ram-tier" in more and "--slots" not in more:
        found = by_name(json.loads(home.run("plan", "--check", "--json").stdout))
        assert all(d["held"] in (True, None) for name, d in found.items() if name != "tokens_per_s")


def test_a_planned_start_without_overlap_needs_no_ring(home: Home, demo: Path) -> None:
    """The engine refuses the two together."""
    report = started(home, demo, "--ram", "72MiB", "--overlap", "off")
    assert report["stats"]["staging"] == report["plan"]["staging"] == "full width" and report["stats"]["slots"] < 64
    assert report["stats"]["slots"] == report["plan"]["slots"]


def test_the_check_s_own_request_is_nobody_s_use(home: Home, demo: Path) -> None:
    """It goes through the server that learns, and not into the map that is kept of the model."""
    port = ("--port", str(home.port))
    assert (
        home.run("start", "--model", demo, "--slots", "12", "--ctx", "1024", *port, "--detach", "--", "--no-ui").returncode == 0
    )
    url = f"http://127.0.0.1:{home.port}/completion"
    body = {"prompt": "The command grep", "n_predict": 5, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
    counted = httpx.get(f"http://127.0.0.1:{home.port}/moe/stats", timeout=60, trust_env=False).json()["totals"]
    mine = counted["tokens_decode"] + counted["tokens_prefill"]
    checked = json.loads(home.run("plan", "--check", "--json").stdout)
    assert checked["tokens_per_s_from"] == "a completion of 48 tokens"
    assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
    assert home.run("stop", *port).returncode == 0
    (kept,) = (home.folder / "data" / "maps").glob("*.json")
    assert json.loads(kept.read_text())["tokens"] == 2 * mine
    assert list((home.folder / "state" / "servers").glob("*.skip")) == []


@pytest.mark.parametrize(
    ("given", "flag"),
    [(("--pool", "device"), "--pool"), (("--gpu-path", "mailbox"), "--gpu-path"), (("--require-gpu",), "--require-gpu")],
)
def test_flags_that_this_engine_cannot_honour(home: Home, demo: Path, given: tuple[str, ...], flag: str) -> None:
    """There is no GPU in an engine for the processor, whether it knows the flag or not."""
    done = home.run("start", "--model", demo, "--slots", "8", *given, "--port", str(home.port))
    assert (done.returncode, done.stdout) == (1, "") and "internal error" not in done.stderr
    first, hint = done.stderr.splitlines()[0], done.stderr.partition("\nhint: ")[2]
    assert first.startswith("error: ") and flag in first.split() + first.replace(":", " ").split() and hint


def test_no_server_and_servers_that_do_not_stream(home: Home, demo: Path) -> None:
    done = home.run("plan", "--check")
    assert (done.returncode, done.stdout) == (1, "") and "no server runs that moestream has started" in done.stderr
    assert home.run("start", "--model", demo, "--slots", "off", "--port", str(home.port), "--detach").returncode == 0
    done = home.run("plan", "--check", "--port", str(home.port))
    assert done.returncode == 1 and "it streams no experts, or sleeps" in done.stderr


def test_nothing_of_the_weights_stays_in_the_page_cache(home: Home, demo_copy: Path) -> None:
    """Headers and routers alone go through it; the probe of the drive goes past it."""
    drop_from_cache(demo_copy)
    assert home.run("plan", demo_copy).returncode == 0
    assert sum(cached_pages(demo_copy)) * PAGE < 1 << 20


def test_hit_rates_of_a_replayed_trace(home: Home, demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.trace"
    text = "The purpose of this manual is to describe"
    assert home.run("trace", "record", demo, "--out", trace, "--text", text, "--tokens", "40", "--slots", "64").returncode == 0
    replayed = json.loads(home.run("trace", "replay", trace, "--slots", "16", "--policy", "lru", "--json").stdout)["runs"][0]
    answer = json.loads(home.run("plan", demo, "--slots", "16", "--trace", trace, "--json").stdout)
    assert answer["hit_rate_source"] == "replay"
    # the one is a mean of layers, the other of accesses, of which the last layer has fewer
    assert answer["prediction"]["hit_rate"] == pytest.approx(replayed["hit_rate"], abs=0.03)
    rates = [row["hit_rate"] for row in answer["table"]]
    assert rates == sorted(rates) and rates[-1] == 1.0
