"""The RAM tier and guesses for the next layer: same tokens, less read from the disk, memory as promised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from llama_server import LlamaServer, environment
from page_cache import cached_pages, drop_from_cache

from moestream import gguf_facts

PROMPT = "The harbor of the old town was built by"
N_TOKENS = 40
N_LAYER, N_EXPERT = 8, 64
SLOTS = 8
STRICT = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
DIRECT = ("--moe-slots", str(SLOTS), "--moe-io", "direct")


def served(demo: Path, folder: Path, *arguments: str) -> tuple[list[int], dict[str, Any]]:
    """The answer to the prompt, twice, and the statistics then."""
    with LlamaServer(demo, folder / "log", *arguments, env=STRICT) as server:
        answers = [server.complete(PROMPT, N_TOKENS) for _ in range(2)]
        assert answers[0] == answers[1]
        return answers[0], server.stats()


def expert_bytes(demo: Path) -> int:
    return gguf_facts.read(demo).expert_bytes // (N_LAYER * N_EXPERT)


@pytest.fixture(scope="module")
def alone(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[str, Any]]:
    """Neither a RAM tier nor guesses."""
    return served(demo, tmp_path_factory.mktemp("alone"), *DIRECT, "--moe-prefetch", "off")


def test_what_lost_its_slot_is_not_read_again(demo: Path, tmp_path: Path, alone: tuple[list[int], dict[str, Any]]) -> None:
    answer, without = alone
    assert without["totals"]["ram_hits"] == without["memory"]["ram_bytes"] == 0
    read = [without["totals"]["bytes_read"]]
    for slabs in (100, 300):
        budget = slabs * (expert_bytes(demo) + 256)
        got, stats = served(demo, tmp_path, *DIRECT, "--moe-prefetch", "off", "--moe-ram", str(budget))
        total = stats["totals"]
        assert got == answer
        assert 0.9 * budget < stats["memory"]["ram_bytes"] <= budget
        assert total["ram_hits"] > 0 and total["read_errors"] == 0
        # which experts have a slot does not depend on what is below it
        for name in ("hits", "misses", "evictions"):
            assert total[name] == without["totals"][name]
        read.append(total["bytes_read"])
    assert read[0] > 1.2 * read[1] > 1.5 * read[2], "the larger the tier, the less is read"


def test_with_room_for_all_decoding_reads_each_expert_once(
    demo: Path, disk_folder: Path, tmp_path: Path, alone: tuple[list[int], dict[str, Any]]
) -> None:
    model = disk_folder / "own.gguf"
    shutil.copyfile(demo, model)
    drop_from_cache(model)
    answer, stats = served(model, tmp_path, *DIRECT, "--moe-prefetch", "off", "--moe-ram", "auto")
    assert answer == alone[0]
    facts = gguf_facts.read(demo)
    all_others = N_LAYER * (N_EXPERT - SLOTS) * expert_bytes(demo)
    assert all_others <= stats["memory"]["ram_bytes"] <= 1.05 * all_others, "what no expert could need is not taken"
    assert stats["ram_requested"] == "auto"
    # what only a prompt's early tokens wanted goes through staging and is not kept
    assert stats["totals"]["bytes_read"] <= 1.25 * facts.expert_bytes < 0.3 * alone[1]["totals"]["bytes_read"]
    assert sum(cached_pages(model)) < len(cached_pages(model)) / 2, "direct reads leave the page cache as it is"


def test_right_guesses_are_read_before_they_are_asked_for(
    demo: Path, tmp_path: Path, alone: tuple[list[int], dict[str, Any]]
) -> None:
    answer, without = alone
    got, stats = served(demo, tmp_path, *DIRECT, "--moe-prefetch", "on")
    total = stats["totals"]
    assert got == answer
    assert stats["prefetch"] == {"requested": "on", "on": True, "reason": ""}
    for name in ("hits", "misses", "evictions", "bytes_read"):
        assert total[name] == without["totals"][name], "guesses change nothing about slots"
    # a trained model: far more right ones than the share of experts that a guess by chance would find
    assert total["guess_hits"] > 0.3 * total["guesses"] > 0
    wrong = total["guesses"] - total["guess_hits"]
    assert 0 <= total["guess_wasted_bytes"] <= wrong * expert_bytes(demo)
    assert stats["layers"][0]["guesses"] == 0, "nobody guesses the first layer"
    assert all(layer["guess_hits"] > 0 for layer in stats["layers"][1:])


def test_both_together(demo: Path, tmp_path: Path, alone: tuple[list[int], dict[str, Any]]) -> None:
    answer, stats = served(
        demo, tmp_path, *DIRECT, "--moe-prefetch", "on", "--moe-ram", "4MiB", "--moe-staging", "ring", "--moe-warm", "0"
    )
    assert answer == alone[0]
    assert stats["totals"]["ram_hits"] > 0 and stats["totals"]["guess_hits"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--moe-slots", "all"), "every expert has a slot"),
        (("--moe-slots", "8", "--moe-overlap", "off"), "--moe-overlap off"),
        (("--moe-slots", "8", "--moe-prefetch", "off"), "as asked"),
    ],
)
def test_why_nothing_is_guessed(demo: Path, tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    stats = tmp_path / "stats.json"
    env = environment({"MOESTREAM_STATS_FILE": str(stats)})
    run(tool("llama-completion"), "-m", demo, "-p", "x", "-n", "2", "-no-cnv", "--moe-ram", "1GiB", *arguments, env=env)
    report = json.loads(stats.read_text())
    assert report["prefetch"]["on"] is False and report["prefetch"]["reason"] == reason
    assert report["memory"]["guess_bytes"] == 0
    assert (report["memory"]["ram_bytes"] == 0) == (reason == "every expert has a slot")


def test_auto_settles_and_goes_on(demo: Path, tmp_path: Path) -> None:
    """It compares 68 graphs; whichever way is faster here, the tokens are the same."""
    with LlamaServer(demo, tmp_path / "log", *DIRECT, env=STRICT) as server:
        tokens = server.complete(PROMPT, 120)
        first = server.stats()
        again = server.complete(PROMPT, 120)
        stats = server.stats()
    assert tokens == again
    assert first["prefetch"]["requested"] == "auto" and first["totals"]["guesses"] > 0
    if not stats["prefetch"]["on"]:  # decided against it: nothing more is read for it
        assert stats["totals"]["guesses"] == first["totals"]["guesses"]
