"""A picture of what was measured, by matplotlib, which is an extra."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moestream.errors import MoestreamError
from moestream.measuring.figures import Run, median_by_token
from moestream.routing.files import replacing

FORMATS = ("png", "svg")


def check(path: Path) -> None:
    """Find out before anything is measured whether the plot can be made.

    Raises:
        MoestreamError: another format, a folder that cannot be written, no matplotlib.
    """
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise MoestreamError(
            f"--plot {path}: expected a name that ends with .png or .svg", hint=f"--plot {path.stem or 'bench'}.png"
        )
    if path.is_dir():
        raise MoestreamError(f"--plot {path}: it is a folder", hint=f"--plot {path / 'bench.png'}")
    if not path.parent.is_dir():
        raise MoestreamError(f"--plot {path}: there is no folder {path.parent}", hint="make it, or choose another one")
    _figure_class()


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise MoestreamError(
            f"--plot needs matplotlib, which cannot be imported: {error}",
            hint="pip install matplotlib, or leave out --plot",
        ) from error


def draw(path: Path, runs: Sequence[Run], title: str) -> None:
    """Draw the speeds of every run, and the time of each token; a file that is there is replaced once the new one is whole.

    Raises:
        MoestreamError: see :func:`check`; or it cannot be written.
    """
    figure = _figure_class()(figsize=(10, 7.5), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplot_mosaic([["decode", "prompt"], ["tokens", "tokens"]])
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.side, run.cache), []).append(run)
    for name, label in (("decode", "decode, tok/s"), ("prompt", "prompt, tok/s")):
        for row, ((side, cache), group) in enumerate(groups.items()):
            speeds = [speed for run in group if (speed := getattr(run, f"{name}_tok_per_s")) is not None]
            grid[name].barh(
                row, statistics.median(speeds) if speeds else 0, color=f"C{row % 10}", alpha=0.6, label=f"{side}, {cache}"
            )
            grid[name].plot(speeds, [row] * len(speeds), "k|", markersize=12)
        grid[name].set_yticks(range(len(groups)), [f"{side}, {cache}" for side, cache in groups])
        grid[name].invert_yaxis()
        grid[name].set_xlabel(f"{label} (bar: median, marks: runs)")
        grid[name].set_xlim(left=0)
    for row, ((side, cache), group) in enumerate(groups.items()):
        times_ms = [1e3 * time_s for time_s in median_by_token(group)]
        grid["tokens"].plot(range(2, len(times_ms) + 2), times_ms, color=f"C{row % 10}", label=f"{side}, {cache}", linewidth=1)
    grid["tokens"].set_xlabel("token of the answer")
    grid["tokens"].set_ylabel("ms for it (median of the runs)")
    grid["tokens"].set_ylim(bottom=0)
    grid["tokens"].legend(fontsize="small")
    with replacing(path, "plot") as fresh:
        try:
            figure.savefig(fresh, format=path.suffix.lower().removeprefix("."), dpi=120)
        except OSError as error:
            raise MoestreamError(
                f"cannot write the plot {path}: {error.strerror}", hint="check that the disk is not full"
            ) from error
