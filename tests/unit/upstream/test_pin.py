from __future__ import annotations

import pytest

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream.pin import load_pin


def test_the_shipped_pin_is_valid():
    pin = load_pin()
    assert pin.package == "llama-cpp-python"
    assert pin.directory == "vendor/llama.cpp"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("version =", "release =", "version is None"),
        ('sha256 = "', 'sha256 = "XY', "sha256 is 'XY"),
        ('directory = "vendor/', 'directory = "../', "directory is '../llama.cpp'"),
        ("version =", "colour = 'red'\nversion =", "unknown field 'colour'"),
        ("version =", "version", "cannot read the pin"),
    ],
)
def test_a_bad_pin_names_the_field(tmp_path, old, new, expected):
    text = paths.pin_file().read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "pin.toml"
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(MoestreamError) as caught:
        load_pin(file)
    assert expected in caught.value.message
    assert caught.value.hint


def test_a_missing_pin(tmp_path):
    with pytest.raises(MoestreamError, match="cannot read the pin"):
        load_pin(tmp_path / "pin.toml")
