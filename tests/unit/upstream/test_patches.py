from __future__ import annotations

import subprocess

import pytest

from moestream.errors import MoestreamError
from moestream.upstream.patches import apply_patches, parse_patch, read_series, require_only_below, series_hash

from .conftest import FILES

HEAD = "What: test\nWhy: test\nRemoval: never\n\n"
GOOD = (
    HEAD
    + """\
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -2,3 +2,4 @@
 two
 three
+three and a half
 four
"""
)
SECOND = """\
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,2 +1,2 @@
-one
+ONE
 two
@@ -6,3 +6,3 @@
 five
-six
+SIX
 seven
"""


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        if name != ".git":
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


@pytest.fixture
def write(tmp_path):
    def write_patch(name, text):
        path = tmp_path / "patches" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_patch


def test_patches_are_applied_in_the_order_given(tree, write):
    first, second = write("b.patch", GOOD), write("a.patch", SECOND)
    apply_patches(tree, [first, second])
    assert (tree / "src/llama.cpp").read_text() == "ONE\ntwo\nthree\nthree and a half\nfour\nfive\nSIX\nseven\n"


def test_a_repository_around_the_tree_does_not_matter(tree, write):
    """Inside a repository git would skip the files and report success."""
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True)
    apply_patches(tree, [write("a.patch", GOOD)])
    assert "three and a half" in (tree / "src/llama.cpp").read_text()


def test_no_fuzz_even_when_the_user_configured_it(tree, write, tmp_path, monkeypatch):
    (tmp_path / ".gitconfig").write_text("[apply]\n\tignoreWhitespace = change\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tree / "src/llama.cpp").write_text(FILES["src/llama.cpp"].replace("two", "two "))
    with pytest.raises(MoestreamError, match="does not apply"):
        apply_patches(tree, [write("a.patch", GOOD)])


def test_a_failure_names_patch_file_hunk_cause_and_next_step(tree, write):
    (tree / "src/llama.cpp").write_text(FILES["src/llama.cpp"].replace("six", "changed"))
    with pytest.raises(MoestreamError) as caught:
        apply_patches(tree, [write("a.patch", SECOND)])
    assert caught.value.message.startswith(
        "a.patch does not apply at src/llama.cpp, hunk 2 of 2 (@@ -6,3 +6,3 @@): upstream, or a patch earlier in the series"
    )
    assert "CONTRIBUTING.md" in caught.value.hint


def test_a_file_that_upstream_moved(tree, write):
    (tree / "src/llama.cpp").rename(tree / "src/moved.cpp")
    with pytest.raises(MoestreamError, match=r"does not apply at src/llama.cpp: upstream has moved or removed this file"):
        apply_patches(tree, [write("a.patch", GOOD)])


def test_a_patch_that_is_none(tree, write):
    with pytest.raises(MoestreamError, match="the patch is malformed"):
        apply_patches(tree, [write("a.patch", "hello\n")])


def test_series_order_comments_and_blank_lines(write, tmp_path):
    for name in ("z.patch", "a.patch"):
        write(name, GOOD)
    series = write("series", "# comment\n\nz.patch\n  a.patch \n")
    assert [path.name for path in read_series(series)] == ["z.patch", "a.patch"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("missing.patch\n", "lists missing.patch, which is not in"),
        ("../x.patch\n", "plain name"),
        ("a.patch\na.patch\n", "twice"),
    ],
)
def test_a_bad_series(write, text, expected):
    write("a.patch", GOOD)
    with pytest.raises(MoestreamError, match=expected):
        read_series(write("series", text))


def test_the_hash_depends_on_order_name_and_content(write):
    a, b = write("a.patch", GOOD), write("b.patch", SECOND)
    seen = {series_hash([a, b]), series_hash([b, a]), series_hash([a])}
    write("a.patch", GOOD + "\n")
    seen.add(series_hash([a]))
    assert len(seen) == 4
    assert series_hash([a, b]) == series_hash([a, b])


def test_parsing_counts_what_hunks_add_and_remove():
    patch = parse_patch(GOOD)
    assert patch.header.startswith("What: test")
    assert [(file.new, file.added, file.removed, file.hunk_starts) for file in patch.files] == [
        ("b/src/llama.cpp", ["three and a half"], [], [2])
    ]
    assert [len(file.hunks) for file in parse_patch(SECOND).files] == [2]


def test_a_removed_line_that_looks_like_a_file_name_is_content():
    text = "--- a/x\n+++ b/x\n@@ -1,2 +1,1 @@\n--- a comment\n keep\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n-p\n+q\n"
    assert [(file.new, file.removed) for file in parse_patch(text).files] == [("b/x", ["-- a comment"]), ("b/y", ["p"])]


@pytest.mark.parametrize("text", [GOOD[:-6], GOOD.replace("+2,4", "+2,3"), "@@ -1 +1 @@\n-a\n+b\n"])
def test_a_hunk_that_does_not_add_up(text):
    with pytest.raises(ValueError, match="hunk"):
        parse_patch(text)


def test_test_patches_may_touch_only_tests(write):
    fine = write("t.patch", GOOD.replace("src/llama.cpp", "tests/test-llama-archs.cpp"))
    require_only_below([fine], "tests")
    for bad in ("src/llama.cpp", "tests/../src/llama.cpp", "tools/tests/x.cpp"):
        with pytest.raises(MoestreamError, match="may only touch tests/"):
            require_only_below([fine, write("bad.patch", GOOD.replace("src/llama.cpp", bad))], "tests")
