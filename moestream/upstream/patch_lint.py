"""What a patch must be besides applying: small, explained, and about call sites only.

Run over a series with ``python -m moestream.upstream.patch_lint``; the tests do the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream.patches import FilePatch, parse_patch, read_series

# What a patch says above its first file: what it does, why that cannot live in engine/, when it can go.
HEADER_LINES = ("What:", "Why:", "Removal:")
# Logic belongs in engine/. A patch of this size is already one to look at twice.
MAX_ADDED_LINES = 80


def lint_series(folder: Path) -> list[str]:
    """The problems of ``folder/series`` and of the patches in ``folder``; [] when there are none."""
    try:
        listed = read_series(folder / "series")
    except MoestreamError as error:
        return [error.message]
    unlisted = sorted({file.name for file in folder.glob("*.patch")} - {patch.name for patch in listed})
    problems = [f"{name}: not listed in series" for name in unlisted]
    for patch in listed:
        problems += [f"{patch.name}: {problem}" for problem in lint_patch(patch.read_bytes())]
    return problems


def lint_patch(content: bytes) -> list[str]:
    """The problems of one patch; [] when there are none."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return [f"not UTF-8 (byte {error.start})"]
    problems = []
    if text.startswith("\ufeff"):
        problems.append("starts with a byte order mark")
    if "\r" in text:
        problems.append("has carriage returns")
    if not text.endswith("\n"):
        problems.append("does not end with a newline")
    try:
        patch = parse_patch(text)
    except ValueError as error:
        return [*problems, str(error)]
    for name in HEADER_LINES:
        if not re.search(rf"^{name}[ \t]+\S", patch.header, re.MULTILINE):
            problems.append(f"no {name!r} line above the first file")
    for line in patch.extras:
        if not line.startswith(("diff --git a/", "index ")):
            problems.append(f"{line!r}: only changes to the lines of existing files are allowed")
    if not patch.files:
        problems.append("changes no file")
    for file in patch.files:
        problems += _lint_file(file)
    added = sum(len(file.added) for file in patch.files)
    if added > MAX_ADDED_LINES:
        problems.append(f"adds {added} lines, {MAX_ADDED_LINES} at most: move logic to engine/")
    return problems


def _lint_file(file: FilePatch) -> list[str]:
    problems = []
    if "/dev/null" in (file.old, file.new):
        problems.append(f"{file.old} -> {file.new}: adds or deletes a file of upstream; new files belong in engine/")
    elif not re.fullmatch(r"a/[^/].*", file.old) or file.new != "b" + file.old[1:] or ".." in file.old.split("/"):
        problems.append(f"{file.old} -> {file.new}: not the same path below a/ and b/")
    if not file.hunks:
        problems.append(f"{file.new}: no hunk")
    problems += [f"{file.new}: trailing whitespace in {line!r}" for line in file.added if line != line.rstrip()]
    return problems


def main() -> int:
    """Lint both series as shipped; prints the problems and returns 1 when there are any."""
    folders = (paths.patches_dir(), paths.patches_dir() / "test")
    problems = [f"{folder.name}/{problem}" for folder in folders for problem in lint_series(folder)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
