"""Arguments of ``moestream.Llama`` as settings of the engine, and what is refused before any library is loaded."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moestream import bindings
from moestream.errors import MoestreamError
from moestream.upstream import engines
from moestream.upstream.pin import load_pin


@pytest.mark.parametrize(("settings", "expected"), [
    ({"slots": 8}, {"slots": 8}),
    ({"slots": "auto"}, {"slots": -1}),
    ({"slots": "all", "io": "direct", "io_threads": 3, "overlap": False}, {"slots": -2, "io": "direct", "io_threads": 3, "overlap": False}),
    ({"slots": "map", "map_pin": 2, "warm": 0}, {"slots": -3, "map_pin": 2, "warm": 0}),
    ({"slots": 8, "ram": "1.5GiB"}, {"slots": 8, "ram": 3 << 29}),
    ({"slots": 8, "ram": "auto"}, {"slots": 8, "ram": -1}),
    ({"slots": 8, "ram": 4096}, {"slots": 8, "ram": 4096}),
    ({"slots": 8, "ram": "none"}, {"slots": 8, "ram": 0}),
    ({"slots": None}, {}), ({"slots": "off", "io": None}, {}), ({"slots": 0}, {}), ({}, {}),
])  # fmt: skip
def test_overrides(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert bindings.overrides(settings) == {f"moestream.{key}": value for key, value in expected.items()}


@pytest.mark.parametrize(("settings", "message"), [
    ({"slots": -1}, "slots=-1: expected a number of slots"),
    ({"slots": True}, "slots=True: expected a number of slots"),
    ({"slots": False}, "slots=False: expected a number of slots"),
    ({"slots": "8"}, "slots='8': expected a number of slots"),
    ({"slots": 8.0}, "slots=8.0: expected a number of slots"),
    ({"slots": 8, "overlap": "on"}, "overlap='on': expected bool, not str"),
    ({"slots": 8, "io_threads": True}, "io_threads=True: expected int, not bool"),
    ({"slots": 8, "warm": 1 << 31}, "warm=2147483648: out of range"),
    ({"slots": 8, "ram": 0}, "ram=0: expected bytes"),
    ({"slots": 8, "ram": "4 apples"}, "ram='4 apples': expected a size"),
    ({"slots": None, "policy": "lfu", "ram": "auto"}, "policy='lfu', ram='auto' cannot be combined with slots=None"),
])  # fmt: skip
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MoestreamError, match=re.escape(message)):
        bindings.overrides(settings)


def test_every_setting_of_the_engine_has_an_argument() -> None:
    header = (Path(__file__).parents[2] / "engine" / "moe-api.h").read_text()
    keys = set(re.findall(r"^//   moestream\.(\w+)", header, re.MULTILINE))
    # the context and the files' number are worked out
    assert keys - {"n_ctx", "n_ubatch", "type_k", "files"} == {*bindings._PLAIN, "slots", "ram"}
    for name, value in bindings._SLOTS.items():
        assert re.search(rf"#define MOE_SLOTS_{name.upper()} +\({value}\)", header)


def test_messages_in_python_words() -> None:
    said = "--moe-map-pin 3 is too many; hint: --moe-slots 6, a smaller context (-c), or leave out --moe-slots"
    assert bindings.in_python_words(said) == (
        "map_pin 3 is too many; hint: slots 6, a smaller context (n_ctx), or load it without streaming: slots=None"
    )


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MoestreamError, match=r"needs llama-cpp-python .*, which is not installed") as caught:
        bindings.load()
    assert "hint: pip install" in caught.value.__notes__[0]


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3.35")
    with pytest.raises(MoestreamError, match=r"llama-cpp-python is 0\.3\.35, and moestream's engine is that of"):
        bindings.load()


def test_an_engine_of_another_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: load_pin().version)
    engine = SimpleNamespace(id="src.1-cpu", source="src.1", backend="cpu", bin_dir=tmp_path)
    monkeypatch.setattr(engines, "in_use", lambda: engine)
    with pytest.raises(MoestreamError, match=r"the engine src\.1-cpu is built from another source"):
        bindings.load()


def test_the_pinned_version_is_the_extras() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'python = ["llama-cpp-python=={load_pin().version}"]' in project


def test_import_is_light() -> None:
    heavy = ("llama_cpp", "typer", "numpy", "httpx", "moestream.upstream")
    code = f"import sys, moestream; sys.exit(str([m for m in {heavy!r} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_other_names_are_not_there() -> None:
    import moestream

    with pytest.raises(AttributeError, match="has no attribute 'Lama'"):
        moestream.Lama  # noqa: B018


def test_a_keyword_that_nobody_has_is_noticed() -> None:
    def init(self: object, model_path: str, *, n_ctx: int = 512, seed: int = 1, **kwargs: object) -> None: ...

    bindings.check_keywords(init, {"n_ctx": 1, "seed": 2})
    with pytest.raises(TypeError, match=r"moestream.Llama has no argument 'slotz'; did you mean slots[?]"):
        bindings.check_keywords(init, {"slotz": 3})
    with pytest.raises(TypeError, match=r"has no argument 'zzzzzz'$"):
        bindings.check_keywords(init, {"zzzzzz": 3})
