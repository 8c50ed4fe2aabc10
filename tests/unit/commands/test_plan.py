"""``moestream plan``: what is refused, with its value and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from moestream.cli import main
from moestream.commands.plan import Measured
from moestream.planning.fit import check_cache_type, parse_tier
from moestream.planning.hardware import Drive

DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> tuple[str, str]:
    """Run it in this process; what it printed."""
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == code
    out, err = capsys.readouterr()
    return out, err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "no model is given"),
        (("x.gguf", "--port", "1"), 2, "--port 1 does nothing without --check"),
        (("x.gguf", "--check"), 2, "--check cannot be combined with MODEL"),
        (("--check", "--ram", "1GiB", "--slots", "4"), 2, "--check cannot be combined with --ram, --slots"),
        (("--check",), 1, "no server runs that moestream has started"),
        (("--check", "--port", "7"), 1, "no server on port 7 runs"),
        ((str(DEMO), "--ram", "much"), 1, "--ram much: expected a size"),
        ((str(DEMO), "--vram", "-1"), 1, "--vram -1: expected a size"),
        ((str(DEMO), "--ram-tier", "some"), 1, "--ram-tier some: expected a size"),
        ((str(DEMO), "--slots", "map"), 1, "--slots map: expected"),
        ((str(DEMO), "--cache-type-k", "q3"), 1, "--cache-type-k q3: expected f32, f16"),
        ((str(DEMO), "--target-tps", "0"), 1, "--target-tps 0: expected a number above 0"),
        ((str(DEMO), "--map", "no-such-file"), 1, "--map no-such-file: no such file"),
        ((str(DEMO), "--trace", "no-such-file"), 1, "no-such-file"),
        (("no-such.gguf",), 1, "no such model file"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = refused(capsys, code, *arguments)
    assert out == "" and said in err and "hint: " in err


def test_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = refused(capsys, 1, str(DEMO), "--ram", "30MiB")
    assert (
        out == ""
        and "6 slots a layer, what one token uses, need" in err
        and "(--ram)" in err
        and "hint: what would do: " in err
    )
    assert "--slots 5: too few" in refused(capsys, 1, str(DEMO), "--slots", "5")[1]


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (2.0, False), (2.1, True)])
def test_a_busy_machine_is_told(load: float, is_busy: bool) -> None:
    measured = Measured(None, 4, [], Drive(None), 1e9, 1e9, 1e9, 1e9, load)
    assert (measured.busy is not None) == is_busy


def test_cache_types_and_tiers_as_the_engine_reads_them() -> None:
    assert check_cache_type("--cache-type-k", "Q8_0") == check_cache_type("--cache-type-k", "q8_0") == "Q8_0"
    assert (parse_tier("none"), parse_tier("AUTO"), parse_tier("1.5 GiB")) == (0, -1, 3 << 29)
