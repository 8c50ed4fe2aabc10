"""Every command says what it exits with, in its help and on one page; shells complete what is typed."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moestream import app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
WORDS = [
    [name, *([part] if part else [])]
    for name in app.COMMANDS
    for part in getattr(app.module_of(name), "SUBCOMMANDS", {"": None})
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """moestream as a program of its own, with a home that has nothing."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MOESTREAM_", "_MOESTREAM", "_TYPER", "LLAMA_"))}
    return subprocess.run(
        [sys.executable, "-m", "moestream.cli", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60,
        stdin=subprocess.DEVNULL, env={**plain, "MOESTREAM_HOME": "/nonexistent", "COLUMNS": "300", "TERMINAL_WIDTH": "300", **environment},
    )  # fmt: skip


# --- exit codes ---


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every command, made in this process."""
    from typer.testing import CliRunner

    made, runner = app.make_app(), CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300", "NO_COLOR": "1", "TERM": "dumb"})
    return {" ".join(words): runner.invoke(made, [*words, "--help"]).output for words in WORDS}


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_help_says_what_it_exits_with(words: list[str], helps: dict[str, str]) -> None:
    said = " ".join(helps[" ".join(words)].split()).partition("Exit codes: ")[2]
    codes = app.exit_codes(words[0])
    assert {0, 1, 2, 70, 74, 130} <= set(codes)
    own = {code for code, text in codes.items() if app.COMMON_EXIT_CODES.get(code) != text}
    for code in {0, 1, 2} | own:
        assert f"{code} {codes[code]}" in said
    for code in set(codes) - {0, 1, 2} - own:
        assert re.search(rf"As for every command: [^.]*\b{code}\b", said)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_the_page_has_it_too(words: list[str]) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{' '.join(words)}` |")]
    for code, text in app.exit_codes(words[0]).items():
        assert f"| {code} | {text} |" in PAGE or f"{code} {text}" in line


@pytest.mark.parametrize("name", app.COMMANDS)
def test_no_command_exits_with_a_code_that_is_not_told(name: str) -> None:
    """Those that its module names, or gives to an error or to Typer."""
    module = app.module_of(name)
    codes = {value for key, value in vars(module).items() if key.startswith("EXIT_") and isinstance(value, int)}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call):
            continue
        given = [word.value for word in node.keywords if word.arg == "exit_code"]
        if ast.unparse(node.func) in ("typer.Exit", "sys.exit"):
            given += node.args
        codes |= {value.value for value in given if isinstance(value, ast.Constant)}
    assert codes <= set(app.exit_codes(name))


def test_such_a_code_would_be_found() -> None:
    assert {3, 4} <= set(app.exit_codes("verify")) and 3 not in app.exit_codes("status")


# --- completion ---


def completions(shell: str, typed: str) -> list[str]:
    """What a shell is given for a line; each asks in its own way."""
    words = typed.split(" ")
    asked = {
        "bash": {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = run(_MOESTREAM_COMPLETE=f"complete_{shell}", **asked)
    assert done.stderr == ""
    if shell == "zsh":
        return re.findall(r'(?:^|\()"([^"]+)"', done.stdout, re.MULTILINE)
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_is_completed(shell: str) -> None:
    assert {"start", "status", "stop"} <= set(completions(shell, "moestream st"))
    assert "--slots" in completions(shell, "moestream start --sl")
    assert completions(shell, "moestream start --policy l")[:2] == ["lru", "lfu"]
    assert completions(shell, "moestream start --slots a")[:2] == ["auto", "all"]
    assert "cuda" in completions(shell, "moestream start --backend cu")
    assert "forget" in completions(shell, "moestream map fo")


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _moestream_completion moestream"),
        ("zsh", "compdef _moestream_completion moestream"),
        ("fish", "complete --command moestream"),
    ],
)
def test_the_script_of_a_shell(shell: str, registers: str) -> None:
    done = run(_MOESTREAM_COMPLETE=f"source_{shell}")
    assert done.stderr == "" and registers in done.stdout and "_MOESTREAM_COMPLETE=complete_" in done.stdout
    program = shutil.which(shell)
    if program is not None:  # where the shell is here, it understands it
        assert subprocess.run([program, "-n"], input=done.stdout, text=True, capture_output=True, timeout=60).stderr == ""


def test_bash_completes(tmp_path: Path) -> None:
    """The whole way: the shell is found, its script is loaded, and its own function is called."""
    bash = shutil.which("bash")
    assert bash is not None, "bash is needed"
    program = tmp_path / "moestream"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m moestream.cli "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(moestream --show-completion)"
        COMP_WORDS=(moestream start --policy l) COMP_CWORD=3
        _moestream_completion moestream
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([bash, "--norc", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "lru lfu\n", "")


def test_a_shell_that_is_not_known() -> None:
    done = run(_MOESTREAM_COMPLETE="source_nosuch")
    assert done.returncode == 1 and "not supported" in done.stderr and done.stdout == ""
