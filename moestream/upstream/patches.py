"""The patch series: read, parsed, and applied strictly, in the order of ``series`` and no other.

Applying is git's: no fuzz, every line of context must match. Line numbers may be off, since an earlier patch of the
series can move a later one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from moestream.errors import MoestreamError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class FilePatch:
    """The hunks of one file: ``old`` and ``new`` as written in the patch (``a/…``, ``b/…`` or ``/dev/null``)."""

    old: str
    new: str
    hunks: list[str] = field(default_factory=list)
    hunk_starts: list[int] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


@dataclass
class Patch:
    """A parsed patch: the text above the first file, git's own extra lines, and the files."""

    header: str
    extras: list[str]
    files: list[FilePatch]


def read_series(series: Path) -> list[Path]:
    """The patches a ``series`` file names, in order. Empty lines and lines that start with ``#`` are skipped.

    Raises:
        MoestreamError: the file, or a patch that it names, is missing; a name is listed twice or holds a ``/``.
    """
    try:
        lines = series.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MoestreamError(f"cannot read the patch series {series}: {error.strerror}", hint="reinstall moestream") from error
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for position, name in enumerate(names):
        if "/" in name or name in names[:position]:
            raise MoestreamError(
                f"{series}: {name!r} is listed twice or is not a plain name", hint="list each patch once, by its file name"
            )
        if not (series.parent / name).is_file():
            raise MoestreamError(
                f"{series} lists {name}, which is not in {series.parent}", hint="add the patch, or take its line out"
            )
    return [series.parent / name for name in names]


def series_hash(patches: list[Path]) -> str:
    """A digest of the patches' names, order and content; the same for the same series anywhere."""
    digest = hashlib.sha256()
    for patch in patches:
        digest.update(f"{patch.name}\0".encode() + hashlib.sha256(patch.read_bytes()).digest())
    return digest.hexdigest()


def parse_patch(text: str) -> Patch:
    """Split a unified diff into header, files and hunks.

    Raises:
        ValueError: a hunk is shorter or longer than its ``@@`` line says, or stands outside a file.
    """
    header: list[str] = []
    extras: list[str] = []
    files: list[FilePatch] = []
    lines = text.removesuffix("\n").split("\n")
    started = False
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("diff --git "):
            started = True
            extras.append(line)
        elif line.startswith("--- ") and position < len(lines) and lines[position].startswith("+++ "):
            started = True
            files.append(FilePatch(line[4:].split("\t")[0], lines[position][4:].split("\t")[0]))
            position += 1
        elif match := _HUNK.match(line):
            if not files:
                raise ValueError(f"line {position}: a hunk outside a file")
            position = _parse_hunk(lines, position, line, match, files[-1])
        elif started:
            if line:
                extras.append(line)
        else:
            header.append(line)
    return Patch("\n".join(header), extras, files)


def _parse_hunk(lines: list[str], position: int, title: str, match: re.Match[str], file: FilePatch) -> int:
    old_left, new_left = int(match[2] or 1), int(match[4] or 1)
    first = position
    while old_left > 0 or new_left > 0:
        line = lines[position] if position < len(lines) else None
        if line is None or line[:1] not in ("", " ", "+", "-", "\\"):
            raise ValueError(f"line {first}: the hunk is shorter than {title!r} says")
        position += 1
        if line.startswith("+"):
            file.added.append(line[1:])
            new_left -= 1
        elif line.startswith("-"):
            file.removed.append(line[1:])
            old_left -= 1
        elif not line.startswith("\\"):
            old_left -= 1
            new_left -= 1
    if old_left or new_left:
        raise ValueError(f"line {first}: the hunk does not have the lines that {title!r} says")
    file.hunks.append(title)
    file.hunk_starts.append(int(match[1]))
    return position


def require_only_below(patches: list[Path], folder: str) -> None:
    """Raise MoestreamError when a patch touches a file outside ``folder`` (as ``tests``) of upstream."""
    for patch in patches:
        for file in parse_patch(patch.read_text(encoding="utf-8")).files:
            for name in (file.old, file.new):
                if not re.match(rf"[ab]/{re.escape(folder)}/", name) or ".." in name.split("/"):
                    raise MoestreamError(
                        f"{patch.name} touches {name}; a test patch may only touch {folder}/ of upstream",
                        hint="move that change to the product's series",
                    )


def find_git() -> str:
    """The program.

    Raises:
        MoestreamError: it is missing.
    """
    git = shutil.which("git")
    if git is None:
        raise MoestreamError("git is missing; it applies the patches", hint="sudo apt-get install git")
    return git


def _strict_environment(tree: Path) -> dict[str, str]:
    """An environment in which git sees neither a repository around the tree nor anyone's configuration.

    Inside a repository git takes paths as relative to its root and silently skips what lies elsewhere; and
    ``apply.ignoreWhitespace`` in a user's configuration would make applying less strict.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    return environment


def apply_patches(tree: Path, patches: list[Path]) -> None:
    """Apply patches to ``tree`` in the order given.

    On an error the tree is left partly patched: callers work on a copy and throw it away.

    Raises:
        MoestreamError: a patch does not apply; names the patch, the file, the hunk and the likely cause.
    """
    for patch in patches:
        done = subprocess.run(
            [find_git(), "apply", "-p1", "--whitespace=nowarn", str(patch.resolve())],
            cwd=tree, env=_strict_environment(tree), capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode != 0:
            raise _apply_failure(patch, done.stderr)


def _apply_failure(patch: Path, git_says: str) -> MoestreamError:
    where, cause = "", "the patch is malformed"
    if match := re.search(r"error: patch failed: (.+):(\d+)", git_says):
        name, line = match[1], int(match[2])
        where = f" at {name}:{line}"
        for file in parse_patch(patch.read_text(encoding="utf-8")).files:
            if file.new == "b/" + name and line in file.hunk_starts:
                number = file.hunk_starts.index(line)
                where = f" at {name}, hunk {number + 1} of {len(file.hunks)} ({file.hunks[number]})"
        cause = "upstream, or a patch earlier in the series, has changed these lines"
    elif match := re.search(r"error: (.+): No such file or directory", git_says):
        where, cause = f" at {match[1]}", "upstream has moved or removed this file"
    first = next((line for line in git_says.splitlines() if line.strip()), "git said nothing").removeprefix("error: ")
    return MoestreamError(
        f"{patch.name} does not apply{where}: {cause} (git: {first})",
        hint="build the pinned source (no --source), or refresh the patch as CONTRIBUTING.md says under 'Bump the pin'",
    )
