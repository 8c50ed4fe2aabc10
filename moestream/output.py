"""Standard output and error, made fit for use before anything is printed.

Writing to stdout either works or is one plain error; it is never a bug of moestream, whoever printed: a command,
``--help``, a demo. A character that the encoding lacks is escaped, for it is no reason to fail. What cannot be written
to stderr is lost, and the exit code tells.
"""

from __future__ import annotations

import io
import os
import sys

from moestream.errors import MoestreamError

EXIT_OUTPUT = 74  # EX_IOERR of sysexits.h


class _Stdout(io.FileIO):
    """File descriptor 1, whose errors say what they are."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # whoever read it has seen enough
        except OSError as error:
            _to_nowhere(1)  # what is left in buffers would fail again at the end of the process
            raise MoestreamError(
                f"cannot write to stdout: {error.strerror or error}",
                hint="the disk may be full; send stdout elsewhere, or to /dev/null",
                exit_code=EXIT_OUTPUT,
            ) from error


class _Stderr(io.FileIO):
    """File descriptor 2; losing a message must not change what the program does."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` of a real process; captured ones (tests) are left alone.

    Raises:
        MoestreamError: stdout is closed.
    """
    closed = sys.__stdout__ is None and sys.stdout is None
    # A closed 0, 1 or 2 would become the number of the next file or socket, and be printed into.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.__stderr__, line_buffering=True)
    if closed:
        raise MoestreamError(
            "cannot write to stdout: it is closed", hint="send it to /dev/null: >/dev/null", exit_code=EXIT_OUTPUT
        )
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.__stdout__, line_buffering=os.isatty(1))


def _text(raw: io.FileIO, like: io.TextIOWrapper | object, *, line_buffering: bool) -> io.TextIOWrapper:
    encoding = getattr(like, "encoding", None) or "utf-8"
    errors = getattr(like, "errors", None) or "strict"
    if errors in ("strict", "surrogateescape"):  # the defaults; another one was asked for
        errors = "backslashreplace"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=line_buffering)


def _to_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
