"""What a running llama-server says about itself, over HTTP on this machine."""

from __future__ import annotations

import contextlib
import enum
import ipaddress
from dataclasses import dataclass
from typing import Any

import httpx

STATS_SCHEMA = "moestream/stats/1"


class Health(enum.Enum):
    """What GET /health says."""

    REFUSED = "refused"  # nobody listens
    LOADING = "loading"  # 503: listens, the model is not there yet
    READY = "ready"
    SILENT = "silent"  # accepts connections and does not answer
    WRONG = "wrong"  # answers with something that is no llama-server's health


def connect_host(bind_host: str) -> str:
    """The address to reach a server that listens on ``bind_host``; a wildcard is reached through loopback."""
    try:
        address = ipaddress.ip_address(bind_host)
    except ValueError:
        return bind_host
    if address.is_unspecified:
        return "::1" if address.version == 6 else "127.0.0.1"
    return bind_host


def base_url(host: str, port: int, *, https: bool = False, prefix: str = "") -> str:
    """``http://host:port/prefix`` without a trailing slash, as a client on this machine needs it."""
    reachable = connect_host(host)
    if ":" in reachable:
        reachable = f"[{reachable}]"
    return f"{'https' if https else 'http'}://{reachable}:{port}{prefix.rstrip('/')}"


@dataclass(frozen=True)
class Stats:
    """An answer to GET /moe/stats.

    Attributes:
        available: whether the endpoint exists and speaks our schema.
        reason: why it is not available, empty otherwise.
        raw: the JSON object as it came; fields may have been added since this was written.
    """

    available: bool
    reason: str = ""
    raw: dict[str, Any] | None = None

    @property
    def streaming(self) -> bool:
        return bool(self.raw and self.raw.get("streaming"))

    def total(self, name: str) -> int:
        """A counter of ``totals``, 0 where missing."""
        totals = (self.raw or {}).get("totals") or {}
        return int(totals.get(name) or 0)

    @property
    def hit_rate(self) -> float | None:
        """Hits by look-ups, between 0 and 1; None before the first look-up."""
        hits, misses = self.total("hits"), self.total("misses")
        return hits / (hits + misses) if hits + misses else None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, as the server reports them."""
        memory = (self.raw or {}).get("memory") or {}
        return {k: int(v) for k, v in memory.items() if isinstance(v, int | float)}


class ServerClient:
    """A client for one server. Every call is bounded by ``timeout_s`` and none raises on a failing server.

    Proxies from the environment are not used and certificates are not verified: the server is our own, here.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 2.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url
        self._http = httpx.Client(timeout=timeout_s, trust_env=False, verify=False, headers=headers, transport=transport)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def health(self) -> Health:
        """Ask GET /health once."""
        try:
            response = self._http.get(self.url + "/health")
        except httpx.TimeoutException:
            return Health.SILENT
        except httpx.HTTPError:
            return Health.REFUSED
        if response.status_code == 503:
            return Health.LOADING
        if response.status_code == 200 and _json(response).get("status") == "ok":
            return Health.READY
        return Health.WRONG

    def props(self) -> dict[str, Any]:
        """GET /props, an empty object when it cannot be had."""
        try:
            response = self._http.get(self.url + "/props")
        except httpx.HTTPError:
            return {}
        return _json(response) if response.status_code == 200 else {}

    def sleeping(self) -> bool:
        """Whether it has freed its model until the next request. Does not wake it, nor do ``health`` and ``stats``."""
        return self.props().get("is_sleeping") is True

    def stats(self) -> Stats:
        """GET /moe/stats; says why when there is none."""
        try:
            response = self._http.get(self.url + "/moe/stats")
        except httpx.HTTPError as error:
            return Stats(False, f"GET /moe/stats failed: {type(error).__name__}")
        if response.status_code == 404:
            return Stats(False, "this llama-server has no /moe/stats: it is not moestream's")
        if response.status_code in (401, 403):
            return Stats(False, "GET /moe/stats needs the server's API key")
        if response.status_code != 200:
            return Stats(False, f"GET /moe/stats answered {response.status_code}")
        raw = _json(response)
        if raw.get("schema") != STATS_SCHEMA:
            return Stats(False, f"GET /moe/stats speaks {raw.get('schema')!r}, expected {STATS_SCHEMA!r}")
        return Stats(True, raw=raw)

    def metrics(self) -> dict[str, float]:
        """The samples of GET /metrics that have no labels, by name; none when it cannot be had."""
        try:
            response = self._http.get(self.url + "/metrics")
        except httpx.HTTPError:
            return {}
        found: dict[str, float] = {}
        for line in response.text.splitlines() if response.status_code == 200 else ():
            name, _, value = line.partition(" ")
            if not name.startswith("#") and "{" not in name:
                with contextlib.suppress(ValueError):
                    found[name] = float(value)
        return found

    def decode_rate(self, prompt: str, n_token: int) -> float | None:
        """Let the server write so many tokens; how many a second it says that were, None when it did not."""
        body = {"prompt": prompt, "n_predict": n_token, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        try:
            response = self._http.post(self.url + "/completion", json=body)
        except httpx.HTTPError:
            return None
        timings = _json(response).get("timings") if response.status_code == 200 else None
        rate = timings.get("predicted_per_second") if isinstance(timings, dict) else None
        return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
