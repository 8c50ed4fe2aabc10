"""The commands of the command line: assembles them and renders what they return.

A command is a module ``moestream/commands/NAME.py`` with a function ``NAME`` (``-`` becomes ``_``), or, for a group
of commands, with their functions by name in ``SUBCOMMANDS``. A
function takes Typer parameters and returns a :class:`moestream.result.Result`, or None when it has printed
everything itself. One that goes on after it has something to report, as ``start`` and ``logs -f`` do, yields its
results. ``--json`` is added here to every command, and its exit codes to its help: a module says with ``EXIT_CODES`` which it has
beside those of every command.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Annotated

import typer

from moestream import __version__
from moestream.result import Result, emit

# One line a command, in the order of --help.
COMMANDS: tuple[str, ...] = (
    "build",
    "download-bins",
    "pack-bins",
    "engines",
    "pull",
    "list",
    "rm",
    "plan",
    "start",
    "stop",
    "status",
    "logs",
    "trace",
    "map",
    "verify",
    "bench",
    "config",
    "doctor",
)


# What every command may end with; a command's own words for a code stand in its module.
COMMON_EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "an error, with its message on stderr",
    2: "wrong usage",
    70: "a bug in moestream",
    74: "stdout cannot be written: the disk is full, or it is closed",
    130: "interrupted by Ctrl-C",
}
_IN_EVERY_HELP = (0, 1, 2)


def module_of(name: str) -> ModuleType:
    """The module of a command in ``COMMANDS``."""
    return importlib.import_module("moestream.commands." + name.replace("-", "_"))


def exit_codes(name: str) -> dict[int, str]:
    """What a command may end with, in ascending order."""
    return dict(sorted((COMMON_EXIT_CODES | getattr(module_of(name), "EXIT_CODES", {})).items()))


def _epilog(name: str) -> str:
    own = getattr(module_of(name), "EXIT_CODES", {})
    told = [f"{code} {text}" for code, text in exit_codes(name).items() if code in _IN_EVERY_HELP or code in own]
    others = [str(code) for code in COMMON_EXIT_CODES if code not in _IN_EVERY_HELP and code not in own]
    return f"Exit codes: {'; '.join(told)}. As for every command: {', '.join(others)} (docs/commands.md)."


def _rendered(function: Callable[..., Result | Iterator[Result] | None]) -> Callable[..., None]:
    """Wrap a command: add ``--json`` and print what it returns."""

    @functools.wraps(function)
    def run(*args: object, as_json: bool, **kwargs: object) -> None:
        result = function(*args, **kwargs)
        if isinstance(result, Generator):
            # Closed here and not by the garbage collector: a failing print must end what the command has started.
            with contextlib.closing(result):
                for part in result:
                    emit(part, as_json=as_json)
        elif result is not None:
            emit(result, as_json=as_json)

    option = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
    signature = inspect.signature(function, eval_str=True)
    parameters = [
        *signature.parameters.values(),
        inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option),
    ]
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    # Typer reads the hints of the innermost function when it sees one, and would miss --json.
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moestream {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")] = False,
) -> None:
    """Run mixture-of-experts models that do not fit in memory."""


def make_app() -> typer.Typer:
    """The Typer application with every command in ``COMMANDS``."""
    # Plain help text: it is part of the docs and must not depend on the width of a terminal.
    app = typer.Typer(
        name="moestream",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name in COMMANDS:
        module = module_of(name)
        if hasattr(module, "SUBCOMMANDS"):
            group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=module.HELP)
            for part, function in module.SUBCOMMANDS.items():
                group.command(part, epilog=_epilog(name))(_rendered(function))
            app.add_typer(group, name=name)
            continue
        app.command(name, epilog=_epilog(name))(_rendered(getattr(module, name.replace("-", "_"))))
    return app
