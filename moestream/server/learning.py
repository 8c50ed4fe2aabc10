"""What a server starts with and leaves behind of its model's routing: the kept router map, and the trace that goes into it.

Files beside the server's record, for as long as it runs: ``PORT.map``, a copy of the kept map that nothing changes while the engine may
read it again (it does after sleep); and ``PORT.trace``, which the engine writes. Nothing in here keeps a server from starting, serving
or ending: what goes wrong is returned as a line to be told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.server.arguments import ServerSettings, flag_of, value_after
from moestream.server.records import RecordStore, ServerRecord, make_private

if TYPE_CHECKING:
    from moestream.routing.maps import RouterMap

# The package of routing needs numpy. A supervisor in the background imports it when its server has ended, not for all the time it waits.

# Some 20,000 tokens of a large model; read in less than a second when the server ends.
TRACE_LIMIT_MIB = 16
# What the engine writes before it serves, its header, is smaller than this.
_TRIED_BYTES = 64 << 10


@dataclass(frozen=True)
class Wishes:
    """Whether a server starts with the kept map, and whether it adds to it."""

    use: bool
    learn: bool


@dataclass(frozen=True)
class Learning:
    """What a plan says of it. JSON-serialisable.

    Attributes:
        learn: whether routing is recorded.
        kept_path: where the model's map is kept, or will be.
        tokens: what the map stands for that slots are filled by; 0 when there is none.
        map_text: that map, as JSON; None when there is none.
        problem: why a map that is kept is not used; empty where it is, or none is kept.
    """

    learn: bool
    kept_path: str
    tokens: int = 0
    map_text: str | None = None
    problem: str = ""


def is_by_card(settings: ServerSettings, backend: str) -> bool:
    """Whether a card may look after its slots by itself: then it records nothing, and a server that has to looks after them instead. Pure."""
    extra = settings.extra
    on_cpu = any(flag_of(a) in ("--cpu-moe", "-cmoe") for a in (*extra, *settings.planned))
    layers = value_after((*extra, *settings.planned), "-ngl", "--gpu-layers", "--n-gpu-layers")
    others = settings.gpu_path == "copy" or settings.pool == "host" or settings.policy not in (None, "lru")
    return backend == "cuda" and not (on_cpu or layers == "0" or others)


def wishes(settings: ServerSettings, environment: Mapping[str, str], *, by_card: bool = False) -> Wishes:
    """What was asked for. Pure.

    A server has one map and one trace: one that the user gave, by a flag, after ``--`` or in llama-server's own environment, is it.

    Args:
        by_card: see :func:`is_by_card`; nothing is learned then unless it is asked for.

    Raises:
        MoestreamError: ``--learn on`` beside a trace of the user's own.
    """
    if not settings.streaming:
        return Wishes(False, False)
    traced = next((a for a in settings.extra if flag_of(a) in ("--moe-trace", "--moe-trace-limit")), None) or next(
        (name for name in ("LLAMA_ARG_MOE_TRACE", "LLAMA_ARG_MOE_TRACE_LIMIT") if environment.get(name)), None
    )
    if traced and settings.learn == "on":
        raise MoestreamError(
            f"--learn on cannot be combined with {traced}: a server records one trace",
            hint="leave out one of them; moestream map make makes a map of a trace",
        )
    kept_map = settings.kept_map
    if kept_map is None:
        kept_map = settings.map is None and not environment.get("LLAMA_ARG_MOE_MAP")
    return Wishes(
        use=kept_map and settings.warm != "off",  # the engine refuses a map that nothing is done with
        learn=not traced and (kept_map and not by_card if settings.learn is None else settings.learn == "on"),
    )


def plan_for(
    settings: ServerSettings, facts: GgufFacts, store: RecordStore, environment: Mapping[str, str], *, by_card: bool = False
) -> tuple[Learning | None, list[str]]:
    """Find the kept map of a model, after what crashed servers have left is added.

    Returns:
        None when nothing of it was asked for or can be had; and lines to be told.

    Raises:
        MoestreamError: the wishes contradict each other.
    """
    wanted = wishes(settings, environment, by_card=by_card)
    if not wanted.use and not wanted.learn:
        return None, []
    from moestream.routing import kept
    from moestream.routing.fingerprint import fingerprint

    try:
        own = fingerprint(facts)
        path = kept.path_of(own)
    except MoestreamError as error:  # a truncated model: the engine says so better
        return None, [f"warning: no router map is used or kept: {error.message}"]
    said = take_in_leftovers(store)
    if not wanted.learn and wishes(settings, environment).learn:
        said.append(
            "notice: nothing is added to the kept router map: a card looks after its slots, and records nothing (--learn on: the host does both, slower)"
        )
    if wanted.learn:
        try:
            kept.check_writable()
        except MoestreamError as error:
            said.append(f"warning: what is recorded cannot be added to the kept router map now: {error.message} ({error.hint})")
    router_map, problem = None, ""
    if wanted.use:
        try:
            router_map = kept.read_for(facts, own)
        except MoestreamError as error:
            problem = error.message
            said.append(f"warning: the kept router map is not used: {error.message} ({error.hint})")
    if router_map is not None:
        said.append(
            f"notice: slots are filled by what was chosen most in {_count(router_map.tokens)}, as kept in {path} (--no-map: without)"
        )
        return Learning(wanted.learn, str(path), router_map.tokens, _text(router_map)), said
    return Learning(wanted.learn, str(path), problem=problem), said


def _text(router_map: RouterMap) -> str:
    return json.dumps(router_map.as_json()) + "\n"


def _count(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def begin(learning: Learning, store: RecordStore, port: int) -> tuple[list[str], list[str]]:
    """Put the files in place; the caller has claimed the port.

    Returns:
        arguments for llama-server, and lines to be told.
    """
    argv: list[str] = []
    said: list[str] = []
    if learning.map_text is not None:
        path = store.map_path(port)
        try:
            make_private(path.parent)
            path.write_text(learning.map_text, encoding="utf-8")
            argv += ["--moe-map", str(path)]
        except OSError as error:
            said.append(f"warning: the kept router map is not used: cannot write {path}: {error.strerror}")
    if learning.learn:
        path = store.trace_path(port)
        try:
            store.skip_path(port).unlink(missing_ok=True)
            _try_to_write(path)
            argv += ["--moe-trace", str(path), "--moe-trace-limit", str(TRACE_LIMIT_MIB)]
        except OSError as error:
            said.append(f"warning: nothing is recorded for the kept router map: cannot write {path}: {error.strerror}")
    return argv, said


def _try_to_write(path: Path) -> None:
    """Leave an empty file that has room to grow: the engine refuses to start with a trace that it cannot write."""
    free = shutil.disk_usage(path.parent).free
    if free < 2 * TRACE_LIMIT_MIB << 20:
        raise OSError(0, f"there are only {free >> 20} MiB free, and a trace may take {TRACE_LIMIT_MIB}")
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        left = _TRIED_BYTES
        while left > 0:
            left -= os.write(fd, bytes(left))
        os.ftruncate(fd, 0)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def end(learning: Learning, store: RecordStore, port: int) -> tuple[Path | None, list[str]]:
    """Take the files away, for the port to be free for others; the server has been reaped.

    Returns:
        what was recorded, for ``take_in``; and lines to be told.
    """
    with contextlib.suppress(OSError):
        store.map_path(port).unlink(missing_ok=True)
    if not learning.learn:
        return None, []
    try:
        return store.put_aside_trace(port, ours=True), []
    except MoestreamError as error:
        return None, [f"warning: what was recorded is not in the kept router map: {error.message}"]


def take_in(recorded: Path, *, last_try: bool = False) -> list[str]:
    """Add a trace to the kept map, and delete it. Returns lines to be told.

    Args:
        last_try: delete it when it is no trace that could ever be added; else the next start tries again.
    """
    try:
        from moestream.routing import kept

        kept_path, tokens, complaint = kept.take_in(recorded)
    except (MoestreamError, OSError, MemoryError, ImportError) as error:  # ImportError: moestream was replaced meanwhile
        why = error.message if isinstance(error, MoestreamError) else str(error)
        if last_try and not _is_readable(recorded):
            with contextlib.suppress(OSError):
                recorded.unlink(missing_ok=True)
        what_now = "the next start tries again" if recorded.exists() else "it is lost"
        return [f"warning: what was recorded is not added to the kept router map: {why}; {what_now}"]
    said = [f"warning: {complaint}"] if complaint else []
    if tokens:
        said.append(f"notice: the choices of {_count(tokens)} are added to the router map {kept_path}")
    return said


def _is_readable(recorded: Path) -> bool:
    try:
        from moestream.routing import trace

        trace.read(recorded)
    except (MoestreamError, OSError):
        return False
    except (MemoryError, ImportError):
        pass
    return True


def take_in_leftovers(store: RecordStore) -> list[str]:
    """Add what servers have recorded that could not do so themselves: after a crash, or a full disk.

    Returns:
        lines to be told, of what went wrong alone.
    """
    said: list[str] = []
    with contextlib.suppress(MoestreamError, OSError):
        for port in store.ports_with_traces():
            store.put_aside_trace(port)
        for path in store.recorded():
            said += [line for line in take_in(path, last_try=True) if line.startswith("warning")]
    return said


def _records(record: ServerRecord, store: RecordStore) -> bool:
    return str(store.trace_path(record.port)) in record.argv


def can_leave_out(record: ServerRecord, store: RecordStore, environment: Mapping[str, str]) -> bool:
    """Whether tokens can be kept out of the kept map: a server that may sleep counts from 0 when it wakes, and its trace goes on."""
    sleeps = any(flag_of(a) == "--sleep-idle-seconds" for a in record.argv) or environment.get("LLAMA_ARG_SLEEP_IDLE_SECONDS")
    return not (_records(record, store) and sleeps)


def leave_out(record: ServerRecord, store: RecordStore, first: int, end: int) -> None:
    """Keep tokens of a server that runs out of the kept map: those that it computes as its ``first``, up to ``end``, counted from 0.

    A server that records nothing for it has nothing to leave out. What cannot be written down is kept with the rest.
    """
    if first < end and _records(record, store):
        with contextlib.suppress(OSError), store.skip_path(record.port).open("a", encoding="utf-8") as file:
            file.write(f"{first} {end}\n")


def recording(store: RecordStore) -> list[ServerRecord]:
    """Servers that run and will add to a kept map when they end."""
    return [r for r in store.all() if isinstance(r, ServerRecord) and r.alive and _records(r, store)]


def kept_path_of(record: ServerRecord) -> str | None:
    """Where the map of a server's model is kept; None when its file cannot be read any more."""
    from moestream import gguf_facts
    from moestream.routing import kept
    from moestream.routing.fingerprint import fingerprint

    with contextlib.suppress(MoestreamError):
        return str(kept.path_of(fingerprint(gguf_facts.read(Path(record.model)))))
    return None


def as_json(learning: Learning | None, argv: Sequence[str]) -> dict[str, Any] | None:
    """For the report of a start: what is in force, as the arguments show it."""
    if learning is None:
        return None
    used = "--moe-map" in argv and learning.map_text is not None
    return {
        "path": learning.kept_path,
        "used": used,
        "tokens": learning.tokens if used else 0,
        "learning": learning.learn and "--moe-trace" in argv,
        "problem": learning.problem or None,
    }
