"""The commands of README.md and docs/*.md: taken from the pages, and held against the programs that they call.

A command is a line of a block ```` ```sh ````, or a line of a block ```` ```text ```` that begins with ``$ `` (an example with its output). Each is
run by ``tests/e2e/test_docs_commands.py`` unless a comment in front of the block, which no reader of the rendered page sees, says why not::

    <!-- not run: needs an NVIDIA card -->                the whole block
    <!-- not run `pip install`: the wheel's tests do -->  its lines that begin so

Whatever is marked is still parsed: the command exists, and so do its options, with values that it takes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from moestream.app import make_app
from moestream.commands.plan import check_cache_type
from moestream.commands.trace import parse_list
from moestream.errors import MoestreamError
from moestream.models import names
from moestream.server.arguments import (
    check_extra,
    check_io_threads,
    check_ram_tier,
    check_top_k,
    check_warm,
    parse_slots,
)
from moestream.sizes import parse_size
from moestream.upstream import cuda

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("sh", "text", "json", "yaml", "python", "ini")

_FENCE = re.compile(r"```(.*)")
_MARK = re.compile(r"<!-- not run(?: `(?P<begins>[^`]+)`)?: (?P<why>\S.*?) -->")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


class DocError(Exception):
    """Something in a page is not as it has to be; the message says where."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: number of its first line in the page.
        before: the comments directly in front of it, last one last.
    """

    page: str
    line: int
    language: str
    lines: tuple[str, ...]
    before: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """What somebody would type.

    Attributes:
        text: for a shell; a line that goes on behind a backslash is one command.
        why_not: the reason of the mark that keeps it from being run.
    """

    page: str
    line: int
    text: str
    why_not: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        DocError: one has no language of LANGUAGES, or does not end; a mark stands in front of none.
    """
    found: list[Block] = []
    comments: list[str] = []
    inside: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.fullmatch(line.strip())
        if inside is not None:
            if fence and not fence[1]:
                start, language, lines = inside
                found.append(Block(page, start + 1, language, tuple(lines), tuple(comments)))
                inside, comments = None, []
            else:
                inside[2].append(line)
        elif fence:
            if fence[1] not in LANGUAGES:
                raise DocError(
                    f"{page}:{number}: a block of {repr(fence[1]) if fence[1] else 'no language'}: expected {', '.join(LANGUAGES)}"
                )
            inside = (number, fence[1], [])
        elif line.startswith("<!--"):
            comments.append(line)
        else:
            _no_mark(page, number, comments)
            comments = []
    if inside is not None:
        raise DocError(f"{page}:{inside[0]}: the block does not end")
    _no_mark(page, number, comments)
    return found


def _no_mark(page: str, number: int, comments: Sequence[str]) -> None:
    for comment in comments:
        if "not run" in comment:
            raise DocError(f"{page}:{number}: a mark that stands in front of no block: {comment}")


def commands(page: str, text: str) -> list[Command]:
    """The commands of a page, in order.

    Raises:
        DocError: see :func:`blocks`; a mark is not of the form above, or is of no command.
    """
    found = []
    for block in blocks(page, text):
        marks = []
        for comment in block.before:
            if "not run" in comment:
                if not (mark := _MARK.fullmatch(comment)):
                    raise DocError(f"{page}:{block.line}: not understood: {comment}")
                marks.append((mark["begins"], mark["why"]))
        unused = set(marks)
        for line, typed in _typed(block):
            of_it = [mark for mark in marks if mark[0] is None or typed.startswith(mark[0])]
            unused -= set(of_it[:1])
            found.append(Command(page, line, typed, of_it[0][1] if of_it else None))
        for begins, why in unused:
            raise DocError(f"{page}:{block.line}: the mark of no command in the block: {begins or why}")
    return found


def _typed(block: Block) -> Iterator[tuple[int, str]]:
    """What is typed in a block, by line."""
    lines = iter(enumerate(block.lines, block.line))
    for number, line in lines:
        if block.language == "text":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        elif block.language != "sh" or not line.strip() or line.lstrip().startswith("#"):
            continue
        while line.endswith("\\"):
            line += "\n" + next(lines, (0, ""))[1]
        yield number, line


def yaml_of(page: str, text: str) -> list[str]:
    """The files moestream.yaml of a page: blocks of yaml whose first line says so."""
    return [
        "\n".join(block.lines) + "\n"
        for block in blocks(page, text)
        if block.language == "yaml" and block.lines and block.lines[0] == "# moestream.yaml"
    ]


def simple_commands(text: str) -> list[list[str]]:
    """The words of each program that a shell would start for a command line.

    Raises:
        ValueError: a quotation mark is missing.
    """
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if skip:
            skip = False
        elif set(word) <= set("<>"):
            skip = True  # the file that follows
        elif set(word) <= set("();&|"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in map(_without_prefix, found) if words]


def _without_prefix(words: list[str]) -> list[str]:
    """Without settings of variables, and without what runs a program as somebody else."""
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("sudo", "exec")):
        words = words[1:]
    return words


def unit_commands(page: str, text: str) -> list[Command]:
    """What units of systemd in a page start."""
    return [
        Command(page, number, line.removeprefix("ExecStart="))
        for block in blocks(page, text)
        if block.language == "ini"
        for number, line in enumerate(block.lines, block.line)
        if line.startswith("ExecStart=")
    ]


# ---- moestream's own options


@cache
def _program() -> Any:
    return get_command(make_app())


@cache
def moestream_commands() -> Mapping[str, Any]:
    """The commands of the command line by name, those of a group as ``trace record``; groups too."""
    found = {}
    for name, command in _program().commands.items():
        found[name] = command
        found |= {f"{name} {part}": inner for part, inner in getattr(command, "commands", {}).items()}
    return found


@cache
def moestream_options(name: str = "") -> frozenset[str]:
    """All spellings of the options of a command, and those that every command takes; without a name those in front of any."""
    parameters = (moestream_commands()[name] if name else _program()).params
    own = (opt for p in parameters for opt in (*p.opts, *p.secondary_opts) if opt.startswith("-"))
    return frozenset((*own, "--help", "--verbose"))


def _each(check: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: [check(part) for part in text.split(",")]


def _slots(*words: str) -> Callable[[str], object]:
    return lambda text: parse_slots(text, words)


# What a command checks itself and not the library that reads the options; by parameter, and by command where they differ.
_VALUES: Mapping[str, Callable[[Any], object]] = {
    "io_threads": check_io_threads, "warm": check_warm, "ram_tier": check_ram_tier, "router_top_k": check_top_k,
    "ram": lambda v: parse_size("--ram", v), "vram": lambda v: parse_size("--vram", v), "budget": lambda v: parse_size("--budget", v),
    "cache_type_k": lambda v: check_cache_type("--cache-type-k", v), "cache_type_v": lambda v: check_cache_type("--cache-type-v", v),
    "cuda_archs": cuda.architectures, "start slots": _slots("auto", "all", "map", "off"), "plan slots": _slots("auto", "all"),
    "bench slots": _each(_slots("auto", "all", "map")), "verify slots": _each(_slots("auto", "all")),
    "trace record slots": _slots("auto", "all"), "trace replay slots": lambda v: parse_list("--slots", v),
}  # fmt: skip


def check_moestream(words: Sequence[str]) -> None:
    """Read a command line as ``moestream`` does, without doing anything.

    Args:
        words: what follows the program's name.

    Raises:
        DocError: there is no such command or option, something is missing, or a value is not taken.
    """
    if words and words[0] in moestream_options():
        if len(words) > 1:
            check_moestream(words[1:])
        return
    known = moestream_commands()
    name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0] if words else ""
    if name not in known:
        raise DocError(f"there is no command {name!r}")
    command = known[name]
    if hasattr(command, "commands"):
        raise DocError(f"{name} is a group of commands: {', '.join(command.commands)}")
    rest = list(words[len(name.split()) :])
    own = rest[: rest.index("--")] if "--" in rest else rest
    if "--help" in own:
        return
    try:
        context = command.make_context(name, [w for w in own if w != "--verbose"] + rest[len(own) :])
    except Exception as error:  # of the library's own, wherever it keeps them
        said = getattr(error, "format_message", None)
        raise DocError(said() if said else repr(error)) from error
    try:
        for parameter, value in context.params.items():
            check = _VALUES.get(f"{name} {parameter}", _VALUES.get(parameter))
            if check is not None and value not in (None, (), []):
                check(value)
        if name == "start":
            extra = list(context.params["extra"] or ())
            check_extra(extra[1:] if extra and not extra[0].startswith("-") else extra)
        for word in own:
            if word.startswith(names.PREFIX):
                names.parse(word)
    except MoestreamError as error:
        raise DocError(error.message) from error


# ---- words in running text


def spans(text: str) -> Iterator[tuple[int, str]]:
    """What stands between backticks outside of blocks, by line."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
                yield number, span.replace("\\|", "|")


def check_span(span: str) -> None:
    """Hold a command in running text, which may have ``…`` and names for values, against the program.

    Raises:
        DocError: there is no such command or option.
    """
    words = span.split()
    if words[0] == "make" and len(words) > 1:
        target = next((word for word in words[1:] if "=" not in word), None)
        if target is not None and not re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
            raise DocError(f"there is no make target {target!r}")
    if words[0] == "python" and len(words) > 1 and words[1].endswith(".py") and not (ROOT / words[1]).is_file():
        raise DocError(f"there is no {words[1]}")
    if words[0] != "moestream" or len(words) == 1 or words[1] in ("COMMAND", "…"):
        return
    if words[1].startswith("-"):
        if words[1] not in moestream_options():
            raise DocError(f"moestream has no option {words[1]}")
        return
    known = moestream_commands()
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in known else words[1]
    if name not in known:
        raise DocError(f"there is no command {name!r}")
    own = words[: words.index("--")] if "--" in words else words
    for option in filter(None, (_OPTION.match(word) for word in own)):
        if option[0] not in moestream_options(name):
            raise DocError(f"moestream {name} has no option {option[0]}")


# ---- options of other programs


def options_in(words: Sequence[str]) -> list[str]:
    """The options among words, without values."""
    return [match[0] for match in map(_OPTION.match, words) if match]


def options_of_help(text: str) -> frozenset[str]:
    """Every option that a help text names."""
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))
