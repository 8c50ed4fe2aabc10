"""What ``moestream bench`` makes of its arguments."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moestream import paths
from moestream.commands import start
from moestream.commands.bench import make_sides, slot_counts, without_streaming
from moestream.errors import MoestreamError
from moestream.planning import hardware
from moestream.server.arguments import ServerSettings, value_after


def test_slots() -> None:
    assert slot_counts("32, 8,auto,32") == ["32", "8", "auto"]
    for text in ("", "8,", "8,x", "-1"):
        with pytest.raises(MoestreamError, match="expected a number of expert slots"):
            slot_counts(text)
    with pytest.raises(MoestreamError, match="off is what stock") as caught:
        slot_counts("8,off")
    assert "--vs stock" in caught.value.hint


def test_stock_gets_no_arguments_of_the_engine() -> None:
    given = ("-t", "2", "--moe-ram", "1G", "--no-repack", "--moe_prefetch", "off", "-fa", "on")
    assert without_streaming(given) == ("-t", "2", "--no-repack", "-fa", "on")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of eight cores, of which a quota leaves one; an engine that is a name."""
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    fake = SimpleNamespace(id="e", backend="cpu", tool=lambda name: tmp_path / name)
    monkeypatch.setattr(start.engines, "in_use", lambda backend: fake)
    monkeypatch.setattr(hardware, "cores", lambda: 1)
    monkeypatch.setattr(hardware, "default_threads", lambda: 8)


def sides(*slots: str, **settings: Any) -> list[tuple[str, ...]]:
    made = make_sides(
        ServerSettings(model=paths.demo_model(), **settings), slots, stock=True, backend=None, ready_timeout_s=900.0
    )
    return [side.plan().argv for side in made]


def test_stock_has_the_threads_that_a_plan_takes(cores: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Else what is compared would be eight threads in the time of one."""
    ours, stock = sides("8")
    assert (value_after(ours, "-t"), value_after(stock, "-t")) == ("1", "1")
    assert capsys.readouterr().err.count("notice: 1 thread computes: ") == 1, "said once, and not in every round"
    ours, stock = sides("8", extra=("-t", "3"))
    assert (ours.count("-t"), stock.count("-t"), value_after(stock, "-t")) == (1, 1, "3")


def test_stock_has_nothing_of_streaming(cores: None) -> None:
    given = {"io": "direct", "ram_tier": "4MiB", "prefetch": "off", "ram": "1GiB", "pool": "auto", "gpu_path": "auto"}
    ours, all_slots, stock = sides("8", "auto", **given)
    assert value_after(ours, "--moe-ram") == "4MiB" and value_after(ours, "--moe-prefetch") == "off"
    assert value_after(all_slots, "--moe-slots") == "all", "as planned"
    assert not any(argument.startswith("--moe") for argument in stock)
