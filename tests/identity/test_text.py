"""Real text through the programs people use: the same words and the same perplexity with and without streaming."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import pytest
from fixture_models import run, tool
from llama_server import environment

HELD_OUT = Path(__file__).resolve().parents[1] / "data" / "heldout.txt.xz"
ONE_THREAD = ("-t", "1")
N_TOKENS = 1500


def answer(demo: Path, *arguments: str) -> str:
    """1,500 tokens, each the likeliest; repetition is punished, since text that loops visits few experts."""
    done = run(
        tool("llama-completion"), "-m", demo, "-p", "The purpose of this manual is to describe", "-n", str(N_TOKENS), "--temp", "0",
        "--repeat-penalty", "1.3", "--repeat-last-n", "256", "--ignore-eos", "-no-cnv", "-c", "2048", *ONE_THREAD, *arguments,
        env=environment(),
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def stock_answer(demo: Path) -> str:
    text = answer(demo)
    assert len(text) > 3 * N_TOKENS
    assert len(set(text.split())) > 200
    return text


@pytest.mark.parametrize("slots", ["6", "8", "64"])
def test_greedy_text(demo: Path, stock_answer: str, slots: str) -> None:
    assert answer(demo, "--moe-slots", slots) == stock_answer


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pieces from one end of the held-out text to the other; the model knows nothing of any."""
    text = lzma.decompress(HELD_OUT.read_bytes()).decode()
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text("".join(text[start : start + 2500] for start in range(0, len(text) - 2500, len(text) // 12)))
    return path


def perplexity(demo: Path, held_out: Path, n_chunks: int, *arguments: str) -> list[str]:
    """The running values that llama-perplexity prints, and its final estimate."""
    done = run(
        tool("llama-perplexity"), "-m", demo, "-f", held_out, "-c", "512", "--chunks", str(n_chunks), *ONE_THREAD, *arguments,
        env=environment(),
    )  # fmt: skip
    found = re.findall(r"\[\d+\]([\d.]+),", done.stdout) + re.findall(
        r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr
    )
    assert len(found) == n_chunks + 1, done.stdout + done.stderr
    assert 5 < float(found[-1]) < 40, "the model and the text belong together"
    return found


@pytest.mark.parametrize(("ubatch", "n_chunks", "slots"), [(512, 12, (6, 8, 64)), (32, 12, (8,)), (1, 3, (6,))])
def test_perplexity(demo: Path, held_out: Path, ubatch: int, n_chunks: int, slots: tuple[int, ...]) -> None:
    size = ("-b", "512", "-ub", str(ubatch))
    stock = perplexity(demo, held_out, n_chunks, *size)
    for n_slot in slots:
        assert perplexity(demo, held_out, n_chunks, *size, "--moe-slots", str(n_slot)) == stock, f"{n_slot} slots"
