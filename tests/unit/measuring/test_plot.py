"""The plot: a real picture, or a refusal before anything is measured."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from moestream.errors import MoestreamError
from moestream.measuring import plot
from moestream.measuring.figures import Run

RUNS = [
    Run(side, "cold", i, decode_tok_per_s=speed + i, prompt_tok_per_s=9.0, token_s=[1 / speed] * 5)
    for side, speed in (("moestream 8 slots", 3.0), ("stock", 2.0))
    for i in range(2)
]


def test_png_and_svg(tmp_path: Path) -> None:
    from matplotlib import image

    plot.draw(tmp_path / "a.png", RUNS, "x.gguf")
    height, width, _ = image.imread(tmp_path / "a.png").shape
    assert (width, height) == (1200, 900)
    plot.draw(tmp_path / "a.SVG", RUNS, "x.gguf")
    svg = (tmp_path / "a.SVG").read_text()
    assert svg.startswith("<?xml") and "moestream 8 slots, cold" in svg and "stock, cold" in svg
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.SVG", "a.png"]


def test_a_run_without_figures_is_drawn(tmp_path: Path) -> None:
    plot.draw(tmp_path / "a.png", [Run("a", "cold", 0)], "x.gguf")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(("name", "message"), [
    ("a.jpg", "expected a name that ends with .png or .svg"), ("a", "expected a name that ends with .png or .svg"),
    ("none/a.png", "there is no folder"), ("folder.png", "it is a folder"),
])  # fmt: skip
def test_refused_beforehand(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(MoestreamError, match=message):
        plot.check(tmp_path / name)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "matplotlib" or n.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MoestreamError, match="--plot needs matplotlib, which cannot be imported") as caught:
        plot.check(tmp_path / "a.png")
    assert caught.value.hint == "pip install matplotlib, or leave out --plot"


def test_a_plot_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(MoestreamError, match=r"cannot write the plot .*a\.png: File too large"):
            plot.draw(tmp_path / "a.png", RUNS, "x.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.png", b"old")]
