"""The lint itself: a good patch passes, each kind of bad one is named."""

from __future__ import annotations

import pytest

from moestream.upstream.patch_lint import MAX_ADDED_LINES, lint_patch, lint_series

GOOD = """\
What: a call site
Why: it stands in the middle of an upstream function
Removal: when upstream has a hook there

diff --git a/src/llama.cpp b/src/llama.cpp
index 1111111..2222222 100644
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -2,3 +2,4 @@ int f()
 two
 three
+    moe_hook();
 four
"""


def test_a_good_patch():
    assert lint_patch(GOOD.encode()) == []


def _many_lines(text: str) -> str:
    n = MAX_ADDED_LINES + 1
    return text.replace("+2,4", f"+2,{3 + n}").replace("+    moe_hook();\n", "+x\n" * n)


NEW_FILE = "diff --git a/n.cpp b/n.cpp\nnew file mode 100644\n--- /dev/null\n+++ b/n.cpp\n@@ -0,0 +1 @@\n+x\n"
BAD = {
    "no what": (GOOD.replace("What:", "Does:"), "no 'What:' line"),
    "empty why": (GOOD.replace("Why: it stands in the middle of an upstream function", "Why:"), "no 'Why:' line"),
    "no removal": (GOOD.replace("Removal:", "removal:"), "no 'Removal:' line"),
    "header below": ("\n".join([*GOOD.splitlines()[4:], *GOOD.splitlines()[:3]]) + "\n", "no 'What:' line"),
    "p0": (GOOD.replace("--- a/", "--- ").replace("+++ b/", "+++ "), "not the same path below a/ and b/"),
    "other path": (GOOD.replace("+++ b/src/", "+++ b/lib/"), "not the same path below a/ and b/"),
    "upward": (GOOD.replace("a/src/", "a/../").replace("b/src/", "b/../"), "not the same path below a/ and b/"),
    "new file": (GOOD + NEW_FILE, "adds or deletes a file of upstream"),
    "new file mode": (GOOD + NEW_FILE, "'new file mode 100644'"),
    "deleted": (GOOD.replace("+++ b/src/llama.cpp", "+++ /dev/null"), "adds or deletes a file of upstream"),
    "mode": (GOOD.replace("index ", "old mode 100644\nnew mode 100755\nindex "), "'old mode 100644'"),
    "renamed": (GOOD.replace("index ", "rename from src/a\nrename to src/b\nindex "), "'rename from src/a'"),
    "binary": (GOOD + "diff --git a/x b/x\nGIT binary patch\nliteral 0\n", "'GIT binary patch'"),
    "mail signature": (GOOD + "-- \n2.39.2\n", "'-- '"),
    "trailing space": (GOOD.replace("hook();", "hook(); "), "trailing whitespace"),
    "carriage return": (GOOD.replace("\n", "\r\n"), "carriage returns"),
    "no newline": (GOOD.rstrip("\n"), "does not end with a newline"),
    "byte order mark": ("\ufeff" + GOOD, "byte order mark"),
    "too many lines": (_many_lines(GOOD), f"adds {MAX_ADDED_LINES + 1} lines"),
    "short hunk": (GOOD.replace(" four\n", ""), "the hunk is shorter"),
    "no file": ("What: x\nWhy: y\nRemoval: z\n", "changes no file"),
}


@pytest.mark.parametrize(("text", "expected"), BAD.values(), ids=BAD.keys())
def test_a_bad_patch(text, expected):
    problems = lint_patch(text.encode())
    assert any(expected in problem for problem in problems), problems


def test_not_utf8():
    assert lint_patch(GOOD.replace("call site", "call síte").encode("latin-1")) == ["not UTF-8 (byte 14)"]


def test_the_series_lists_exactly_the_patches_there(tmp_path):
    (tmp_path / "a.patch").write_text(GOOD)
    (tmp_path / "b.patch").write_text(GOOD)
    (tmp_path / "series").write_text("# order\na.patch\n")
    assert lint_series(tmp_path) == ["b.patch: not listed in series"]
    (tmp_path / "series").write_text("a.patch\nb.patch\nc.patch\n")
    assert "lists c.patch, which is not in" in lint_series(tmp_path)[0]
    (tmp_path / "series").write_text("a.patch\nb.patch\n")
    assert lint_series(tmp_path) == []


def test_problems_name_the_patch(tmp_path):
    (tmp_path / "a.patch").write_text(GOOD.replace("What:", "Does:"))
    (tmp_path / "series").write_text("a.patch\n")
    assert lint_series(tmp_path) == ["a.patch: no 'What:' line above the first file"]
