"""Maps: made of traces, written and read again, compared; everything that is wrong with one."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import HEADER

from moestream.errors import MoestreamError
from moestream.routing import files, maps, trace

FIRST = [(0, [[0, 1], [1, 2]]), (1, [[299, 5], [299, 6]])]
SECOND = [(0, [[1, 3]]), (1, [[299, 0]])]
GOOD: dict[str, Any] = {
    "format": "moestream.map",
    "version": 1,
    "model": HEADER["model"],
    "tokens": 3,
    "n_expert_used": 2,
    "layers": [{"layer": 1, "n_expert": 4, "counts": [1, 3, 1, 1]}, {"layer": 3, "n_expert": 2, "counts": [0, 3]}],
    "slots": {"1": 2, "3": 2},
}


def test_counts_of_several_traces(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    made = maps.from_traces([trace.read(write_trace(FIRST)), trace.read(write_trace(SECOND, name="u"))])
    assert (made.tokens, made.n_expert_used, made.model.name) == (3, 2, "m.gguf")
    assert made.layers[0] == maps.MapLayer(1, (1, 3, 1, 1))
    assert {e: n for e, n in enumerate(made.layers[1].counts) if n} == {0: 1, 5: 1, 6: 1, 299: 3}
    assert made.layers[0].by_use() == [1, 0, 2, 3]
    assert (made.layers[0].share_of_top(1), made.layers[0].share_of_top(4)) == (0.5, 1)
    maps.write(made, tmp_path / "m")
    assert maps.read(tmp_path / "m") == made
    assert [p.name for p in tmp_path.iterdir() if p.name not in "tum"] == [], "nothing is left beside it"


def test_traces_that_do_not_belong_together(write_trace: Callable[..., Path]) -> None:
    first = trace.read(write_trace(FIRST))
    other = {**HEADER, "model": {**HEADER["model"], "fingerprint": "f" * 16}}
    with pytest.raises(
        MoestreamError, match=r"u is of another model: m.gguf \(f{16}\), and .*t is of m.gguf \(0123456789abcdef\)"
    ):
        maps.from_traces([first, trace.read(write_trace(SECOND, other, name="u"))])
    with pytest.raises(MoestreamError, match="u has other layers than"):
        maps.from_traces([first, trace.read(write_trace([], {**HEADER, "layers": HEADER["layers"][:1]}, name="u"))])
    with pytest.raises(MoestreamError, match=r"nothing was recorded in .*u"):
        maps.from_traces([trace.read(write_trace(name="u"))])


def test_write_replaces_maps_alone(write_trace: Callable[..., Path], tmp_path: Path) -> None:
    made = maps.from_traces([trace.read(write_trace(FIRST))])
    before = (tmp_path / "t").read_bytes()
    with pytest.raises(MoestreamError, match="is not a map") as caught:
        maps.write(made, tmp_path / "t")
    assert caught.value.hint == "choose another name, or remove it"
    assert (tmp_path / "t").read_bytes() == before
    (tmp_path / "m").write_text(json.dumps(GOOD))
    maps.write(made, tmp_path / "m")
    assert maps.read(tmp_path / "m") == made
    with pytest.raises(MoestreamError, match=r"cannot write .*: No such file"):
        maps.write(made, tmp_path / "no" / "m")


def test_good(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps(GOOD))
    read = maps.read(tmp_path / "m")
    assert read.slots == {1: 2, 3: 2}
    assert read.as_json() == GOOD


def _set(value: Any, *path: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(("data", "message"), [
    ([], '"format" is not "moestream.map"'),
    (_set("map", "format"), '"format" is not "moestream.map"'),
    (_set(2, "version"), "is a map of version 2: expected 1"),
    (_set({}, "model"), "it names no model"),
    (_set([], "layers"), "it has no layers"),
    (_set(-1, "tokens"), "tokens is -1: expected a number from 0"),
    (_set(0, "n_expert_used"), "n_expert_used is 0: expected a number from 1"),
    (_set(7, "layers", 0), "a layer has no counts: 7"),
    (_set(1, "layers", 1, "layer"), "layer 1 is there twice"),
    (_set(5, "layers", 0, "n_expert"), "layer 1 has 4 counts for 5 experts"),
    (_set(-1, "layers", 0, "counts", 2), "a count of layer 1 is -1: expected a number from 0"),
    (_set(1.5, "layers", 0, "counts", 2), "a count of layer 1 is 1.5"),
    (_set(True, "layers", 0, "counts", 2), "a count of layer 1 is True"),
    (_set({"1": 2}, "slots"), "its slots are not of its layers"),
    (_set({"1": 2, "4": 2}, "slots"), "its slots are not of its layers"),
    (_set(0, "slots", "1"), "slots of layer 1 is 0: expected a number from 1"),
    (_set(5, "slots", "1"), "slots of layer 1 is 5: it has 4 experts"),
    (_set(None, "slots"), "its slots are not of its layers"),
])  # fmt: skip
def test_damaged(tmp_path: Path, data: Any, message: str) -> None:
    (tmp_path / "m").write_text(json.dumps(data))
    with pytest.raises(MoestreamError) as caught:
        maps.read(tmp_path / "m")
    assert message in caught.value.message
    assert caught.value.hint


def test_no_map(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("{")
    with pytest.raises(MoestreamError, match="is not a map: it is no JSON"):
        maps.read(tmp_path / "m")
    with pytest.raises(MoestreamError, match=r"cannot read the map .*: No such file"):
        maps.read(tmp_path / "none")
    (tmp_path / "m").write_text("[" * 100_000)
    with pytest.raises(MoestreamError, match="is not a map: it is no JSON"):
        maps.read(tmp_path / "m")
    os.truncate(tmp_path / "m", 1 << 43)
    with pytest.raises(MoestreamError, match="and no map has more than 256"):
        maps.read(tmp_path / "m")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MoestreamError, match=r"cannot read the map .*pipe: it is no regular file"):
        maps.read(tmp_path / "pipe")


def test_a_map_of_another_version_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(json.dumps(_set(2, "version")))
    with pytest.raises(MoestreamError, match="is a map of version 2") as caught:
        maps.check_replaceable(tmp_path / "m")
    assert caught.value.hint == "choose another name, or remove it"


def test_nothing_stays_of_a_write_that_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "old", "map") as fresh:
        fresh.write_text("half")
        raise KeyboardInterrupt
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("old", "old")]


def test_what_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with files.replacing(tmp_path / "link", "map") as fresh:
        fresh.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


def test_difference() -> None:
    model = trace.ModelName("f", "a", "n")
    a = maps.RouterMap(model, 4, 2, (maps.MapLayer(0, (4, 2, 2, 0)), maps.MapLayer(1, (1, 1, 1, 1))))
    b = maps.RouterMap(model, 8, 2, (maps.MapLayer(0, (0, 4, 4, 8)), maps.MapLayer(1, (2, 2, 2, 2))))
    first, second = maps.difference(a, b, 2)
    assert (first.common, first.distance) == (1, 0.5)
    assert (second.common, second.distance) == (2, 0)
    assert maps.difference(a, a, 3)[0] == maps.LayerDifference(0, 3, 0)


def test_coverage(write_trace: Callable[..., Path]) -> None:
    made = maps.from_traces([trace.read(write_trace(FIRST))])
    held_out = trace.read(write_trace([(0, [[1, 3], [1, 0]]), (1, [[299, 7], [299, 5]])], name="u"))
    # accesses: {1, 3, 0} and {299, 7, 5}; the map's first of each layer are 1 and 299, then 0 and 5
    assert [maps.coverage(made, held_out, k) for k in (1, 2, 300)] == [2 / 6, 4 / 6, 1]


def test_coverage_of_a_trace_with_other_layers(write_trace: Callable[..., Path]) -> None:
    made = maps.from_traces([trace.read(write_trace(FIRST))])
    for layer, there in (({"layer": 1, "n_expert": 8}, "4 there"), ({"layer": 2, "n_expert": 4}, "no such layer")):
        other = trace.read(write_trace([(0, [[1, 3]])], {**HEADER, "layers": [layer, HEADER["layers"][1]]}, name="u"))
        with pytest.raises(MoestreamError, match=f"and the map has {there}"):
            maps.coverage(made, other, 2)
