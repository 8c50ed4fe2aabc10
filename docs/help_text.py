"""Put the commands' ``--help`` into the documentation, so that it cannot differ from the code.

    python docs/help_text.py            rewrite
    python docs/help_text.py --check    exit 1 and name the files that would change

In a Markdown file the text stands between ``<!-- help: COMMAND -->`` and ``<!-- /help -->``; a table of all commands and their exit codes
between ``<!-- commands -->`` and ``<!-- /commands -->``, and the help of all of them between ``<!-- reference -->`` and ``<!-- /reference -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from moestream.app import COMMANDS, COMMON_EXIT_CODES, exit_codes, make_app, module_of

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- help: ([\w -]+?) -->\n).*?(<!-- /help -->)", re.DOTALL)
COMMANDS_BLOCK = re.compile(r"(<!-- commands -->\n).*?(<!-- /commands -->)", re.DOTALL)
REFERENCE = re.compile(r"(<!-- reference -->\n).*?(<!-- /reference -->)", re.DOTALL)
WIDTH = "100"


def help_of(command: str) -> str:
    """The ``--help`` of a command, or of moestream itself, as a terminal of WIDTH columns without colours shows it."""
    environment = {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=environment).invoke(make_app(), [*command.split(), "--help"], prog_name="moestream")
    if result.exit_code != 0:
        raise SystemExit(f"moestream {command} --help failed: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines())


def commands_table() -> str:
    """Every command, what it does, and the exit codes that mean something else than for every command."""
    lines = ["| Command | | Exit codes of its own |", "|---|---|---|"]
    for name in COMMANDS:
        module = module_of(name)
        parts = getattr(module, "SUBCOMMANDS", {"": getattr(module, name.replace("-", "_"), None)})
        for part, function in parts.items():
            codes = {code: text for code, text in exit_codes(name).items() if COMMON_EXIT_CODES.get(code) != text}
            told = "; ".join(f"{code} {text}" for code, text in codes.items())
            summary = (function.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{' '.join(filter(None, [name, part]))}` | {' '.join(summary.split())} | {told} |")
    return "\n".join(lines)


def with_help(text: str) -> str:
    """The text of a Markdown file with its blocks as they should be."""
    text = COMMANDS_BLOCK.sub(lambda m: f"{m[1]}{commands_table()}\n{m[2]}", text)
    return BLOCK.sub(lambda m: f"{m[1]}```text\n{help_of(m[2])}\n```\n{m[3]}", text)


def commands() -> list[str]:
    """Every command in the order of ``--help``, groups before their parts: ``start``, ``trace``, ``trace record``, …"""
    found = []
    for name, command in get_command(make_app()).commands.items():
        found += [name, *(f"{name} {part}" for part in getattr(command, "commands", ()))]
    return found


def reference(pages: dict[str, str]) -> str:
    """The section of each command.

    Args:
        pages: Markdown by file name; the one with the help block of a command says more of it.
    """
    where = {command: name for name, text in pages.items() for _, command, _ in BLOCK.findall(text)}
    sections = [f"### moestream\n\n```text\n{help_of('')}\n```\n"]
    for command in commands():
        more = f"\nMore: [{Path(where[command]).stem}]({where[command]}).\n" if command in where else ""
        sections.append(f"### moestream {command}\n\n```text\n{help_of(command)}\n```\n{more}")
    return "\n".join(sections)


def main() -> int:
    check = "--check" in sys.argv[1:]
    changed = []
    pages = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
    for name, text in pages.items():
        new = with_help(text)
        if REFERENCE.search(new):
            made = reference(pages)
            new = REFERENCE.sub(lambda m, made=made: f"{m[1]}\n{made}\n{m[2]}", new)
        if new != text:
            changed.append(name)
            if not check:
                (DOCS / name).write_text(new, encoding="utf-8")
    if changed:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(changed)}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
