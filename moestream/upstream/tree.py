"""The patched source tree: made beside the old one, then swapped in whole.

A file whose content did not change keeps its time stamp, so that the next build compiles only what changed. A failure
leaves the old tree as it was; there is never a half-patched one.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from moestream.errors import MoestreamError
from moestream.upstream import patches as patching
from moestream.upstream.disk import MIB, full_disk_reported, require_free
from moestream.upstream.fetch import Source, source_files, unpack

STAMP = ".moestream-source.json"
_UNPACKED_ESTIMATE_BYTES = 200 * MIB


def _listing(tree: Path) -> dict[str, list[int]]:
    """Size in bytes and time stamp in ns of every file, by its path in the tree."""
    return {
        file.relative_to(tree).as_posix(): [(stat := file.stat()).st_size, stat.st_mtime_ns]
        for file in source_files(tree)
        if file.name != STAMP
    }


def _read_stamp(tree: Path) -> dict:
    try:
        return json.loads((tree / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def edited_files(tree: Path) -> list[str]:
    """Files that were changed, added or removed by hand since the tree was made; [] when there is no tree."""
    stamp = _read_stamp(tree)
    if "files" not in stamp:
        return []
    recorded, now = stamp["files"], _listing(tree)
    return sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))


def prepare_tree(source: Source, patches: list[Path], tree: Path, scratch: Path) -> bool:
    """Make ``tree`` the patched source. Returns False when it was that already.

    ``scratch`` is a folder on the same disk, so that the swap is a rename.

    Raises:
        MoestreamError: the tree holds edits made by hand; a patch does not apply; the archive is damaged; the disk is full.
    """
    recipe = [source.label, patching.series_hash(patches)]
    if edited := edited_files(tree):
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        raise MoestreamError(
            f"{tree} was edited by hand: {', '.join(edited[:3])}{more}",
            hint="put the change into a patch (CONTRIBUTING.md), or drop it with: moestream build --clean",
        )
    if _read_stamp(tree).get("recipe") == recipe:
        return False
    require_free(tree.parent, _UNPACKED_ESTIMATE_BYTES, "unpacking llama.cpp")
    with full_disk_reported(tree, "unpacking llama.cpp"):
        tree.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(parents=True, exist_ok=True)
        for left_by_a_killed_run in scratch.glob("source-*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=scratch, prefix="source-") as folder:
            fresh = Path(folder, "llama.cpp")
            unpack(source, fresh)
            patching.apply_patches(fresh, patches)
            if tree.exists():
                _keep_time_stamps(tree, fresh)
            stamp = {"recipe": recipe, "files": _listing(fresh)}
            (fresh / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
            if tree.exists():
                tree.rename(Path(folder, "old"))
            fresh.rename(tree)
    return True


def _keep_time_stamps(old: Path, fresh: Path) -> None:
    """Unchanged files get the old tree's time stamp, all others the present: an archive's are years old, and a
    file that went back to it would look older than what was compiled from the patched one."""
    now_ns = time.time_ns()
    for file in source_files(fresh):
        before = old / file.relative_to(fresh)
        if before.is_file() and filecmp.cmp(before, file, shallow=False):
            stat = before.stat()
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        else:
            os.utime(file, ns=(now_ns, now_ns))


def mirror(source: Path, destination: Path) -> None:
    """Make ``destination`` a copy of the folder ``source``; files with the same content are not touched."""
    with full_disk_reported(destination, "copying sources"):
        wanted = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
        for name in wanted:
            target = destination / name
            if not target.is_file() or not filecmp.cmp(source / name, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, target)
        for file in [file for file in destination.rglob("*") if file.is_file()]:
            if file.relative_to(destination) not in wanted:
                file.unlink()
