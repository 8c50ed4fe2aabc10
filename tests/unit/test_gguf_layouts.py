"""Which files a model is, however it is given: folders, any shard, links, names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from malformed import tiny, write_shards

from moestream import gguf_facts
from moestream.commands import start
from moestream.errors import MoestreamError
from moestream.server.arguments import ServerSettings

ODD_NAMES = ["a b", "ünï-模型", "a,b", "-m", "100%", "it's [x]", "a-00001-of-00002", "new\nline"]


@pytest.fixture
def whole(tmp_path: Path) -> gguf_facts.GgufFacts:
    path = tmp_path / "whole.gguf"
    path.write_bytes(tiny().write())
    return gguf_facts.read(path)


@pytest.mark.parametrize("n_shard", [2, 3, 4, 5])
def test_shards(tmp_path: Path, whole: gguf_facts.GgufFacts, n_shard: int) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    files = write_shards(folder, "m", n_shard)
    for given in (*files, folder):
        facts = gguf_facts.read(given)
        assert facts.files == tuple(files)
        assert [(t.name, t.bytes_per_expert) for t in facts.expert_tensors] == [
            (t.name, t.bytes_per_expert) for t in whole.expert_tensors
        ]
        assert (facts.n_tensor, facts.tensor_bytes) == (whole.n_tensor, whole.tensor_bytes)
        assert {t.file_index for t in facts.expert_tensors} <= set(range(n_shard))


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    files = write_shards(folder, name, 2)
    assert gguf_facts.read(files[1]).files == gguf_facts.read(folder).files == tuple(files)
    single = tmp_path / f"{name}-.gguf"
    single.write_bytes(tiny().write())
    assert gguf_facts.read(single).files == (single,)


def test_links_as_a_download_cache_has_them(tmp_path: Path) -> None:
    """Names lead to files called by their hash, all in another folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    names = []
    for i, file in enumerate(write_shards(blobs, "m", 3)):
        blob = file.rename(blobs / f"{i:064x}")
        names.append(snapshot / file.name)
        names[-1].symlink_to(os.path.relpath(blob, snapshot))
    for given in (snapshot, *names):
        assert gguf_facts.read(given).files == tuple(names)


def test_a_link_of_another_name(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "m", 2)
    links = tmp_path / "links"
    links.mkdir()
    (links / "current.gguf").symlink_to(files[0])
    assert gguf_facts.read(links / "current.gguf").files == tuple(files)
    assert gguf_facts.read(links).files == tuple(files)
    (tmp_path / "folder-link").symlink_to(links)
    assert gguf_facts.read(tmp_path / "folder-link").files == tuple(files)


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    write_shards(tmp_path / "model", "m", 2)
    monkeypatch.chdir(tmp_path / "model")
    for given in (".", "../model", "m-00002-of-00002.gguf", "./m-00001-of-00002.gguf"):
        assert [f.name for f in gguf_facts.read(given).files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize("layout", ["two models", "two sets", "two sizes of a set", "a set and a model"])
def test_ambiguous_folders(tmp_path: Path, layout: str) -> None:
    match layout:
        case "two models":
            for name in ("a", "b"):
                (tmp_path / f"{name}.gguf").write_bytes(tiny().write())
        case "two sets":
            write_shards(tmp_path, "a", 2)
            write_shards(tmp_path, "b", 2)
        case "two sizes of a set":
            write_shards(tmp_path, "a", 2)
            write_shards(tmp_path, "a", 3)
        case _:
            write_shards(tmp_path, "a", 2)
            (tmp_path / "b.gguf").write_bytes(tiny().write())
    with pytest.raises(MoestreamError, match=re.escape(f"2 models in the directory {tmp_path}")) as raised:
        start.make_plan(ServerSettings(model=tmp_path))
    assert raised.value.hint and raised.value.hint.startswith("name one of them, for example ")


def test_what_else_lies_in_a_folder(tmp_path: Path) -> None:
    """Projectors, folders and other files are no models; shards that miss the first are a set that misses one."""
    files = write_shards(tmp_path, "m", 3)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"x")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_facts.read(tmp_path).files == tuple(files)
    files[0].unlink()
    with pytest.raises(MoestreamError, match=r"shard m-00001-of-00003\.gguf of 3 is missing"):
        gguf_facts.read(tmp_path)


@pytest.mark.parametrize(("name", "said"), [
    ("m-00000-of-00003.gguf", "impossible shard number in the file name"),
    ("m-00004-of-00003.gguf", "impossible shard number in the file name"),
    ("m-00001-of-00000.gguf", "impossible shard number in the file name"),
    ("m-00001-of-99999.gguf", "shard m-00002-of-99999.gguf and 99997 more of 99999 is missing"),
])  # fmt: skip
def test_numbers_in_names(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(tiny().write())
    with pytest.raises(MoestreamError, match=said):
        gguf_facts.read(path)


def test_a_shard_of_another_model(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "m", 3)
    other = tmp_path / "other"
    other.mkdir()
    two = write_shards(other, "m", 2)
    original = files[1].read_bytes()
    files[1].write_bytes(two[1].read_bytes())
    with pytest.raises(MoestreamError, match=r"m-00002-of-00003\.gguf says that it is one of 2 shards and not of 3"):
        gguf_facts.read(files[0])
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(MoestreamError, match=r"m-00002-of-00003\.gguf says that it is shard 2"):
        gguf_facts.read(files[0])
    files[1].write_bytes(original.replace(b"blk.0.attn_norm", b"blk.7.attn_norm").replace(b"output_norm", b"token_embd."))
    facts = gguf_facts.read(files[0])  # other names, as many: only the engine knows which tensors an architecture has
    assert facts.n_tensor == 26
