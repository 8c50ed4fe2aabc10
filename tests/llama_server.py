"""A real llama-server of the engine in use, for one test or one module."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from fixture_models import tool
from waiting import free_port, until

READY_DEADLINE_S = 60.0


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without the settings of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "MOESTREAM_", "GGML_"))}
    return {**kept, **(more or {})}


def completion_body(prompt: str | list[int], n_tokens: int, **more: Any) -> dict[str, Any]:
    """What /completion is asked: greedy, the prompt computed in full each time, exactly so many tokens."""
    return {
        "prompt": prompt, "n_predict": n_tokens, "temperature": 0, "seed": 1, "cache_prompt": False,
        "return_tokens": True, "ignore_eos": True, **more,
    }  # fmt: skip


class LlamaServer:
    """Ready when entered, ended when left. Plain kernels, so that answers can be compared bit for bit."""

    def __init__(self, model: Path, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.model = model
        self.log = log
        self.arguments = arguments
        self.env = environment(env)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(
                max_keepalive_connections=0
            ),  # a connection for each request: none is left for the server to hold
        )

    def __enter__(self) -> LlamaServer:
        command = [
            str(tool("llama-server")), "-m", str(self.model), "--host", "127.0.0.1", "--port", str(self.port),
            "--no-repack", "--metrics", "--no-ui", "-c", "2048", "-t", "1", "-np", "1", "--cache-ram", "0", *self.arguments,
        ]  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env)
        try:
            until(self._ready, "the server to be ready", READY_DEADLINE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"llama-server ended with {self.process.returncode}:\n{self.tail()}"
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None and self.http.get("/health").status_code == 200

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-30:])

    def post_completion(self, prompt: str | list[int], n_tokens: int, **more: Any) -> httpx.Response:
        return self.http.post("/completion", json=completion_body(prompt, n_tokens, **more))

    def complete(self, prompt: str | list[int], n_tokens: int, **more: Any) -> list[int]:
        """The tokens of the answer."""
        answer = self.post_completion(prompt, n_tokens, **more)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{self.tail()}"
        tokens = answer.json()["tokens"]
        assert len(tokens) == n_tokens
        return tokens

    def stats(self) -> dict[str, Any]:
        answer = self.http.get("/moe/stats")
        assert answer.status_code == 200
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics whose names start with ``moestream_``, by name with labels. Every such line must parse."""
        answer = self.http.get("/metrics")
        assert answer.status_code == 200
        samples: dict[str, float] = {}
        for line in answer.text.splitlines():
            if line.startswith("moestream_"):
                match = re.fullmatch(r'(moestream_[a-z0-9_]+(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})?) (\d+)', line)
                assert match, line
                assert match[1] not in samples, line
                samples[match[1]] = float(match[2])
        return samples
