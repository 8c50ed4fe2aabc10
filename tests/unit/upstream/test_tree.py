from __future__ import annotations

import json
import shutil

import pytest

from moestream.errors import MoestreamError
from moestream.upstream import tree as trees
from moestream.upstream.fetch import Source
from moestream.upstream.tree import edited_files, mirror, prepare_tree

from .test_patches import GOOD


@pytest.fixture
def place(tmp_path):
    return tmp_path / "vendor" / "llama.cpp", tmp_path / "build"


@pytest.fixture
def patch(tmp_path):
    path = tmp_path / "a.patch"
    path.write_text(GOOD)
    return path


def stamps(tree):
    return {f.relative_to(tree).as_posix(): f.stat().st_mtime_ns for f in tree.rglob("*") if f.is_file()}


def test_made_once(archive, place, patch):
    source = Source(archive, "x", False)
    assert prepare_tree(source, [patch], *place) is True
    before = stamps(place[0])
    assert prepare_tree(source, [patch], *place) is False
    assert stamps(place[0]) == before
    assert list(place[1].iterdir()) == []


def test_a_changed_patch_touches_only_its_file(archive, place, patch):
    source = Source(archive, "x", False)
    prepare_tree(source, [], *place)
    before = stamps(place[0])
    prepare_tree(source, [patch], *place)
    after = stamps(place[0])
    assert {name for name in after if after[name] != before.get(name)} == {"src/llama.cpp", trees.STAMP}
    assert "three and a half" in (place[0] / "src/llama.cpp").read_text()


def test_a_file_that_goes_back_to_the_archives_content_looks_new(archive, place, patch):
    """The archive's time stamps are years old; ninja would not compile it again."""
    source = Source(archive, "x", False)
    prepare_tree(source, [patch], *place)
    patched_ns = (place[0] / "src/llama.cpp").stat().st_mtime_ns
    prepare_tree(source, [], *place)
    assert (place[0] / "src/llama.cpp").stat().st_mtime_ns > patched_ns


def test_files_that_upstream_dropped_are_gone(make_archive, place):
    prepare_tree(Source(make_archive("a.tar.gz"), "x", False), [], *place)
    prepare_tree(Source(make_archive("b.tar.gz", {"CMakeLists.txt": None}), "y", False), [], *place)
    assert not (place[0] / "CMakeLists.txt").exists()


def test_a_patch_that_does_not_apply_leaves_the_old_tree(make_archive, place, patch):
    prepare_tree(Source(make_archive("a.tar.gz"), "x", False), [patch], *place)
    before = stamps(place[0])
    other = make_archive("b.tar.gz", {"src/llama.cpp": "nothing alike\n"})
    with pytest.raises(MoestreamError, match="does not apply"):
        prepare_tree(Source(other, "y", False), [patch], *place)
    assert stamps(place[0]) == before
    assert list(place[1].iterdir()) == []


def test_edits_by_hand_are_not_thrown_away(archive, place, patch):
    source = Source(archive, "x", False)
    prepare_tree(source, [], *place)
    (place[0] / "src/llama.cpp").write_text("work in progress\n")
    (place[0] / "src/new.cpp").write_text("more\n")
    with pytest.raises(MoestreamError, match=r"was edited by hand: src/llama.cpp, src/new.cpp"):
        prepare_tree(source, [patch], *place)
    assert (place[0] / "src/llama.cpp").read_text() == "work in progress\n"


def test_a_removed_file_counts_as_an_edit(archive, place):
    prepare_tree(Source(archive, "x", False), [], *place)
    assert edited_files(place[0]) == []
    (place[0] / "include/llama.h").unlink()
    assert edited_files(place[0]) == ["include/llama.h"]


def test_a_tree_of_unknown_origin_is_replaced(archive, place):
    place[0].mkdir(parents=True)
    (place[0] / "stray").write_text("x")
    assert prepare_tree(Source(archive, "x", False), [], *place) is True
    assert not (place[0] / "stray").exists()
    assert json.loads((place[0] / trees.STAMP).read_text())["recipe"][0] == "x"


def test_what_a_killed_run_left_is_removed(archive, place):
    (place[1] / "source-abc" / "llama.cpp").mkdir(parents=True)
    prepare_tree(Source(archive, "x", False), [], *place)
    assert list(place[1].iterdir()) == []


def test_too_little_space_is_said_first(archive, place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1 << 20))
    with pytest.raises(MoestreamError, match="needs about 200 MiB"):
        prepare_tree(Source(archive, "x", False), [], *place)
    assert not place[0].exists()


def test_mirror_copies_changes_and_removals_only(tmp_path):
    source, copy = tmp_path / "engine", tmp_path / "copy"
    (source / "cuda").mkdir(parents=True)
    for name in ("a.cpp", "b.cpp", "cuda/c.cu"):
        (source / name).write_text(name)
    mirror(source, copy)
    before = stamps(copy)
    (source / "a.cpp").write_text("changed")
    (source / "b.cpp").unlink()
    mirror(source, copy)
    after = stamps(copy)
    assert set(after) == {"a.cpp", "cuda/c.cu"}
    assert after["cuda/c.cu"] == before["cuda/c.cu"]
    assert (copy / "a.cpp").read_text() == "changed"
