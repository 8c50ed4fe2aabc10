"""Real text through the programs people use: the same words and the same perplexity with and without streaming."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixture_models import run, tool
from llama_server import environment

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--no-repack", "-t", "1")


def answer(demo: Path, *arguments: str) -> str:
    """300 tokens, each the likeliest; repetition is punished, since text that loops visits few experts."""
    done = run(
        tool("llama-completion"), "-m", demo, "-p", "The purpose of this manual is to describe", "-n", "300", "--temp", "0",
        "--repeat-penalty", "1.3", "--repeat-last-n", "256", "--ignore-eos", "-no-cnv", "-c", "512", *PLAIN, *arguments,
        env=environment(),
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def stock_answer(demo: Path) -> str:
    text = answer(demo)
    assert len(text) > 900
    assert len(set(text.split())) > 80
    return text


@pytest.mark.parametrize("slots", ["6", "8", "all"])
def test_greedy_text(demo: Path, stock_answer: str, slots: str) -> None:
    assert answer(demo, "--moe-slots", slots) == stock_answer


def perplexity(demo: Path, *arguments: str) -> list[str]:
    """The running values that llama-perplexity prints, and its final estimate."""
    done = run(
        tool("llama-perplexity"), "-m", demo, "-f", ROOT / "CONTRIBUTING.md", "-c", "128", "--chunks", "4", *PLAIN, *arguments,
        env=environment(),
    )  # fmt: skip
    found = re.findall(r"\[\d+\]([\d.]+),", done.stdout) + re.findall(
        r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr
    )
    assert len(found) == 5, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("ubatch", ["1", "32", "128"])
def test_perplexity(demo: Path, ubatch: str) -> None:
    size = ("-b", "128", "-ub", ubatch)
    stock = perplexity(demo, *size)
    assert perplexity(demo, *size, "--moe-slots", "8") == stock
