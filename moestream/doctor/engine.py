"""The engine in use."""

from __future__ import annotations

import shlex
import subprocess

from moestream import __version__
from moestream.doctor.checks import Check, Finding, Remedy
from moestream.errors import MoestreamError
from moestream.upstream import engines
from moestream.upstream.engines import Engine

_TIMEOUT_S = 60

ENGINE = Check(
    "engine",
    "which engine is used, that it is of this version of moestream and of this processor, and that its server runs",
    {
        "none": Remedy("none matches this version of moestream and this processor", "{hint}"),
        "unreadable": Remedy("the folder of engines cannot be read", "check the permissions of {path}, or set MOESTREAM_HOME"),
        "incomplete": Remedy("programs are missing in its folder", "build or download it again: rm -r {path}; moestream build --backend {backend}"),
        "broken": Remedy(
            "`llama-server --version` does not run",
            "a library may be missing; build or download it again: rm -r {path}; moestream build --backend {backend}",
        ),
    },
)  # fmt: skip


def engine(backend: str | None) -> tuple[Finding, Engine | None]:
    """Args: backend: that is asked for; None for any. Returns the engine too, where one can be used."""
    everything: list[Engine] = []
    try:
        everything = engines.installed()
        used = engines.in_use(backend)
    except OSError as error:
        return ENGINE.fail("unreadable", f"{error.filename}: {error.strerror}", {"path": error.filename}), None
    except MoestreamError as error:
        there = (
            f" ({len(everything)} others are there: {', '.join(e.id for e in everything[:3])}{', …' * (len(everything) > 3)})"
        )
        return ENGINE.fail("none", error.message + there * bool(everything), {"hint": error.hint}), None
    where = {"path": shlex.quote(str(used.path)), "backend": used.backend}
    missing = [tool for tool in used.tools if not (used.bin_dir / tool).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return ENGINE.fail("incomplete", f"{used.id}: {missing[0]}{more} is missing in {used.bin_dir}", where), None
    if problem := _runs(used):
        return ENGINE.fail("broken", f"{used.id}: llama-server --version: {problem}", where), None
    kind = f"for any {used.cpu.rpartition('-')[0]} processor" if used.portable else "for this processor"
    origin = "" if not used.source.startswith("src.") else ", built with --source"
    text = f"{used.id}: {used.backend}, {kind}{origin}; matches moestream {__version__}"
    return ENGINE.ok(
        text, id=used.id, backend=used.backend, portable=used.portable, bin_dir=str(used.bin_dir), installed=len(everything)
    ), used


def _runs(used: Engine) -> str | None:
    """Why its server does not run; None when it does."""
    try:
        program = used.tool("llama-server")
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_TIMEOUT_S,
        )  # fmt: skip
    except MoestreamError as error:
        return error.message
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stdout.strip().splitlines()
    how = f"exit code {done.returncode}" if done.returncode > 0 else f"ended by signal {-done.returncode}"
    return f"{how}{': ' + lines[-1] if lines else ''}"
