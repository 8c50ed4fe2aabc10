"""One run of ``llama-results``: the logits of a text, and what the engine counted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestream.errors import MoestreamError
from moestream.server.process import guarded
from moestream.server.progress import progress
from moestream.server.supervise import in_our_words, stop_on_signals
from moestream.verify import compare
from moestream.verify.compare import Logits

STATS_SCHEMA = "moestream/stats/1"
_SHOWN_LINES = 8
_FLAGS = ("--moe-slots",)  # what is given to verify, and not after --
# of MOESTREAM_CHECK, see stream::note_changed in engine/stream.cpp
_CHANGED = re.compile(r"layer (\d+): (?:slot|slab) \d+ changed while it held expert (\d+)")


@dataclass(frozen=True)
class Run:
    """What came out of a run.

    Attributes:
        stats: docs/stats.md; None when nothing streamed.
    """

    logits: Logits
    stats: dict[str, Any] | None


@dataclass(frozen=True)
class Runner:
    """What all runs have in common.

    Attributes:
        program: ``llama-results``.   model: its first file.   text: the file with the text.   folder: for what is written.
        n_ctx: room for the tokens of the text.   args: of every run.
    """

    program: Path
    model: Path
    text: Path
    folder: Path
    n_ctx: int
    args: tuple[str, ...]

    def __call__(self, what: str, width: int, args: Sequence[str]) -> Run:
        """Compute all logits, ``width`` tokens at a time.

        Args:
            what: the run, for messages.   args: of this run alone.

        Raises:
            MoestreamError: the program failed, in its own words, or was asked to stop (exit code 130).
        """
        out, stats_path = self.folder / "logits.gguf", self.folder / "stats.json"
        out.unlink(missing_ok=True)
        stats_path.unlink(missing_ok=True)
        code, log = self._attend(what, out, width, args, {"MOESTREAM_STATS_FILE": str(stats_path)})
        if code != 0:
            raise failure(what, code, log)
        stats = _stats(stats_path)
        logits = compare.read(out)
        out.unlink()
        return Run(logits, stats)

    def changed_expert(self, what: str, width: int, args: Sequence[str]) -> tuple[int, int] | None:
        """Layer and expert of a slot that changes while it holds one: the run again, every slot checked at every use. None: there is none.

        Raises:
            MoestreamError: it was asked to stop.
        """
        checks = {"MOESTREAM_CHECK": "1", "MOESTREAM_POISON": "1"}
        _, log = self._attend(f"{what}, slots checked", self.folder / "checked.gguf", width, args, checks)
        match = _CHANGED.search(log)
        return (int(match[1]), int(match[2])) if match else None

    def _attend(self, what: str, out: Path, width: int, args: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
        """The program's exit code and log; it ends when this process does."""
        command = [
            str(self.program), "-m", str(self.model), "-f", str(self.text), "-o", str(out), "-c", str(self.n_ctx), "-b", str(self.n_ctx),
            "-ub", str(min(width, self.n_ctx)), *self.args, *args,
        ]  # fmt: skip
        log_path = self.folder / "log"
        # What a user has set for other programs, --moe-slots among it, would reach both sides.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        with (
            log_path.open("wb") as log,
            stop_on_signals(lambda: None) as signals,
            guarded(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**kept, **environment}) as process,
            progress(what, log_path) as show,
        ):
            code = None
            while code is None and not signals:  # what still runs is killed at the end of the block
                try:
                    code = process.wait(0.2)
                except subprocess.TimeoutExpired:
                    show()
        if code is None or signals:  # it may have ended in the same moment
            raise MoestreamError("stopped before everything was compared: nothing is proven", exit_code=130)
        return code, log_path.read_text(encoding="utf-8", errors="replace")


def _stats(path: Path) -> dict[str, Any] | None:
    """None when the engine wrote none.

    Raises:
        MoestreamError: it wrote something else.
    """
    try:
        stats = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise MoestreamError(f"the engine's statistics cannot be read: {error}", hint="is the disk of TMPDIR full?") from error
    if stats.get("schema") != STATS_SCHEMA:
        raise MoestreamError(
            f"the engine's statistics have schema {stats.get('schema')!r}, not {STATS_SCHEMA!r}", hint="moestream build"
        )
    return stats if stats.get("streaming") else None


def failure(what: str, code: int, log: str) -> MoestreamError:
    """Why a run came to nothing, in the program's own words."""
    lines = [line for line in log.splitlines() if line.strip()]
    for line in lines:
        if "error loading model: " in line:
            said = in_our_words(line.rsplit("error loading model: ", 1)[1], _FLAGS)
            message, _, hint = said.partition("; hint: ")
            return MoestreamError(f"{what}: {message}", hint=hint or "does moestream start serve this model?")
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        if code == -signal.SIGKILL:
            return MoestreamError(
                f"{what}: llama-results was killed ({name})",
                hint="the kernel kills what uses too much memory: fewer --slots, fewer --tokens, or --reference mapped",
            )
        end = f"was ended by {name}"
    else:
        end = f"ended with {code}"
    last = "\n  ".join(deque(lines, _SHOWN_LINES))
    return MoestreamError(f"{what}: llama-results {end}" + (f"; its last lines were:\n  {last}" if lines else ""))
