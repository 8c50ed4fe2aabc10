"""``python -m moestream.demo``: what ``make run`` shows."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from service_harness import DEMO, Home


def run_demo(home: Home, *arguments: str, fake: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moestream.demo", *arguments], env=home.environment(fake),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_once(home: Home) -> None:
    done = run_demo(home, "--once", "--port", str(home.port))
    assert done.returncode == 0, done.stderr
    assert "answer      You asked: What does the command grep do?" in done.stdout
    assert "8 of 64 experts in each of 8 MoE layers" in done.stdout
    assert "hit rate 75.0%, 240 hits, 80 misses, 80.0 MiB read, 12 ms stalled" in done.stdout
    assert f"http://127.0.0.1:{home.port} (OpenAI: http://127.0.0.1:{home.port}/v1)" in done.stdout
    assert home.servers() == []


def test_own_model_and_slots(home: Home) -> None:
    done = run_demo(home, "--once", "--port", str(home.port), "--model", str(DEMO), "--slots", "32")
    assert "32 of 64 experts" in done.stdout


def test_port_taken(home: Home) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", home.port))
        mine.listen()
        done = run_demo(home, "--once", "--port", str(home.port))
    assert done.returncode == 0, done.stderr
    assert f"port {home.port} is in use by pid" in done.stderr
    assert f"http://127.0.0.1:{home.port}/v1" not in done.stdout


def test_serves_until_ctrl_c(home: Home) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moestream.demo", "--port", str(home.port)], env=home.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    home.started.append(process)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and not line.startswith("serving until Ctrl-C"):
        pass
    assert line
    assert len(home.servers()) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert home.servers() == []


def test_a_server_that_dies_is_an_error(home: Home) -> None:
    done = run_demo(home, "--once", "--port", str(home.port), fake="dies-at-once=1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: llama-server ended before it was ready")
