"""The entry point: runs a command and reports what it raises. The commands themselves are put together in ``app``.

Nothing is imported here that takes time: Ctrl-C is handled from the first moment.

Exit codes: 0 done; 1 (or the error's own) an expected failure; 2 wrong usage; 70 a bug in moestream; 74 stdout cannot
be written; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moestream import output
from moestream.errors import MoestreamError

if TYPE_CHECKING:
    import typer

EXIT_BUG = 70
EXIT_INTERRUPTED = 130  # as shells report SIGINT


def _load() -> typer.Typer:
    """Import the commands. Ctrl-C meanwhile ends the process without a word: no import is made to be interrupted."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with contextlib.suppress(ValueError):  # not the main thread
        if quiet:
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        from moestream.app import make_app

        return make_app()
    finally:
        with contextlib.suppress(ValueError):
            if quiet:
                signal.signal(signal.SIGINT, signal.default_int_handler)


def _verbose_first(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Let ``--verbose`` stand anywhere before ``--``; what follows belongs to llama-server."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    head, rest = list(arguments[:end]), list(arguments[end:])
    verbose = "--verbose" in head
    return [argument for argument in head if argument != "--verbose"] + rest, verbose


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def print_error(error: MoestreamError) -> None:
    """Print an expected failure to stderr."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. ``arguments`` defaults to those of the process."""
    args, verbose = _verbose_first(sys.argv[1:] if arguments is None else arguments)
    try:
        output.prepare()
        _load()(args=args, prog_name="moestream")
    except MoestreamError as error:
        if verbose:
            _print_traceback()
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if verbose:
            _print_traceback()
        print(f"error: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: this is a bug in moestream; run again with --verbose and report it", file=sys.stderr)
        sys.exit(EXIT_BUG)


if __name__ == "__main__":
    main()
