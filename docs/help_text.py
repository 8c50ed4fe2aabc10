"""Put the commands' ``--help`` into the documentation, so that it cannot differ from the code.

    python docs/help_text.py            rewrite
    python docs/help_text.py --check    exit 1 and name the files that would change

In a Markdown file the text stands between ``<!-- help: COMMAND -->`` and ``<!-- /help -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from moestream.app import make_app

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"(<!-- help: ([\w -]+?) -->\n).*?(<!-- /help -->)", re.DOTALL)
WIDTH = "100"


def help_of(command: str) -> str:
    """The ``--help`` of a command, as a terminal of WIDTH columns without colours shows it."""
    environment = {"COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=environment).invoke(make_app(), [*command.split(), "--help"], prog_name="moestream")
    if result.exit_code != 0:
        raise SystemExit(f"moestream {command} --help failed: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip("\n").splitlines())


def with_help(text: str) -> str:
    """The text of a Markdown file with its help blocks as they should be."""
    return BLOCK.sub(lambda m: f"{m[1]}```text\n{help_of(m[2])}\n```\n{m[3]}", text)


def main() -> int:
    check = "--check" in sys.argv[1:]
    changed = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = with_help(text)
        if new != text:
            changed.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if changed:
        print(f"{'out of date' if check else 'rewritten'}: {', '.join(changed)}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
