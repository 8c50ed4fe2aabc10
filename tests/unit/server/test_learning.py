"""Whether a server starts with the kept router map and adds to it, and that its files keep nothing from starting or ending."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moestream import gguf_facts, paths
from moestream.commands.start import check_pins
from moestream.errors import MoestreamError
from moestream.server import learning
from moestream.server.arguments import ServerSettings
from moestream.server.learning import Learning, Wishes, wishes
from moestream.server.records import RecordStore

DEMO = paths.demo_model()
BOTH, NEITHER = Wishes(True, True), Wishes(False, False)


@pytest.mark.parametrize(
    ("given", "environment", "meant"),
    [
        ({}, {}, BOTH),
        ({"slots": "off"}, {}, NEITHER),
        ({"kept_map": False}, {}, NEITHER),
        ({"kept_map": True}, {}, BOTH),
        ({"kept_map": True}, {"LLAMA_ARG_MOE_MAP": "m"}, BOTH),
        ({"kept_map": False, "learn": "on"}, {}, Wishes(False, True)),
        ({"map": Path("m")}, {}, NEITHER),
        ({"map": Path("m"), "learn": "on"}, {}, Wishes(False, True)),
        ({"learn": "off"}, {}, Wishes(True, False)),
        ({"warm": "off"}, {}, Wishes(False, True)),
        ({"warm": "9"}, {}, BOTH),
        ({"extra": ("--moe-trace", "t")}, {}, Wishes(True, False)),
        ({"extra": ("--moe_trace_limit", "9")}, {}, Wishes(True, False)),
        ({}, {"LLAMA_ARG_MOE_TRACE": "t"}, Wishes(True, False)),
        ({}, {"LLAMA_ARG_MOE_TRACE": ""}, BOTH),
        ({}, {"LLAMA_ARG_MOE_MAP": "m"}, NEITHER),
        ({"learn": "on"}, {"LLAMA_ARG_MOE_MAP": "m"}, Wishes(False, True)),
    ],
)
def test_wishes(given: dict[str, Any], environment: dict[str, str], meant: Wishes) -> None:
    assert wishes(ServerSettings(model=DEMO, **given), environment) == meant


@pytest.mark.parametrize(
    ("given", "backend", "by_card"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"extra": ("-ngl", "99")}, "cuda", True),
        ({"extra": ("-ngl", "0")}, "cuda", False),
        ({"extra": ("--gpu-layers", "0", "--n-gpu-layers", "9")}, "cuda", True),
        ({"extra": ("--cpu-moe",)}, "cuda", False),
        ({"planned": ("-ngl", "99", "--cpu-moe")}, "cuda", False),
        ({"policy": "heat"}, "cuda", False),
        ({"policy": "lru"}, "cuda", True),
        ({"gpu_path": "copy"}, "cuda", False),
        ({"pool": "host"}, "cuda", False),
    ],
)
def test_who_looks_after_the_slots(given: dict[str, Any], backend: str, by_card: bool) -> None:
    assert learning.is_by_card(ServerSettings(model=DEMO, **given), backend) is by_card


def test_a_card_that_looks_after_its_slots_records_nothing_unless_asked() -> None:
    settings = ServerSettings(model=DEMO)
    assert wishes(settings, {}, by_card=True) == Wishes(True, False)
    assert wishes(replace(settings, learn="on"), {}, by_card=True) == BOTH


def test_it_is_told_that_nothing_is_recorded(store: RecordStore) -> None:
    facts = gguf_facts.read(DEMO)
    made, said = learning.plan_for(ServerSettings(model=DEMO), facts, store, {}, by_card=True)
    assert made is not None and not made.learn
    assert said == [
        "notice: nothing is added to the kept router map: a card looks after its slots, and records nothing "
        "(--learn on: the host does both, slower)"
    ]
    assert learning.plan_for(ServerSettings(model=DEMO, learn="off"), facts, store, {}, by_card=True)[1] == []


def test_two_traces() -> None:
    settings = ServerSettings(model=DEMO, learn="on", extra=("--moe-trace", "t"))
    with pytest.raises(MoestreamError, match="--learn on cannot be combined with --moe-trace: a server records one trace"):
        wishes(settings, {})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordStore:
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path))
    made = RecordStore()
    made.folder.mkdir(parents=True)
    return made


PLAN = Learning(learn=True, kept_path="/maps/m.json", tokens=9, map_text="{}\n")
IN_USE = {"path": "/maps/m.json", "used": True, "tokens": 9, "problem": None}


def test_files_beside_the_record(store: RecordStore) -> None:
    argv, said = learning.begin(PLAN, store, 80)
    trace = store.trace_path(80)
    assert argv == ["--moe-map", str(store.map_path(80)), "--moe-trace", str(trace), "--moe-trace-limit", "16"]
    assert said == [] and trace.read_bytes() == b"" and store.map_path(80).read_text() == "{}\n"
    assert learning.as_json(PLAN, argv) == {**IN_USE, "learning": True}
    assert learning.as_json(PLAN, argv[:2]) == {**IN_USE, "learning": False}
    trace.write_bytes(b"x")
    recorded, said = learning.end(PLAN, store, 80)
    assert said == [] and recorded is not None and recorded.read_bytes() == b"x"
    assert not trace.exists() and not store.map_path(80).exists()
    assert store.recorded() == [recorded]


def test_files_that_cannot_be_written(store: RecordStore) -> None:
    for path in (store.map_path(80), store.trace_path(80)):
        path.mkdir()
    argv, said = learning.begin(PLAN, store, 80)
    assert argv == []
    assert said == [
        f"warning: the kept router map is not used: cannot write {store.map_path(80)}: Is a directory",
        f"warning: nothing is recorded for the kept router map: cannot write {store.trace_path(80)}: Is a directory",
    ]


def test_a_disk_with_little_room(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9 << 20))
    argv, said = learning.begin(PLAN, store, 80)
    assert "--moe-trace" not in argv and "--moe-map" in argv
    assert said[0].endswith(f"{store.trace_path(80)}: there are only 9 MiB free, and a trace may take 16")


def test_a_disk_that_takes_nothing(store: RecordStore) -> None:
    """A quota, say: there is room, and not for us. The engine would refuse to start with a trace that it cannot write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        argv, said = learning.begin(PLAN, store, 80)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--moe-trace" not in argv and "nothing is recorded" in said[0]
    assert not store.trace_path(80).exists()


def test_leftovers_are_tried_once_more(store: RecordStore) -> None:
    store.trace_path(80).write_bytes(b"no trace")
    store.map_path(80).write_text("{}")
    (said,) = learning.take_in_leftovers(store)
    assert "it does not begin with MOETRACE; it is lost" in said
    assert [p.name for p in store.folder.iterdir()] == [".lock"]


def test_a_full_disk_at_the_end_and_at_the_next_start(store: RecordStore) -> None:
    paths.maps_dir().parent.mkdir(parents=True)
    paths.maps_dir().write_text("in the way")
    store.trace_path(80).write_bytes(b"x")
    recorded, _ = learning.end(PLAN, store, 80)
    assert recorded is not None
    (said,) = learning.take_in(recorded)
    assert said.startswith("warning: ") and said.endswith("; the next start tries again") and recorded.exists()
    (said,) = learning.take_in_leftovers(store)
    assert said.endswith("; it is lost") and not recorded.exists(), "what cannot be added does not pile up"


def test_the_trace_of_a_server_that_runs_is_left_alone(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.server.records import ProcessMark, ServerRecord

    def record(supervisor: ProcessMark) -> ServerRecord:
        return ServerRecord(
            port=80, host="h", url="u", state="ready", supervisor=supervisor, server=None, detached=False, engine_id="e",
            backend="cpu", model="m", slots="8", argv=("--moe-trace", str(store.trace_path(80))), log_path="l", started_s=0.0,
        )  # fmt: skip

    learning.leave_out(record(ProcessMark.of(os.getpid())), store, 3, 5)
    learning.leave_out(record(ProcessMark.of(os.getpid())), store, 7, 7)
    assert store.skip_path(80).read_text() == "3 5\n"
    us = ProcessMark.of(os.getpid())
    store.claim(record(us))
    store.trace_path(80).write_bytes(b"x")
    assert store.put_aside_trace(80) is None and store.trace_path(80).exists()
    assert [r.port for r in learning.recording(store)] == [80]
    store.remove(record(us))
    aside = store.put_aside_trace(80)
    assert aside is not None and not store.trace_path(80).exists()
    assert not store.skip_path(80).exists() and aside.with_suffix(".skip").read_text() == "3 5\n"


@pytest.mark.parametrize(
    ("slots", "top_k"), [("8", 2), ("64", 58), ("all", 58), ("auto", 60), ("map", 60), ("6", 0), ("6", None)]
)
def test_pins_that_leave_a_token_its_slots(slots: str, top_k: int | None) -> None:
    check_pins(gguf_facts.read(DEMO), slots, top_k)


@pytest.mark.parametrize(
    ("slots", "top_k", "n_slot", "hint"),
    [
        ("8", 3, 8, "--router-top-k 2 or less, or --slots 9"),
        ("6", 1, 6, "--slots 7"),
        ("all", 59, 64, "--router-top-k 58"),
        ("64", 59, 64, "--router-top-k 58"),
    ],
)
def test_pins_that_do_not(slots: str, top_k: int, n_slot: int, hint: str) -> None:
    with pytest.raises(MoestreamError) as caught:
        check_pins(gguf_facts.read(DEMO), slots, top_k)
    assert caught.value.message == (
        f"--router-top-k {top_k} is too many: layer 0 has {n_slot} slots, and a token of {DEMO.name} uses 6 experts"
    )
    assert caught.value.hint == hint


def test_what_may_be_asked_of_a_server_that_learns(store: RecordStore) -> None:
    """One that sleeps counts from 0 when it wakes, and its trace goes on: nobody can say which tokens were the check's."""
    trace = ("--moe-trace", str(store.trace_path(80)))
    for argv, environment, may in (
        (trace, {}, True),
        ((*trace, "--sleep-idle-seconds", "9"), {}, False),
        (trace, {"LLAMA_ARG_SLEEP_IDLE_SECONDS": "9"}, False),
        (("--sleep-idle-seconds", "9"), {}, True),
        (("--sleep-idle-seconds", "9", "--moe-trace", "mine"), {}, True),
    ):
        assert learning.can_leave_out(SimpleNamespace(port=80, argv=argv), store, environment) is may  # type: ignore[arg-type]
    learning.leave_out(SimpleNamespace(port=80, argv=("--moe-trace", "mine")), store, 1, 2)  # type: ignore[arg-type]
    assert not store.skip_path(80).exists()


def test_what_another_server_left_out_is_forgotten(store: RecordStore) -> None:
    store.skip_path(80).write_text("1 2\n")
    learning.begin(PLAN, store, 80)
    assert not store.skip_path(80).exists()
