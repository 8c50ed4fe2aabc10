"""``moestream pull``: download a model from a hub."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream.errors import MoestreamError
from moestream.models import names
from moestream.models.pull import pull as pull_model
from moestream.models.store import Entry
from moestream.progress import Bar
from moestream.result import Result
from moestream.server import report
from moestream.server.supervise import notice


class _Bar(Bar):
    def __init__(self) -> None:
        super().__init__(of_bytes=True)
        self._done, self._total = 0, 0

    def step(self, text: str) -> None:
        self.say(text)

    def begin(self, text: str, done_bytes: int, total_bytes: int) -> None:
        self._text, self._done, self._total = text, done_bytes, total_bytes
        self._tenth = done_bytes * 10 // max(total_bytes, 1)
        went_on = f", {report.size(done_bytes)} are there already" if done_bytes else ""
        self.say(f"{text}: {report.size(total_bytes)}{went_on}")

    def advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        self.progress(self._done, self._total)


def pull(
    model: Annotated[
        str, typer.Argument(metavar="hf:OWNER/REPO[:QUANT]", help="The model; without QUANT the usual one of those there are.")
    ],
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder for its files.", show_default="OWNER/REPO below moestream's models"),
    ] = None,
) -> Result:
    """Download a model from a hub, or what is missing of it."""
    reference = names.parse(model)
    start_s = time.monotonic()
    try:
        with _Bar() as bar:
            outcome = pull_model(reference, to=to, reporter=bar)
    except KeyboardInterrupt:
        notice("interrupted; what came so far stays, and the same command goes on from there")
        raise
    elapsed_s = time.monotonic() - start_s
    entry = Entry(whole=outcome.model)
    facts, problem = facts_of(entry)
    pulled = outcome.model
    data: dict[str, Any] = {
        **describe(entry, facts, problem),
        "downloaded_bytes": outcome.downloaded_bytes,
        "resumed_bytes": outcome.resumed_bytes,
        "elapsed_s": round(elapsed_s, 1),
    }
    did = f"{report.size(outcome.downloaded_bytes)} in {report.duration(elapsed_s)}"
    if outcome.resumed_bytes:
        did += f", {report.size(outcome.resumed_bytes)} were there already"
    if not outcome.downloaded_bytes and not outcome.resumed_bytes:
        did = "nothing: it is all there"
    off = " --slots off" if facts is not None and not facts.is_moe else ""
    rows = [
        ("model", pulled.name),
        ("files", f"{len(pulled.files)}, {report.size(pulled.size_bytes)}"),
        ("path", str(pulled.paths[0])),
        ("experts", experts_line(facts) if facts else None),
        ("downloaded", did),
        ("problem", problem),
        ("next", f"moestream start --model {pulled.name}{off}" if facts else None),
    ]
    return Result("pull", data, report.table(rows))


def facts_of(entry: Entry) -> tuple[Any, str | None]:
    """What the header of a model that is complete says, or why it cannot be read."""
    if entry.state() != "complete":
        return None, entry.problem()
    try:
        return entry.facts(), None
    except MoestreamError as error:
        return None, error.message


def experts_line(facts: Any) -> str:
    """Experts and architecture, for a person."""
    if not facts.is_moe:
        return f"none ({facts.architecture}): there is nothing to stream"
    return f"{facts.n_expert}, a token uses {facts.n_expert_used} ({facts.architecture})"


def describe(entry: Entry, facts: Any, problem: str | None) -> dict[str, Any]:
    """A model as JSON, as ``pull`` and ``list`` print it."""
    model = entry.model
    return {
        "name": entry.name,
        "repo": model.repo_id,
        "quant": model.quant or None,
        "commit": model.commit,
        "state": entry.state(),
        "problem": problem,
        "path": str(model.paths[0]),
        "folder": model.folder,
        "files": [
            {"path": str(model.path(file)), "size_bytes": file.size_bytes, "digest": file.digest, "made_by_pull": file.made}
            for file in model.files
        ],
        "shards": len(model.files),
        "size_bytes": model.size_bytes,
        "present_bytes": entry.present_bytes(),
        "update_pending": entry.whole is not None and entry.pending is not None,
        "architecture": facts.architecture if facts else None,
        "is_moe": facts.is_moe if facts else None,
        "n_expert": facts.n_expert if facts else None,
        "n_expert_used": facts.n_expert_used if facts else None,
    }
