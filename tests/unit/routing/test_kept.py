"""The kept map: how traces go into it, how it ages, what becomes of what is damaged, and several that end at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from trace_files import HEADER

from moestream import gguf_facts, paths
from moestream.errors import MoestreamError
from moestream.routing import kept, maps
from moestream.routing.fingerprint import fingerprint
from moestream.routing.maps import MapLayer, RouterMap
from moestream.routing.trace import ModelName

OWN = HEADER["model"]["fingerprint"]
RECORDS = [(0, [[0, 1], [1, 2]]), (1, [[299, 5], [299, 6]])]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def a_map(tokens: int, *counts: int, layer: int = 1) -> RouterMap:
    return RouterMap(ModelName(OWN, "qwen3moe", "old.gguf"), tokens, 2, (MapLayer(layer, counts),))


def test_traces_add_up(write_trace: Callable[..., Path]) -> None:
    path = kept.path_of(OWN)
    assert kept.take_in(write_trace(RECORDS)) == (path, 2, None)
    assert kept.take_in(write_trace(RECORDS, name="u")) == (path, 2, None)
    made = maps.read(path)
    assert (made.tokens, made.layers[0].counts, made.slots) == (4, (2, 4, 2, 0), None)
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", path.name], "nothing is left beside it"


def test_a_trace_is_deleted_when_it_is_in(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    kept.take_in(write_trace(RECORDS))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("content", ["header", "empty", "gone"])
def test_nothing_was_recorded(write_trace: Callable[..., Path], tmp_path: Path, content: str) -> None:
    path = write_trace([])
    if content == "empty":
        path.write_bytes(b"")
    if content == "gone":
        path.unlink()
    assert kept.take_in(path)[1:] == (0, None)
    assert not path.exists() and not kept.path_of(OWN).exists()


def test_ageing() -> None:
    """Halved until it stands for few enough tokens; what was seen once long ago is forgotten."""
    young = a_map(kept.AGED_TOKENS, 7, 1, 0)
    assert kept.aged(young) == young
    assert kept.aged(replace(young, tokens=kept.AGED_TOKENS + 1)) == a_map(kept.AGED_TOKENS // 2, 3, 0, 0)
    assert kept.aged(a_map(kept.AGED_TOKENS * 4, 9, 8, 7)) == a_map(kept.AGED_TOKENS, 2, 2, 1)


def test_recent_use_counts_more_and_the_map_stays_bounded() -> None:
    now = a_map(0, 0, 0)
    for _ in range(1000):
        now = kept.added(kept.aged(now), a_map(1000, 2000, 0))
    assert now.tokens <= kept.AGED_TOKENS + 1000
    for _ in range(kept.AGED_TOKENS // 1000 + 1):
        now = kept.added(kept.aged(now), a_map(1000, 0, 2000))
    assert now.layers[0].by_use()[0] == 1, "what is used now leads after a map's worth of tokens, however much went before"


def test_layers_that_one_alone_has_stay() -> None:
    both = kept.added(a_map(5, 1, 2), a_map(6, 3, 4, layer=0))
    assert (both.tokens, both.layers) == (11, (MapLayer(0, (3, 4)), MapLayer(1, (1, 2))))
    with pytest.raises(MoestreamError, match="layer 1 has 2 experts in the kept map, and 3 now"):
        kept.added(a_map(5, 1, 2), a_map(6, 1, 2, 3))


@pytest.mark.parametrize("what", ["no JSON", "other experts", "a folder"])
def test_a_damaged_map_is_moved_aside(write_trace: Callable[..., Path], what: str) -> None:
    path = kept.path_of(OWN)
    path.parent.mkdir(parents=True)
    if what == "a folder":
        path.mkdir()
    else:
        path.write_text("{" if what == "no JSON" else json.dumps(a_map(9, 1, 2, 3).as_json()))
    _, tokens, complaint = kept.take_in(write_trace(RECORDS))
    assert tokens == 2 and complaint is not None and f"it is moved to {path}.damaged" in complaint
    assert maps.read(path).tokens == 2
    assert path.with_name(path.name + ".damaged").exists()


def test_a_damaged_trace_is_told_and_deleted(write_trace: Callable[..., Path]) -> None:
    kept.take_in(write_trace(RECORDS))
    before = kept.path_of(OWN).read_bytes()
    path = write_trace([(0, [[0, 9]])])  # of 4 experts
    with pytest.raises(MoestreamError, match="has a choice of expert 9 of 4"):
        kept.take_in(path)
    assert not path.exists() and kept.path_of(OWN).read_bytes() == before


def test_a_fingerprint_that_leads_elsewhere(write_trace: Callable[..., Path], home: Path) -> None:
    path = write_trace(RECORDS, {**HEADER, "model": {**HEADER["model"], "fingerprint": "../../../escaped"}})
    with pytest.raises(MoestreamError, match="is no fingerprint of a model"):
        kept.take_in(path)
    assert [p for p in home.rglob("*") if "escaped" in p.name] == [] and not path.exists()


@contextmanager
def no_room(n_bytes: int) -> Iterator[None]:
    """No file grows beyond this; the kernel's error is that of a file too large, and comes from the same call as a full disk's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_nothing(write_trace: Callable[..., Path]) -> None:
    kept.take_in(write_trace(RECORDS))
    path, trace = kept.path_of(OWN), write_trace(RECORDS)
    before = path.read_bytes()
    with no_room(100), pytest.raises(MoestreamError, match=f"cannot write the map {path}"):
        kept.take_in(trace)
    assert path.read_bytes() == before and trace.exists()
    assert kept.take_in(trace)[1] == 2 and maps.read(path).tokens == 4


def test_several_at_once(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    """Without the lock they read the same map and each writes its own sum."""
    traces = [write_trace(RECORDS * 50, name=f"{i}.trace") for i in range(6)]
    go = tmp_path / "go"
    code = """
import pathlib, sys, time
from moestream.routing import kept
print("ready", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.001)
for trace in sys.argv[2:]:
    kept.take_in(pathlib.Path(trace))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(go), *map(str, part)], cwd=ROOT, stdout=subprocess.PIPE)
        for part in (traces[:3], traces[3:])
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    go.touch()
    assert [process.wait(60) for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()  # type: ignore[union-attr]
    assert maps.read(kept.path_of(OWN)).tokens == 6 * 100


def test_a_lock_that_is_not_let_go(write_trace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LOCK_TIMEOUT_S", 0.1)
    path = write_trace(RECORDS)
    with kept.locked(), pytest.raises(MoestreamError, match=r"another process holds .*\.lock"):
        kept.take_in(path)
    assert path.exists()


def test_read_for_a_model() -> None:
    facts = gguf_facts.read(paths.demo_model())
    own = fingerprint(facts)
    assert kept.read_for(facts, own) is None
    path = kept.path_of(own)
    path.parent.mkdir(parents=True)
    model = ModelName(own, "qwen3moe", "demo.gguf")

    def keep(router_map: RouterMap) -> None:
        path.write_text(json.dumps(router_map.as_json()))

    some = tuple(MapLayer(il, tuple(range(64))) for il in range(7))
    keep(RouterMap(model, 9, 6, some, {il: 8 for il in range(7)}))
    found = kept.read_for(facts, own)
    assert found is not None and found.slots is None
    assert found.layers == (*some, MapLayer(7, (0,) * 64)), "a layer that was never used has counts of 0"
    for wrong, message in (
        (RouterMap(replace(model, fingerprint="0" * 16), 9, 6, some), "is a map of another model: 0000000000000000"),
        (RouterMap(model, 9, 6, (MapLayer(8, (1,) * 64),)), "the model has not 64 experts in layer 8"),
        (RouterMap(model, 9, 6, (MapLayer(0, (1, 2)),)), "the model has not 2 experts in layer 0"),
    ):
        keep(wrong)
        with pytest.raises(MoestreamError, match=message) as caught:
            kept.read_for(facts, own)
        assert caught.value.hint == "moestream map forget removes it"


def test_forget(write_trace: Callable[..., Path]) -> None:
    other = {**HEADER, "model": {**HEADER["model"], "fingerprint": "f" * 16}}
    waiting = [write_trace(RECORDS, name="a"), write_trace(RECORDS, other, name="b")]
    assert kept.forget(OWN) == []
    for header, name in ((HEADER, "t"), (other, "u")):
        kept.take_in(write_trace(RECORDS, header, name=name))
    mine, others = kept.path_of(OWN), kept.path_of("f" * 16)
    damaged = others.with_name(others.name + ".damaged")
    damaged.write_text("{")
    assert kept.forget(OWN, waiting) == [mine, waiting[0]]
    assert others.exists() and waiting[1].exists()
    assert kept.forget(None, waiting[1:]) == [others, damaged, waiting[1]]
    assert [p.name for p in others.parent.iterdir()] == [".lock"]


def test_tokens_that_are_left_out(write_trace: Callable[..., Path]) -> None:
    """Batches with one of them are, in all their layers; the others are not."""
    batches = [[[0, 1]], [[0, 2], [0, 3]], [[1, 2]], [[2, 3]]]  # tokens 0, 1 and 2, 3, 4
    path = write_trace([record for tokens in batches for record in ((0, tokens), (1, [[299, 5]]))])
    kept.skip_of(path).write_text("2 3\nnonsense\n4 9\n")
    assert kept.take_in(path)[1] == 2
    made = maps.read(kept.path_of(OWN))
    assert (made.tokens, made.layers[0].counts) == (2, (1, 2, 1, 0)) and made.layers[1].counts[299] == 2
    assert not kept.skip_of(path).exists() and not path.exists()


def test_nothing_but_what_is_left_out(write_trace: Callable[..., Path]) -> None:
    path = write_trace(RECORDS)
    kept.skip_of(path).write_text("0 2\n")
    assert kept.take_in(path)[1:] == (0, None)
    assert not kept.path_of(OWN).exists() and not kept.skip_of(path).exists()


def test_forget_takes_what_waits_along(write_trace: Callable[..., Path]) -> None:
    path = write_trace(RECORDS)
    kept.skip_of(path).write_text("0 1\n")
    assert kept.forget(None, [path]) == [path]
    assert not path.exists() and not kept.skip_of(path).exists()


def test_a_folder_that_can_be_written(home: Path) -> None:
    kept.check_writable()
    assert list((home / "data" / "maps").iterdir()) == []
    (home / "data" / "maps").rmdir()
    (home / "data" / "maps").touch()
    with pytest.raises(MoestreamError, match=f"cannot write to {home}/data/maps: ") as caught:
        kept.check_writable()
    assert caught.value.hint == "set MOESTREAM_HOME to a folder that can be written"
