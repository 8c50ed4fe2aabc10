"""What is made of a server's answers, also of strange ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from moestream.server import report
from moestream.server.client import Health, ServerClient, Stats, base_url, connect_host

STREAMING: dict[str, Any] = {
    "schema": "moestream/stats/1",
    "streaming": True,
    "totals": {"hits": 3, "misses": 1, "bytes_read": 3 << 20, "stall_us": 2500, "read_errors": 2},
    "memory": {"pool_bytes": 1536, "total_bytes": 4096, "note": "later fields need not be numbers"},
}


def client(answer: Callable[[httpx.Request], httpx.Response]) -> ServerClient:
    return ServerClient("http://server", api_key="k", transport=httpx.MockTransport(answer))


def raising(error: type[httpx.HTTPError]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("no")

    return answer


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        (lambda r: httpx.Response(200, json={"status": "ok"}), Health.READY),
        (lambda r: httpx.Response(503, json={"error": {}}), Health.LOADING),
        (lambda r: httpx.Response(200, text="<html>ok</html>"), Health.WRONG),
        (lambda r: httpx.Response(200, json=["ok"]), Health.WRONG),
        (lambda r: httpx.Response(404), Health.WRONG),
        (raising(httpx.ConnectError), Health.REFUSED),
        (raising(httpx.ReadTimeout), Health.SILENT),
        (raising(httpx.RemoteProtocolError), Health.REFUSED),
    ],
)
def test_health(answer: Callable[[httpx.Request], httpx.Response], health: Health) -> None:
    assert client(answer).health() is health


def test_stats_are_asked_with_the_key() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/moe/stats"
        assert request.headers["Authorization"] == "Bearer k"
        return httpx.Response(200, json=STREAMING)

    stats = client(answer).stats()
    assert (stats.available, stats.streaming, stats.hit_rate) == (True, True, 0.75)
    assert stats.memory == {"pool_bytes": 1536, "total_bytes": 4096}
    assert report.memory_line(stats) == "4.0 KiB in all: expert slots 1.5 KiB"
    assert "experts on" not in report.slots_line(stats)
    on_a_card = replace(stats, raw={**stats.raw, "placement": "CUDA0", "memory": {**stats.memory, "device_bytes": 2048}})
    assert report.memory_line(on_a_card) == "4.0 KiB in all, 2.0 KiB of it on devices: expert slots 1.5 KiB"
    assert report.slots_line(on_a_card).endswith(", experts on CUDA0")
    for path, said in (
        ({"in_force": "mailbox", "reason": "as asked"}, ", the card looks after its slots"),
        ({"in_force": "copy", "reason": "--moe-trace"}, ", the host looks after the card's slots (--moe-trace)"),
        ({"in_force": "resident", "reason": ""}, ", experts on CUDA0"),
    ):
        assert report.slots_line(replace(on_a_card, raw={**on_a_card.raw, "gpu_path": path})).endswith(said)
    assert report.traffic_line(stats) == ("hit rate 75.0%, 3 hits, 1 misses, 3.0 MiB read, 2 ms stalled, 2 READ ERRORS")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda r: httpx.Response(404), "no /moe/stats"),
        (lambda r: httpx.Response(401), "API key"),
        (lambda r: httpx.Response(500), "answered 500"),
        (lambda r: httpx.Response(200, text="{"), "speaks None"),
        (lambda r: httpx.Response(200, json={"schema": "moestream/stats/2"}), "moestream/stats/2"),
        (raising(httpx.ConnectError), "ConnectError"),
    ],
)
def test_stats_say_why_there_are_none(answer: Callable[[httpx.Request], httpx.Response], reason: str) -> None:
    stats = client(answer).stats()
    assert not stats.available
    assert reason in stats.reason
    assert report.slots_line(stats).startswith("unknown: ")
    assert report.traffic_line(stats) is None
    assert report.memory_line(stats) is None


def test_streaming_off() -> None:
    stats = Stats(True, raw={"schema": "moestream/stats/1", "streaming": False})
    assert report.slots_line(stats).startswith("off: ")
    assert stats.hit_rate is None


@pytest.mark.parametrize(("requested", "line"), [("8", "none while the server sleeps"), ("off", "off: ")])
def test_slots_of_a_sleeping_server(requested: str, line: str) -> None:
    stats = Stats(True, raw={"schema": "moestream/stats/1", "streaming": False})
    assert report.slots_line(stats, requested=requested, sleeping=True).startswith(line)


def test_slots_in_force() -> None:
    """What is shown is what the engine's own lines say."""
    raw = {
        "streaming": True, "slots": 48, "n_expert": 128, "n_layer_moe": 2, "n_expert_used": 8, "policy": "heat", "overlap": True,
        "map": {"name": "m.map", "pin": 4}, "warm": "60 s", "layers": [{"slots": 24}, {"slots": 48}],
        "io": {"mode": "direct", "threads": 1, "backend": "uring", "in_flight": 8},
    }  # fmt: skip
    assert report.slots_line(Stats(True, raw=raw)) == (
        "24 to 48 of 128 experts in each of 2 MoE layers (8 used per token), policy heat, direct reads, 8 in flight by 1 thread "
        "with io_uring, overlap on, 4 experts of m.map pinned in each, filled beforehand for at most 60 s"
    )
    raw |= {"map": None, "warm": "off", "layers": [{"slots": 48}, {"slots": 48}]}
    raw["io"] = {"mode": "buffered", "threads": 4, "backend": "threads", "in_flight": 4}
    assert report.slots_line(Stats(True, raw=raw)) == (
        "48 of 128 experts in each of 2 MoE layers (8 used per token), policy heat, buffered reads, 4 in flight by 4 threads, overlap on"
    )


def test_no_lookup_yet() -> None:
    stats = Stats(True, raw={"streaming": True, "totals": {"hits": 0, "misses": 0}})
    assert report.traffic_line(stats) == "no expert was looked up yet"


@pytest.mark.parametrize(
    ("bound", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.1.2.3", "10.1.2.3"), ("localhost", "localhost")]
)
def test_a_wildcard_is_reached_through_loopback(bound: str, reached: str) -> None:
    assert connect_host(bound) == reached


def test_base_url() -> None:
    assert base_url("::", 8080) == "http://[::1]:8080"
    assert base_url("127.0.0.1", 1, https=True, prefix="/api/") == "https://127.0.0.1:1/api"


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_size(n_bytes: int, text: str) -> None:
    assert report.size(n_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(59.9, "59 s"), (61, "1 min 1 s"), (3725, "1 h 2 min"), (90000, "1 d 1 h")])
def test_duration(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text
