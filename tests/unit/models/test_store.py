"""Records of pulled models, and finding a model by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from malformed import tiny

from moestream.errors import MoestreamError
from moestream.models.names import Reference
from moestream.models.store import BrokenEntry, Entry, ModelFile, ModelStore, PulledModel, locate

FILE = ModelFile("sub/m-Q4_0.gguf", 5, "sha256:" + "ab" * 32)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def model(store: ModelStore, repo_id: str = "org/m", label: str = "Q4_0", **changes: Any) -> PulledModel:
    made = PulledModel(repo_id, label, label, "0" * 40, str(store.folder / repo_id), (FILE,), 1.0)
    return replace(made, **changes)


def pulled(store: ModelStore, *arguments: str) -> PulledModel:
    made = model(store, *arguments)
    store.write(made, pending=False)
    made.paths[0].parent.mkdir(parents=True, exist_ok=True)
    made.paths[0].write_bytes(b"12345")
    return made


def test_a_record_is_read_back(store: ModelStore) -> None:
    made = pulled(store)
    assert store.all() == [Entry(whole=made)]
    assert store.entry("ORG/M:q4_0") == Entry(whole=made)
    assert store.entry("org/m:Q8_0") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "moestream/pulled-model/2"},
        {"files": []},
        {"files": [{"path": "../m", "size_bytes": 1, "digest": "sha256:ab"}]},
        {"files": [{"path": "/etc/passwd", "size_bytes": 1, "digest": "sha256:ab"}]},
        {"files": [{"path": "m", "size_bytes": "1", "digest": "sha256:ab"}]},
        {"files": [{"path": "m", "size_bytes": 1, "digest": "sha256:../x"}]},
        {"files": [{"path": "m", "size_bytes": 1, "digest": "sha256:ab", "made": "no"}]},
        {"folder": "relative"},
        {"folder": 1},
        {"repo_id": "../.."},
        {"more": 1},
    ],
)
def test_records_that_are_none(store: ModelStore, changes: dict[str, Any]) -> None:
    """Above all none that names files elsewhere, which rm would remove."""
    pulled(store)
    (path,) = store.records.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (entry,) = store.all()
    assert isinstance(entry, BrokenEntry) and entry.path == path and entry.reason


def test_states(store: ModelStore) -> None:
    made = model(store)
    store.write(made, pending=True)
    part = made.part(FILE)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"123")
    (entry,) = store.all()
    assert isinstance(entry, Entry)
    assert (entry.state(), entry.present_bytes(), entry.problem()) == ("partial", 3, None)
    part.rename(made.paths[0])
    made.paths[0].write_bytes(b"12345")
    store.write(made, pending=False)
    (entry,) = store.all()
    assert (entry.state(), entry.present_bytes(), entry.pending) == ("complete", 5, None)
    made.paths[0].write_bytes(b"1234")
    assert (entry.state(), entry.problem()) == ("damaged", f"{made.paths[0]} has 4 bytes and not 5")


def test_versions_of_a_file_have_parts_of_their_own(store: ModelStore) -> None:
    made = model(store)
    assert made.part(FILE) != made.part(replace(FILE, digest="sha256:" + "cd" * 32))


def test_names_that_look_alike_have_records_of_their_own(store: ModelStore) -> None:
    for label in ("a/b", "a-b", "x" * 300, "x" * 301):
        store.write(model(store, "org/m", label), pending=False)
    assert len(store.all()) == 4
    store.forget("org/m:a-b", pending=False)
    assert {e.model.label for e in store.all() if isinstance(e, Entry)} == {"a/b", "x" * 300, "x" * 301}


def test_locked(store: ModelStore) -> None:
    busy = pytest.raises(MoestreamError, match="pulling or removing org/M:q4_0 right now")
    with store.locked("org/m:Q4_0"), store.locked("org/m:Q8_0"), busy, store.locked("org/M:q4_0"):
        pass
    with store.locked("org/m:Q4_0"):
        pass


def test_find(store: ModelStore) -> None:
    first, second = pulled(store), pulled(store, "org/m", "UD-Q8_0")
    found = store.find(Reference("ORG", "m", "q4_0"))
    assert found and found.whole == first
    found = store.find(Reference("org", "m", "Q8_0"))
    assert found and found.whole == second
    assert store.find(Reference("org", "other")) is None
    assert store.find(Reference("org", "m", "Q5_0")) is None
    with pytest.raises(MoestreamError, match="'org/m' may be any of 2 models that were pulled: org/m:Q4_0, org/m:UD-Q8_0"):
        store.find(Reference("org", "m"))


def test_locate(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pulled(store).paths[0]
    for text in ("hf:org/m", "hf:org/m:Q4_0", "org/m:q4_0", "org/m", "org/m:sub/m-Q4_0", "hf:org/m:m-Q4_0.gguf"):
        assert locate(Path(text), store) == path
    # a path stays one, whatever it looks like, when something is there
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m").write_bytes(tiny().write())
    assert locate(Path("org/m"), store) == Path("org/m")
    assert locate(Path("hf:org/m"), store) == path
    for text in ("other/m.gguf", "other/m", "m", "/a/b/c", "./m:x", "a:b/c"):
        assert locate(Path(text), store) == Path(text)
    for text in ("hf:other/m", "other/m:Q4_0"):
        with pytest.raises(MoestreamError, match=f"--model {text}: not pulled") as error:
            locate(Path(text), store)
        assert error.value.hint and error.value.hint.startswith(f"moestream pull hf:{text.removeprefix('hf:')};")
    path.unlink()
    with pytest.raises(MoestreamError, match="is missing"):
        locate(Path("hf:org/m"), store)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    store = ModelStore(tmp_path / "models")
    assert store.all() == []
    with pytest.raises(MoestreamError, match="cannot write"), store.locked("org/m:Q4_0"):
        pass
    with pytest.raises(MoestreamError, match="cannot write"):
        store.write(model(store), pending=True)
