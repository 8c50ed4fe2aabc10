"""The published schema is what is read, and both know what ``moestream start`` knows."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from moestream import config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "config_schema.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("config_schema", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_current() -> None:
    """When this fails: python docs/config_schema.py"""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_one_is_noticed(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(script, "PATH", tmp_path / "s.json")
    monkeypatch.setattr(sys, "argv", ["x", "--check"])
    (tmp_path / "s.json").write_text("{}")
    assert script.main() == 1 and capsys.readouterr().out == "out of date: s.json\n"
    assert (tmp_path / "s.json").read_text() == "{}"
    monkeypatch.setattr(sys, "argv", ["x"])
    assert script.main() == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"] == "moestream.yaml"


def test_files_have_every_option_of_start_with_its_limits(script: Any) -> None:
    options = script.start_options()
    assert [*options, "llama_args"] == list(config.OPTIONS)
    properties = json.loads((ROOT / "docs" / "moestream.schema.json").read_text())["$defs"]["Options"]["properties"]
    for key, (kind, default, info) in options.items():
        entry = properties[key]
        assert default is None, f"{key}: start must see what was not given"
        if key not in ("slots", "io_threads", "router_top_k", "warm"):  # those have checks of their own, which both call
            assert (info.min, info.max) == (entry.get("minimum"), entry.get("maximum")), key
        if issubclass(kind, Enum):
            assert [choice.value for choice in kind] == entry["enum"], key
        elif "anyOf" not in entry:
            assert {int: "integer", float: "number", bool: "boolean", str: "string"}[kind] == entry["type"], key


def test_the_examples_of_the_documentation(tmp_path: Path) -> None:
    """They are read by what reads a user's file."""
    text = (ROOT / "docs" / "config.md").read_text()
    examples = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    assert examples
    for example in examples:
        (tmp_path / "moestream.yaml").write_text(example)
        assert config.read(tmp_path / "moestream.yaml").document.models
        assert yaml.safe_load(example)
