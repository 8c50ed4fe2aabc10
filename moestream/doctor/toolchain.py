"""What ``moestream build`` needs. Where an engine is there already, what is missing is a warning only."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from moestream.doctor.checks import Check, Finding, Remedy
from moestream.errors import MoestreamError
from moestream.upstream import build, patches
from moestream.upstream.machine import version_numbers

_TIMEOUT_S = 30
_OLDEST_CMAKE = "3.18"
# Headers of the library and of the language's version that the engine is written in; nothing is linked.
_SAMPLE = "#include <atomic>\n#include <vector>\nstd::vector<int> v;\nint main() { if (auto n = v.size(); n) return 1; }\n"

COMPILER = Check(
    "compiler",
    "the C and C++ compilers, and that the latter compiles C++17 with its library's headers",
    {
        "missing": Remedy("there is none", "{hint}"),
        "broken": Remedy("it does not compile a small program", "sudo apt-get install gcc g++, or name others with CC and CXX"),
    },
)
BUILD_TOOLS = Check(
    "build-tools",
    "cmake and ninja",
    {
        "missing": Remedy("one is missing", "{hint}"),
        "broken": Remedy("one does not run", "install it anew: python -m pip install --force-reinstall cmake ninja"),
        "old": Remedy("cmake is older than 3.18", "python -m pip install --upgrade cmake"),
    },
)
GIT = Check(
    "git",
    "git, which applies the patches",
    {
        "missing": Remedy("it is missing", "{hint}"),
        "broken": Remedy("it does not run", "install it anew: sudo apt-get install --reinstall git"),
    },
)


def _run(command: Sequence[str], text: str = "") -> tuple[bool, str]:
    """Whether a program ends well, and the first line that it says, or the reason."""
    try:
        done = subprocess.run(list(command), input=text, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except OSError as error:
        return False, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {_TIMEOUT_S} s"
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode:
        return False, said[0] if said else f"exit code {done.returncode}"
    return True, said[0] if said else ""


def compiler(*, needed: bool) -> Finding:
    """Args: needed: no engine is there that could be used without one."""
    try:
        _, cxx = build.find_compilers()
    except MoestreamError as error:
        return COMPILER.problem(needed, "missing", error.message, {"hint": error.hint})
    good, said = _run([cxx, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"], _SAMPLE)
    if not good:
        return COMPILER.problem(needed, "broken", f"{cxx} does not compile a small program: {said}")
    good, said = _run([cxx, "--version"])
    return COMPILER.ok(said if good and said else cxx)


def build_tools(*, needed: bool) -> Finding:
    """Args: needed: as for :func:`compiler`."""
    try:
        cmake, ninja = build.find_build_tools()
    except MoestreamError as error:
        return BUILD_TOOLS.problem(needed, "missing", error.message, {"hint": error.hint})
    found = []
    for program in (cmake, ninja):
        good, said = _run([program, "--version"])
        version = re.search(r"[0-9]+(?:\.[0-9]+)+", said)
        if not good or not version:
            return BUILD_TOOLS.problem(needed, "broken", f"{program} --version: {said or 'says nothing'}")
        found.append(version[0])
    text = f"cmake {found[0]}, ninja {found[1]}"
    if version_numbers(found[0]) < version_numbers(_OLDEST_CMAKE):
        return BUILD_TOOLS.problem(needed, "old", f"{text}: cmake {_OLDEST_CMAKE} is needed")
    return BUILD_TOOLS.ok(text)


def git(*, needed: bool) -> Finding:
    """Args: needed: as for :func:`compiler`."""
    try:
        program = patches.find_git()
    except MoestreamError as error:
        return GIT.problem(needed, "missing", error.message, {"hint": error.hint})
    good, said = _run([program, "--version"])
    return GIT.ok(said) if good else GIT.problem(needed, "broken", f"{program} --version: {said}")
