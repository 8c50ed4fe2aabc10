"""The commands of README.md and docs/, run as they stand there; and the options of the engine's programs that the pages name.

Each page gets a folder with what it takes for granted: ``x.gguf`` and ``model.gguf`` (the demo model), texts, a ``moestream.yaml`` (the page's own,
else that of docs/config.md), an empty home with the engine that is built, and a hub on this machine that has the repositories which the
pages name. Commands then run in the page's order, in a shell. What is not run is marked in the page, with the reason: ``doc_commands.py``.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import doc_commands
import pytest
from doc_commands import ROOT, Command, name_of, options_in, options_of_help, simple_commands
from engine_fixtures import DEMO
from fake_hub import FakeHub, Repo, fake_hub
from fixture_models import tool
from llama_server import environment
from waiting import free_port, until

from moestream.upstream import engines

DEADLINE_S = 120
# A model of each repository that a page names, so that no page needs a network: the demo model's bytes under their names.
HUB = {
    "ggml-org/gpt-oss-20b-GGUF": "gpt-oss-20b-mxfp4.gguf",
    "unsloth/Qwen3-30B-A3B-GGUF": "Qwen3-30B-A3B-Q4_K_M.gguf",
    "unsloth/Qwen3-235B-A22B-GGUF": "Qwen3-235B-A22B-Q4_K_M.gguf",
}
# The same work in less of it.
QUICKER = {
    "moestream bench": "moestream bench --runs 1 --tokens 8 --prompt 16",
    "moestream verify": "moestream verify --tokens 16",
    "--tokens 1000": "--tokens 100",
}
# What a command may end with beside 0, because it depends on the machine: doctor finds something missing, speed is not as planned.
ALSO_FINE = {"doctor": 3, "plan --check": 1}
# What ends on Ctrl-C alone, and what it prints once it does its work.
UNTIL_CTRL_C = {"start": "ready after", "logs": "\n", "moestream.demo": "serving until Ctrl-C", "llama-server": "listening on"}

COMMANDS = {name_of(page): doc_commands.commands(name_of(page), page.read_text()) for page in doc_commands.pages()}
TO_RUN = {page: [c for c in found if c.why_not is None] for page, found in COMMANDS.items()}


class Desk:
    """Where somebody sits who tries what a page says."""

    def __init__(self, folder: Path, page: str, hub: FakeHub) -> None:
        self.here = folder / "here"
        self.ports: dict[str, str] = {}
        programs, home, person = folder / "programs", folder / "home", folder / "person"
        for made in (self.here, programs, home / "data" / "engines", home / "config", person / "models"):
            made.mkdir(parents=True)
        engine = engines.in_use("cpu")
        (home / "data" / "engines" / engine.id).symlink_to(engine.path)
        (home / "config" / "moestream.yaml").write_text(f"defaults:\n  port: {self._port('8080')}\n")
        (programs / "moestream").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moestream.cli "$@"\n')
        (programs / "moestream").chmod(0o755)
        for model in (
            "here/x.gguf",
            "here/model.gguf",
            "person/models/coder-30b-q4_k_m.gguf",
            "person/models/writer-20b-mxfp4.gguf",
        ):
            (folder / model).symlink_to(DEMO)
        (self.here / "demo").symlink_to(DEMO.parent)
        for name in ("text.txt", "other.txt"):
            (self.here / name).write_text(
                f"The purpose of {name} is to describe a command that reads its input line by line.\n"
            )
        (self.here / "keys.txt").write_text("one-secret\nanother-secret\n")
        texts = [(ROOT / name).read_text() for name in (page, "docs/config.md")]
        settings = next(found for text in texts for found in doc_commands.yaml_of(page, text))
        (self.here / "moestream.yaml").write_text(self.with_ports(settings))
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), str(engine.bin_dir), os.environ["PATH"]])
        self.environment = environment(
            {
                "MOESTREAM_HOME": str(home), "HOME": str(person), "PATH": path, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url,
                "HF_HOME": str(folder / "hf"), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
            }
        )  # fmt: skip

    def _port(self, number: str) -> str:
        return self.ports.setdefault(number, str(free_port()))

    def with_ports(self, text: str) -> str:
        """Free ports in the place of those that pages name: 8080 and the like may be taken."""
        return re.sub(r"\b80[89]\d\b", lambda m: self._port(m[0]), text)

    def run(self, command: Command) -> None:
        text = self.with_ports(command.text)
        for long, short in QUICKER.items():
            text = text.replace(long, short, 1)
        words = simple_commands(text)[-1]
        code, out, err = self._run(text, words)
        if code == 1 and (stop := re.search(r"^hint: stop it: (moestream stop --port \d+);", err, re.MULTILINE)):
            # the page has shown one server and goes on to another: do what the hint says
            assert self._run(stop[1], stop[1].split())[0] == 0
            code, out, err = self._run(text, words)
        fine = {0, *(also for name, also in ALSO_FINE.items() if f"moestream {name}" in text)}
        assert code in fine and "Traceback" not in err, f"{command.where}: {command.text}\nended with {code}\n{out}\n{err}"

    def _run(self, text: str, words: list[str]) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        out, err = self.here.parent / "out", self.here.parent / "err"
        terminal, other_end = pty.openpty()  # moestream rm asks on it
        os.write(terminal, b"y\n")
        stdin = other_end if words[:2] == ["moestream", "rm"] else subprocess.DEVNULL
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                ["bash", "-c", text], cwd=self.here, env=self.environment, stdin=stdin, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        try:
            if sign := _until_ctrl_c(words):

                def works() -> bool:
                    return process.poll() is not None or sign in out.read_text() + err.read_text()

                until(works, f"{sign!r} of {text}", DEADLINE_S)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
            code = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(terminal)
            os.close(other_end)
        return code, out.read_text(errors="replace"), err.read_text(errors="replace")

    def leave(self) -> None:
        code, out, err = self._run("moestream stop --all", ["moestream", "stop"])
        assert code == 0, out + err


def _until_ctrl_c(words: list[str]) -> str | None:
    """What a command prints when it works, that then goes on until Ctrl-C; None for one that ends by itself."""
    for name, sign in UNTIL_CTRL_C.items():
        if name in words[:3] and not {"--detach", "-d"} & set(words) and (name != "logs" or {"-f", "--follow"} & set(words)):
            return sign
    return None


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as made:
        for name, file in HUB.items():
            made.repos[name] = Repo({file: DEMO.read_bytes()})
        yield made


@pytest.mark.parametrize("page", [page for page, found in TO_RUN.items() if found])
def test_commands_of_a_page(page: str, hub: FakeHub, tmp_path: Path) -> None:
    desk = Desk(tmp_path, page, hub)
    try:
        for command in TO_RUN[page]:
            desk.run(command)
    finally:
        desk.leave()


def test_most_commands_are_run() -> None:
    """So that marks stay what they are for."""
    n_run = sum(map(len, TO_RUN.values()))
    assert n_run > 60 and n_run > sum(map(len, COMMANDS.values())) / 2
    assert {"README.md", "docs/serving.md", "docs/models.md", "docs/many-users.md"} <= {p for p, c in TO_RUN.items() if c}


def test_a_command_that_fails_is_noticed(hub: FakeHub, tmp_path: Path) -> None:
    desk = Desk(tmp_path, "README.md", hub)
    with pytest.raises(AssertionError, match=r"page:7: moestream start --model no\.gguf"):
        desk.run(Command("page", 7, "moestream start --model no.gguf"))
    with pytest.raises(AssertionError, match="ended with 127"):
        desk.run(Command("page", 7, "llama-serve -m x.gguf"))


# ---- options of the engine's programs

# In running text there are options of others, too: whose.
OTHERS = {
    "--gpus": "docker", "--memory": "docker", "--interleave": "numactl", "--rw": "fio", "--bs": "fio", "--direct": "fio",
    "--prefetch-experts": "ik_llama.cpp", "-moe-cache-experts": "goinfer", "-require-backend": "goinfer", "-march": "gcc", "-C": "pip", "-DCMAKE": "cmake", "-DGGML": "cmake", "-p1": "patch",
}  # fmt: skip
PASSED_TO = {"start": "llama-server", "bench": "llama-server", "verify": "llama-results", "trace record": "llama-completion"}


@cache
def options_of(program: str) -> frozenset[str]:
    """Of a program of the engine, from its ``--help``."""
    done = subprocess.run([tool(program), "--help"], capture_output=True, text=True, env=environment(), timeout=60)
    found = options_of_help(done.stdout + done.stderr)
    assert len(found) > 3, done.stdout + done.stderr
    return found


@cache
def options_of_bench() -> frozenset[str]:
    """Of the programs of bench/, from their sources."""
    return frozenset(o for file in (ROOT / "bench").glob("*.*") for o in re.findall(r"\"(--[a-z][a-z-]*)\"", file.read_text()))


def unknown(words: list[str]) -> list[str]:
    """The options of a command line that the program of the engine, which it is for, does not have."""
    program = Path(words[0]).name
    if program.startswith("llama-") or program == "moe-replay-policy":
        return [o for o in options_in(words[1:]) if o not in options_of(program)]
    if program == "moestream" and "--" in words:
        name = " ".join(words[1:3]) if " ".join(words[1:3]) in PASSED_TO else words[1]
        passed_to = PASSED_TO[name]
        return [o for o in options_in(words[words.index("--") + 1 :]) if o not in options_of(passed_to)]
    if program == "python" and words[1].startswith("bench/"):
        known = options_of_bench() | options_of("llama-bench")
        return [o for o in options_in(words[2:]) if o not in known]
    return []


def test_options_of_commands_exist() -> None:
    wrong = []
    for page in doc_commands.pages():
        name, text = name_of(page), page.read_text()
        for command in (*COMMANDS[name], *doc_commands.unit_commands(name, text)):
            for words in simple_commands(command.text):
                wrong += [f"{command.where}: {option} of {words[0]}" for option in unknown(words)]
    assert not wrong, "\n".join(wrong)


def test_options_in_running_text_exist() -> None:
    programs = ("llama-server", "llama-bench", "llama-completion", "llama-perplexity", "llama-results", "moe-replay-policy")
    known = {*OTHERS, *options_of_bench(), *(o for program in programs for o in options_of(program))}
    for name in doc_commands.moestream_commands():
        known |= doc_commands.moestream_options(name)
    wrong = []
    for page in doc_commands.pages():
        for line, span in doc_commands.spans(page.read_text()):
            words = span.split()
            if span.startswith("-"):
                options = [o for o in options_in(words) if o not in known and not o.endswith("-")]  # `--moe-…`: all of them
            elif words[0].startswith(("llama-", "moe-replay")) or (words[0] == "moestream" and "--" in words[:-1]):
                options = unknown(words) if len(words) > 1 else []
            else:
                options = []
            wrong += [f"{name_of(page)}:{line}: {option} in `{span}`" for option in options]
    assert not wrong, "\n".join(wrong)


def test_an_option_that_is_not_there_is_noticed() -> None:
    assert unknown(["llama-server", "-m", "x", "--moe-slot", "8"]) == ["--moe-slot"]
    assert unknown(["llama-bench", "-m", "x", "--metrics"]) == ["--metrics"]
    assert unknown(["moestream", "start", "x", "--", "--n-gpu-layer", "9"]) == ["--n-gpu-layer"]
    assert unknown(["python", "bench/small_box.py", "--slot", "9"]) == ["--slot"]
    assert unknown(["llama-server", "-m", "x", "--moe-slots", "8", "-ngl", "-1"]) == []
