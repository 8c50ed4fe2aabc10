"""References, quants in file names, and which files are a model."""

from __future__ import annotations

import re

import pytest

from moestream.errors import MoestreamError
from moestream.models import names
from moestream.models.names import Reference, candidates, choose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:org/m", Reference("org", "m")),
        ("org/m", Reference("org", "m")),
        ("hf:org/m.v2_x-GGUF:UD-Q4_K_XL", Reference("org", "m.v2_x-GGUF", "UD-Q4_K_XL")),
        ("hf:o/m:sub/file-Q4_0", Reference("o", "m", "sub/file-Q4_0")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert names.parse(text) == expected
    assert names.parse(f"hf:{expected}") == expected


@pytest.mark.parametrize(
    "text", ["", "hf:", "m", "a/b/c", "/m", "o/", "../m", "o/..", "o/.m", "-o/m", "o/a..b", "o/m:", "o/m:\x1b[2J", "hf://o/m"]
)
def test_no_references(text: str) -> None:
    with pytest.raises(MoestreamError, match="not a model on a hub") as error:
        names.parse(text)
    assert "\x1b" not in error.value.message


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("m-q4_0.gguf", "Q4_0"),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m-BF16.gguf", "BF16"),
        ("m_Q4_K_M_v2.gguf", "Q4_K_M"),
        ("Q8_0/model.gguf", "Q8_0"),
        ("Q8_0/model-Q6_K.gguf", "Q6_K"),
        ("Qwen2-57B-A14B.gguf", ""),
    ],
)
def test_quants(path: str, quant: str) -> None:
    assert names.quant_of(path) == quant


def labels(*paths: str) -> list[str]:
    return [model.label for model in candidates(paths)]


def test_what_is_a_model() -> None:
    others = [
        "mmproj-F16.gguf",
        "m-mmproj-Q8_0.gguf",
        "imatrix_unsloth.gguf",
        "m.imatrix.gguf",
        "ggml-vocab-x.gguf",
        "README.md",
        "m.gguf.part1of2",
    ]
    assert labels(*others) == []
    assert labels("m-Q4_0.gguf", "m-Q8_0-imatrix.gguf", *others) == ["Q4_0", "Q8_0"]


def test_labels_are_unique() -> None:
    assert labels("a-Q4_0.gguf", "b-Q4_0.gguf", "b-Q8_0.gguf", "c.gguf") == ["a-Q4_0", "b-Q4_0", "Q8_0", "c"]
    assert labels("x/m-Q4_0.gguf", "y/m-Q4_0.gguf") == ["x/m-Q4_0", "y/m-Q4_0"]


def test_shards_are_one_model() -> None:
    (model,) = candidates([f"d/m-Q4_0-{i:05d}-of-00003.gguf" for i in (3, 1)])
    assert model.label == "Q4_0" and model.stem == "d/m-Q4_0"
    assert model.files == tuple(f"d/m-Q4_0-{i:05d}-of-00003.gguf" for i in (1, 2, 3))
    assert model.missing == ("d/m-Q4_0-00002-of-00003.gguf",)


PATHS = ["m-Q8_0.gguf", "m-UD-Q5_K_XL.gguf", "m-Q4_K_M.gguf", "other-Q2_K.gguf", "third-Q2_K.gguf"]


@pytest.mark.parametrize(
    ("label", "file"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q5_K_XL", "m-UD-Q5_K_XL.gguf"),
        ("other-Q2_K", "other-Q2_K.gguf"),
        ("THIRD-q2_k.gguf", "third-Q2_K.gguf"),
    ],
)
def test_choice(label: str | None, file: str) -> None:
    assert choose(Reference("o", "r", label), candidates(PATHS), {}).files == (file,)


@pytest.mark.parametrize(
    ("paths", "label", "message"),
    [
        (["README.md", "mmproj-F16.gguf"], None, "o/r has no GGUF model"),
        (PATHS, "Q6_K", "o/r has no model 'Q6_K'; it has Q4_K_M (5), Q8_0 (0), UD-Q5_K_XL (0), other-Q2_K (0), third-Q2_K (0)"),
        (PATHS, "Q2_K", "'o/r:Q2_K' may be any of several models: other-Q2_K (0), third-Q2_K (0)"),
        (["m-Q2_K.gguf", "m-Q3_K.gguf"], None, "o/r has several models, and none that would be the usual choice: Q2_K (0), Q3_K (0)"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, "'o/r' may be any of several models: a-Q4_K_M (0), b-Q4_K_M (0)"),
        (["m-Q4_0-00002-of-00002.gguf"], None, "o/r lacks shard m-Q4_0-00001-of-00002.gguf of the 2 of Q4_0"),
    ],
)  # fmt: skip
def test_no_choice(paths: list[str], label: str | None, message: str) -> None:
    with pytest.raises(MoestreamError, match=f"^{re.escape(message)}$") as error:
        choose(Reference("o", "r", label), candidates(paths), {"m-Q4_K_M.gguf": 5})
    assert error.value.hint


def test_names_from_a_hub_cannot_write_to_the_terminal() -> None:
    with pytest.raises(MoestreamError) as error:
        choose(Reference("o", "r", "Q2_K"), candidates(["\x1b[2Jm.gguf", "n-Q8_0.gguf"]), {})
    assert "\x1b" not in error.value.message + str(error.value.hint)


@pytest.mark.parametrize("path", ["m.gguf", "a b/ünï.gguf", "..m/m..gguf"])
def test_good_paths(path: str) -> None:
    names.check_path(path)


@pytest.mark.parametrize(
    "path", ["../m", "a/../m", "/m", "a//m", "", ".", "a/.", "..\\m", "C:m", "C:\\m", "a\0b", "a\nb", "x" * 5000]
)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(MoestreamError, match="may lie outside"):
        names.check_path(path)


def test_a_name_that_no_folder_can_hold() -> None:
    with pytest.raises(MoestreamError, match="too long"):
        names.check_path("x" * 181)
