"""Clients of a llama-server, well-behaved and not, and what a process holds while they come and go."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from llama_server import LlamaServer, completion_body


def events(server: LlamaServer, prompt: str | list[int], n_tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer. Closing the iterator early closes the connection."""
    body = completion_body(prompt, n_tokens, stream=True, **more)
    with server.http.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def complete_streamed(server: LlamaServer, prompt: str, n_tokens: int, **more: Any) -> list[int]:
    """The tokens of an answer that comes one by one."""
    tokens: list[int] = []
    for event in events(server, prompt, n_tokens, **more):
        assert "error" not in event, event
        tokens += event["tokens"]
    assert len(tokens) == n_tokens
    return tokens


def cancel(server: LlamaServer, prompt: str, n_tokens: int, after: int, **more: Any) -> list[int]:
    """Close the connection after some tokens of a streamed answer; they are returned."""
    tokens: list[int] = []
    with contextlib.closing(events(server, prompt, n_tokens, **more)) as stream:
        for event in stream:
            tokens += event["tokens"]
            if len(tokens) >= after:
                break
    return tokens


def _connection(server: LlamaServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def _request(prompt: str, n_tokens: int, **more: Any) -> bytes:
    body = json.dumps(completion_body(prompt, n_tokens, **more)).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def reset(server: LlamaServer, prompt: str, n_tokens: int, *, stream: bool) -> None:
    """Ask, read the beginning if there will be one, and drop the connection with a reset instead of a close."""
    with _connection(server) as s:
        s.sendall(_request(prompt, n_tokens, stream=stream))
        if stream:
            s.recv(64)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_request(server: LlamaServer, prompt: str, rng: random.Random) -> None:
    """Send the beginning of a request, cut somewhere, and close."""
    request = _request(prompt, 10)
    with _connection(server) as s:
        s.sendall(request[: rng.randrange(1, len(request))])


def garbage(server: LlamaServer, rng: random.Random) -> None:
    """Something that is no HTTP."""
    with _connection(server) as s:
        s.sendall(rng.randbytes(200) + b"\r\n\r\n")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    n_fds: int
    n_threads: int


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.memory_info().rss, len(os.listdir(f"/proc/{pid}/fd")), process.num_threads())


def open_model_files(pid: int, model: Path) -> int:
    """How many descriptors a process has open on a file, even when it was moved or removed."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(fd).removesuffix(" (deleted)") == str(model)
    return found
