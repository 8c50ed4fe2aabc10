"""What the project's own files say must agree."""

from __future__ import annotations

import re
import tomllib

from moestream import paths
from moestream.upstream.pin import load_pin

ROOT = paths.checkout_root()


def test_the_python_extra_is_the_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pin = load_pin()
    assert project["optional-dependencies"]["python"] == [f"{pin.package}=={pin.version}"]
    # A plain dependency would compile an unpatched llama.cpp with every install.
    assert not any(line.startswith(pin.package) for line in project["dependencies"])


def test_every_tier_has_a_make_target_and_is_in_contributing():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tiers = {
        f"test-{folder.name}"
        for folder in (ROOT / "tests").iterdir()
        if folder.is_dir() and folder.name not in ("data", "__pycache__")
    }
    targets = set(re.findall(r"^(test-[a-z0-9]+):", makefile, re.MULTILINE))
    assert targets == tiers
    assert {name for name in targets if f"`make {name}`" not in contributing} == set()
    # `make test` leaves none out but the one that compiles for every processor there is, which CONTRIBUTING.md says.
    (recipe,) = re.findall(r"^test:(.*\n\t.*)$", makefile, re.MULTILINE)
    assert "not in `make test`" in re.search(r"^\| `make test-bins`.*$", contributing, re.MULTILINE)[0]
    assert {
        name for name in tiers - {"test-bins"} if name not in recipe and f"tests/{name.removeprefix('test-')}" not in recipe
    } == set()
