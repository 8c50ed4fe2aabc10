"""Paths as other processes find them, and as people read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moestream import paths


def test_absolute_paths_have_no_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    here = Path(os.path.realpath(tmp_path))
    assert paths.absolute(Path("../x.gguf")) == here / "x.gguf"
    assert paths.absolute(Path("b/../../a/./x.gguf")) == here / "a" / "x.gguf"
    assert paths.absolute(Path("..")) == here
    assert paths.absolute(Path("none/../x.gguf")) == here / "a" / "x.gguf"


def test_what_comes_before_dots_is_followed_and_the_rest_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``link/..`` is the folder around what the link points to: that is where the kernel looks."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "far" / "real.gguf").touch()
    (tmp_path / "far" / "x.gguf").symlink_to("real.gguf")
    (tmp_path / "link").symlink_to("far/away")
    monkeypatch.chdir(tmp_path)
    found = paths.absolute(Path("link/../x.gguf"))
    assert found.samefile("link/../x.gguf") and found == Path(os.path.realpath(tmp_path)) / "far" / "x.gguf"
    assert paths.absolute(Path("link")) == tmp_path / "link", "links stay where no dots follow"
