"""A streamed answer of a llama-server: its tokens, when each came, and where two answers part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from moestream.errors import MoestreamError


class NoAnswer(MoestreamError):
    """The server did not answer as asked.

    Args:
        late: whether the time was over.
    """

    def __init__(self, message: str, *, hint: str | None = None, late: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.late = late


@dataclass(frozen=True)
class Part:
    """A piece of the answer.

    Attributes:
        n_tokens: tokens of the answer up to here.
        token: id of the last one. Of several that make one character the server tells the last alone.
        text: what was added.
    """

    n_tokens: int
    token: int
    text: str


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        parts: in order.
        at_s: when each part came, in seconds from the request.
        computed_s: when the server had computed each, in seconds from the end of the prompt, as each part says; a client that others
            keep from running is late, and these are not. Empty where a part does not say.
        text: all of it.
        timings: what the server itself measured (``prompt_n``, ``prompt_ms``, …).
    """

    parts: tuple[Part, ...]
    at_s: tuple[float, ...]
    computed_s: tuple[float, ...]
    text: str
    timings: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Of token ids and text."""
        what = [[part.n_tokens, part.token] for part in self.parts]
        return hashlib.sha256(json.dumps([what, self.text]).encode()).hexdigest()

    @property
    def arrivals(self) -> list[tuple[int, float]]:
        """Tokens so far, and when."""
        return [(part.n_tokens, at) for part, at in zip(self.parts, self.computed_s or self.at_s, strict=True)]


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the first token, counted from 1, and what each has there (None: nothing any more)."""

    token: int
    first: Part | None
    second: Part | None

    def __str__(self) -> str:
        return f"token {self.token}: {_shown(self.first)} and {_shown(self.second)}"


def _shown(part: Part | None) -> str:
    return "nothing" if part is None else f"{part.token} {part.text!r}"


def first_difference(first: Answer, second: Answer, n_tokens: int | None = None) -> Difference | None:
    """Compare two answers to the same question, token by token.

    Args:
        n_tokens: compare so many tokens; all when None.

    Returns:
        None when they are the same.
    """

    def known(answer: Answer) -> dict[int, Part]:
        return {part.n_tokens: part for part in answer.parts if n_tokens is None or part.n_tokens <= n_tokens}

    a, b = known(first), known(second)
    for number in sorted(a.keys() | b.keys()):
        x, y = a.get(number), b.get(number)
        if number == n_tokens and (x is None or y is None):
            continue  # the middle of a character, which the end of the shorter answer has cut
        if x is None or y is None or (x.token, x.text) != (y.token, y.text):
            return Difference(number, x, y)
    if n_tokens is None and first.text != second.text:
        return Difference(max(a, default=0) + 1, None, None)
    return None


class Asker:
    """Asks one server. Used for one question at a time.

    Args:
        url: of the server, without a trailing slash.
        timeout_s: for each question.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        # A connection for each question: the server closes idle ones when it likes, and a question on one of those is lost.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, verify=False, headers=headers, limits=fresh)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def tokens_of(self, text: str) -> list[int]:
        """The ids of a text's tokens, special ones included where the model begins with one.

        Raises:
            NoAnswer: it cannot be had.
        """
        with _told(self._timeout_s):
            response = self._http.post("/tokenize", json={"content": text, "add_special": True})
            _check(response.status_code, response.text)
            tokens = response.json()["tokens"]
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise NoAnswer(f"the server's tokens are not understood: {str(tokens)[:100]}")
        return tokens

    def complete(self, prompt: Sequence[int], n_tokens: int, on_first: Callable[[], None] = lambda: None) -> Answer:
        """Have the server go on from a prompt: greedy, a fixed seed, nothing kept of earlier questions, exactly ``n_tokens``.

        Args:
            prompt: token ids.
            on_first: called when the first token is there; what it takes is missing from the second token's time.

        Raises:
            NoAnswer: it ended, answered with an error, with fewer tokens, or not in time.
        """
        body = {
            "prompt": list(prompt), "n_predict": n_tokens, "temperature": 0, "seed": 1, "cache_prompt": False, "ignore_eos": True,
            "return_tokens": True, "stream": True, "timings_per_token": True,
        }  # fmt: skip
        parts: list[Part] = []
        at: list[float] = []
        computed: list[float] = []
        end: dict[str, Any] = {}
        begun = time.monotonic()
        with _told(self._timeout_s), self._http.stream("POST", "/completion", json=body) as response:
            if response.status_code != 200:
                _check(response.status_code, response.read().decode("utf-8", "replace"))
            for line in response.iter_lines():
                now = time.monotonic() - begun
                if now > self._timeout_s:
                    raise NoAnswer(_late(self._timeout_s), hint="give it longer with --timeout SECONDS", late=True)
                if line.startswith("error: "):
                    raise NoAnswer(f"the server answered with an error: {_message(line.removeprefix('error: '))}")
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise NoAnswer(f"the server answered with an error: {_message(json.dumps(event))}")
                if event.get("stop"):
                    end = event
                elif event["tokens"]:
                    parts.append(Part(event["tokens_predicted"], event["tokens"][-1], event["content"]))
                    at.append(now)
                    if (ms := (event.get("timings") or {}).get("predicted_ms")) is not None:
                        computed.append(ms / 1e3)
                    if len(parts) == 1:
                        on_first()
        if not end:
            raise NoAnswer(f"the answer ended after {parts[-1].n_tokens if parts else 0} of {n_tokens} tokens")
        if end.get("tokens_predicted") != n_tokens or not parts:
            raise NoAnswer(f"the server answered with {end.get('tokens_predicted')} tokens instead of {n_tokens}")
        text = "".join(part.text for part in parts) + str(end.get("content") or "")
        if len(computed) < len(parts):
            computed = []
        return Answer(tuple(parts), tuple(at), tuple(computed), text, dict(end.get("timings") or {}))


def _late(timeout_s: float) -> str:
    return f"there was no whole answer within {timeout_s:g} s"


@contextlib.contextmanager
def _told(timeout_s: float):
    try:
        yield
    except httpx.TimeoutException as error:
        raise NoAnswer(_late(timeout_s), hint="give it longer with --timeout SECONDS", late=True) from error
    except httpx.HTTPError as error:
        raise NoAnswer(f"the connection to the server was lost: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"the server's answer is not understood: {type(error).__name__}: {error}") from error


def _check(status: int, body: str) -> None:
    if status != 200:
        raise NoAnswer(f"the server answered {status}: {_message(body)}")


def _message(body: str) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.strip()[:200] or "nothing"
