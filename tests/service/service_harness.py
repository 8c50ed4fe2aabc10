"""A made-up engine whose llama-server is the fake one, a home of its own, and ways to run moestream in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from waiting import free_port, until

from moestream.upstream import engines
from moestream.upstream.pin import load_pin

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_llama_server.py")
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Home:
    """One MOESTREAM_HOME with the fake engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = self._install()
        self.port = free_port()
        self.started: list[subprocess.Popen[str]] = []
        self.variables: dict[str, str] = {}  # what a test adds to the environment

    def _install(self) -> Path:
        program = self.folder / "data" / "engines" / "fake" / "bin" / "llama-server"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text()}")
        program.chmod(0o755)
        return program

    def _describe(self) -> None:
        """Make the engine match the checkout; before each command, as someone may work in it meanwhile."""
        if not self.server.exists():
            return
        folder = self.server.parents[1]
        engine = engines.Engine(
            id=folder.name, path=folder, source=load_pin().version, sources_sha256=engines.sources_hash(),
            backend="cpu", cpu=engines.cpu_kind(), built_at="", targets=("llama-server",), tools=("llama-server",),
            cmake_args=(), extra_cmake_args=(), web_ui=False, test_series_sha256="",
        )  # fmt: skip
        engines.write_description(engine, folder)

    def environment(self, fake: str = "") -> dict[str, str]:
        self._describe()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "MOESTREAM_"))}
        return {**kept, "MOESTREAM_HOME": str(self.folder), "FAKE_LLAMA": fake, "PYTHONPATH": str(ROOT), **self.variables}

    def popen(self, *arguments: str, fake: str = "", stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "moestream.cli", *arguments],
            env=self.environment(fake), stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *arguments: str, fake: str = "", timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moestream.cli", *arguments],
            env=self.environment(fake), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start_arguments(self, *more: str) -> list[str]:
        return ["start", "--model", str(DEMO), "--slots", "8", "--port", str(self.port), *more]

    def record(self, port: int | None = None) -> dict[str, Any] | None:
        path = self.folder / "state" / "servers" / f"{port or self.port}.json"
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None

    def record_in_state(self, *states: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            record = self.record()
            return record if record and record["state"] in states else None

        return until(found, f"a record in the state {states}")

    def servers(self) -> list[int]:
        """Every process of this home's fake, however it came to be."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.server) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def clean(self) -> None:
        for record in (self.folder / "state" / "servers").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                supervisor = json.loads(record.read_text())["supervisor"]
                process = psutil.Process(supervisor["pid"])
                if process.cmdline() == supervisor["cmdline"]:
                    process.kill()
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        for pid in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
