"""Output that cannot be written, and characters that the encoding lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from service_harness import DEMO, Home

FULL = "error: cannot write to stdout: No space left on device\nhint: the disk may be full; send stdout elsewhere, or to /dev/null\n"
CLOSED = "error: cannot write to stdout: it is closed\nhint: send it to /dev/null: >/dev/null\n"


def shell(home: Home, arguments: list[str], redirection: str, *, fake: str = "") -> subprocess.CompletedProcess[str]:
    """Run it as a shell does, with its redirections."""
    command = [sys.executable, "-m", "moestream.cli", *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command], env=home.environment(fake),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--help"], ["stop", "--help"], ["--version"]])
def test_a_full_disk(home: Home, arguments: list[str]) -> None:
    done = shell(home, arguments, ">/dev/full")
    assert (done.returncode, done.stderr) == (74, FULL)


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["--help"]])
def test_stdout_closed(home: Home, arguments: list[str]) -> None:
    done = shell(home, arguments, ">&-")
    assert (done.returncode, done.stderr) == (74, CLOSED)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_start_whose_report_is_lost_leaves_no_server(home: Home) -> None:
    done = shell(home, home.start_arguments("--detach"), ">/dev/full")
    assert done.returncode == 74
    notice = f"notice: the server on port {home.port} was ready and has been stopped, for this could not be reported\n"
    assert done.stderr == notice + FULL
    assert home.servers() == []
    assert home.record() is None

    done = shell(home, home.start_arguments(), ">/dev/full")
    assert (done.returncode, done.stderr) == (74, FULL)
    assert home.servers() == []


def test_start_with_stdout_closed_starts_nothing(home: Home) -> None:
    done = shell(home, home.start_arguments("--detach"), ">&-")
    assert (done.returncode, done.stderr) == (74, CLOSED)
    assert not (home.folder / "state").exists()


def test_a_reader_that_has_gone(home: Home) -> None:
    done = shell(home, home.start_arguments("--detach"), "| true")
    assert "has been stopped" in done.stderr
    assert "internal error" not in done.stderr
    assert home.servers() == []


@pytest.mark.parametrize("redirection", ["2>/dev/null", "2>&-", "<&- 2>&-", pytest.param("2>/dev/full", id="full")])
def test_without_stderr(home: Home, redirection: str) -> None:
    """Messages are lost; they do not appear on stdout, and change nothing."""
    done = shell(home, ["stop", "--port", "4711"], redirection)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    done = shell(home, ["nonsense"], redirection)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = shell(home, home.start_arguments("--detach", "--host", "0.0.0.0"), redirection)
    assert done.returncode == 0
    assert done.stdout.startswith("ready after ")
    assert len(home.servers()) == 1


def test_an_encoding_without_the_characters(home: Home, tmp_path: Path) -> None:
    model = tmp_path / "ünï.gguf"
    shutil.copy(DEMO, model)
    home.variables["PYTHONIOENCODING"] = "ascii"
    done = home.run("start", "--model", str(model), "--port", str(home.port), "--detach")
    assert done.returncode == 0, done.stderr
    assert "\\xfcn\\xef.gguf" in done.stdout
    assert "\\xfcn\\xef.gguf" in home.run("status").stdout
    assert "\\xfcn\\xef.gguf" in home.run("start", "--model", str(tmp_path / "nö ünï.gguf"), "--port", "0").stderr
    assert home.run("stop").returncode == 0
