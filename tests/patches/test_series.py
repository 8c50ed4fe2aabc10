"""The series as shipped: clean, and applying strictly to the real pinned source."""

from __future__ import annotations

import re

import pytest

from moestream import paths
from moestream.planning import architectures
from moestream.upstream.fetch import fetch_pinned, resolve_source
from moestream.upstream.patch_lint import lint_series
from moestream.upstream.patches import parse_patch, read_series, require_only_below
from moestream.upstream.pin import load_pin
from moestream.upstream.tree import prepare_tree

PRODUCT = paths.patches_dir()
TEST = paths.patches_dir() / "test"


@pytest.mark.parametrize("folder", [PRODUCT, TEST], ids=["product", "test"])
def test_lint(folder):
    assert lint_series(folder) == []


def test_the_test_series_leaves_the_products_programs_alone():
    require_only_below(read_series(TEST / "series"), "tests")


def test_every_patch_is_described():
    readme = (PRODUCT / "README.md").read_text(encoding="utf-8")
    assert [patch.name for patch in read_series(PRODUCT / "series") if patch.name not in readme] == []


def test_both_series_apply_to_the_pinned_source(tmp_path):
    pin = load_pin()
    fetch_pinned(pin, paths.downloads_dir())
    source = resolve_source(None, pin, paths.downloads_dir())
    product, test = read_series(PRODUCT / "series"), read_series(TEST / "series")
    prepare_tree(source, [*product, *test], tmp_path / "llama.cpp", tmp_path / "scratch")
    names = re.search(
        r"LLM_ARCH_NAMES = \{(.*?)\n\};", (tmp_path / "llama.cpp/src/llama-arch.cpp").read_text("utf-8"), re.DOTALL
    )
    assert names and set(re.findall(r'"([^"]+)"', names[1])) - {"(unknown)"} == architectures.KNOWN
    # Applied means that the lines are there: git skips files silently when it misjudges where it is.
    for patch in [*product, *test]:
        for file in parse_patch(patch.read_text(encoding="utf-8")).files:
            text = (tmp_path / "llama.cpp" / file.new.removeprefix("b/")).read_text(encoding="utf-8")
            assert [line for line in file.added if line not in text.split("\n")] == [], patch.name
