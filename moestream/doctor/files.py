"""The configuration, and the files of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moestream import config, gguf_facts, model_names
from moestream.config import Merged
from moestream.doctor.checks import Check, Finding, Remedy
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.models.download import has_content
from moestream.models.store import Entry, ModelStore, PulledModel, size_of
from moestream.server.report import size

CONFIG = Check(
    "config",
    "moestream.yaml and the variables MOESTREAM_…",
    {
        "wrong": Remedy("something in them is wrong", "{hint}"),
        "unread": Remedy(
            "a variable is read by nothing", "correct its name, or unset it; moestream config show says what is in force"
        ),
    },
)
MODEL = Check(
    "model",
    "with MODEL: that it is found, its header is consistent, all shards are there and none is truncated",
    {
        "wrong": Remedy("one of these is not so", "{hint}"),
        "dense": Remedy(
            "it has no experts: nothing can be streamed", "serve it without streaming: moestream start --slots off"
        ),
    },
)
LENGTH = Check(
    "model-length",
    "with MODEL: whether each file ends where its header says",
    {
        "longer": Remedy("one is longer", "something was appended to it, or a download went wrong: download it again"),
    },
)
CONTENT = Check(
    "model-content",
    "with MODEL and --hash: whether the files are what the hub said when they were pulled (sha256); all of them is read",
    {
        "size": Remedy("a file has another size than that of the record of the pull", "moestream rm {name} and moestream pull hf:{name}"),
        "different": Remedy("the content differs", "moestream rm {name} and moestream pull hf:{name}; when it happens again, check drive and memory"),
        "unreadable": Remedy("a file cannot be read", "check the permissions and the drive: sudo dmesg | tail"),
    },
)  # fmt: skip


def settings(
    given: Mapping[str, Any], environment: Mapping[str, str], load: Callable[[], Sequence[config.ConfigFile]] = config.load
) -> tuple[Finding, Merged | None]:
    """Put the settings of a start together.

    Args:
        given: options of the command line.
    """
    try:
        found = load()
        merged = config.merge(given, environment, found)
    except MoestreamError as error:
        return CONFIG.fail("wrong", error.message, {"hint": error.hint or "moestream config check"}), None
    if unread := config.unknown_variables(environment):
        return CONFIG.warn("unread", "; ".join(unread)), merged
    return CONFIG.ok(", ".join(str(file.path) for file in found) or "no moestream.yaml; the built-in settings"), merged


def model(merged: Merged) -> tuple[Finding, GgufFacts | None]:
    """Find and read a model's header."""
    try:
        facts = gguf_facts.read(model_names.locate(merged))
    except MoestreamError as error:
        return MODEL.fail("wrong", error.message, {"hint": error.hint}), None
    n_file = len(facts.files)
    text = (
        f"{facts.files[0]}: {facts.architecture}, {size(facts.total_bytes)} in {n_file} {'file' if n_file == 1 else 'shards'}"
    )
    data = {
        "path": str(facts.files[0]), "architecture": facts.architecture, "files": n_file, "size_bytes": facts.total_bytes,
        "expert_bytes": facts.expert_bytes, "n_expert": facts.n_expert, "n_expert_used": facts.n_expert_used,
    }  # fmt: skip
    if not facts.is_moe:
        return MODEL.warn("dense", f"{text}, no experts", **data), facts
    return MODEL.ok(f"{text}, {facts.n_expert_used} of {facts.n_expert} experts used", **data), facts


def length(facts: GgufFacts) -> Finding:
    """Shorter ones are found by :func:`model`."""
    for path, there, end in zip(facts.files, facts.file_bytes, facts.end_bytes, strict=True):
        if there > end:
            return LENGTH.warn(
                "longer", f"{path} has {there} bytes, and its header accounts for {end}", excess_bytes=there - end
            )
    return LENGTH.ok("as the header says")


def record_of(facts: GgufFacts, store: ModelStore) -> PulledModel | None:
    """The record of the pull that brought these files; None where they came in another way."""
    ours = {os.path.realpath(file) for file in facts.files}
    for entry in store.all():
        if isinstance(entry, Entry) and entry.whole and ours <= {os.path.realpath(path) for path in entry.whole.paths}:
            return entry.whole
    return None


def content(
    facts: GgufFacts, store: ModelStore, *, hashed: bool, progress: Callable[[int, int], None] = lambda done, total: None
) -> Finding:
    """Args: hashed: read everything.   progress: is told bytes read and all bytes."""
    record = record_of(facts, store)
    if record is None:
        return CONTENT.skipped("no record of moestream pull: nothing to compare with")
    name = {"name": record.name}
    for file in record.files:
        there = size_of(record.path(file))
        if there != file.size_bytes:
            return CONTENT.fail("size", f"{record.path(file)} has {there} bytes, and the hub's has {file.size_bytes}", name)
    if not hashed:
        return CONTENT.skipped(f"--hash compares all {size(record.size_bytes)} with the record of moestream pull")
    done = 0

    def step(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done, record.size_bytes)

    for file in record.files:
        try:
            same = has_content(file, record.path(file), step)
        except OSError as error:
            return CONTENT.fail("unreadable", f"{record.path(file)}: {error.strerror or error}")
        if not same:
            return CONTENT.fail(
                "different", f"{record.path(file)} is not what the hub said: {file.digest.partition(':')[0]}", name
            )
    return CONTENT.ok(f"{len(record.files)} of {len(record.files)} files are what the hub said at commit {record.commit[:10]}")
