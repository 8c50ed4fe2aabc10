"""The documentation says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from doc_commands import moestream_commands

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "help_text.py"


def test_help_texts_are_current() -> None:
    """When this fails: python docs/help_text.py"""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_help_text_is_noticed(tmp_path: Path) -> None:
    text = "<!-- help: stop -->\nold\n<!-- /help -->\n"
    (tmp_path / "x.md").write_text(text)
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    command = [sys.executable, str(script)]
    check = subprocess.run([*command, "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (check.returncode, check.stdout) == (1, "out of date: x.md\n")
    assert (tmp_path / "x.md").read_text() == text
    assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0
    assert "Usage: moestream stop [OPTIONS]" in (tmp_path / "x.md").read_text()


def test_options_in_serving_exist() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    prose, reference = text.split("## Reference")
    used = {
        o for line in re.findall(r"moestream \w+[^\n`]*", prose) for o in re.findall(r"(?<= )--[a-z-]+", line.split(" -- ")[0])
    }
    assert "--detach" in used
    assert used <= set(re.findall(r"--[a-z-]+", reference))


def test_the_reference_has_every_command_with_every_option() -> None:
    known = moestream_commands()
    assert {"start", "trace", "trace record", "map forget"} <= set(known)
    text = (ROOT / "docs" / "commands.md").read_text()
    for name, command in known.items():
        section = text.split(f"\n### moestream {name}\n", 1)[1].split("\n### ", 1)[0]
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                for option in (*parameter.opts, *parameter.secondary_opts):
                    there = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", section)
                    assert there or not option.startswith("-"), f"{name} {option}"
