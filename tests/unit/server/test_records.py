"""State files, and telling a process from another one with its pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moestream.errors import MoestreamError
from moestream.server.records import (
    BrokenRecord,
    ProcessMark,
    RecordStore,
    ServerRecord,
    fresh_log,
    limit_log,
    tail,
)

GONE = ProcessMark(2**22 + 1, 0.0, "gone", ("gone",))


def record(supervisor: ProcessMark, port: int = 8080) -> ServerRecord:
    return ServerRecord(
        port=port, host="127.0.0.1", url=f"http://127.0.0.1:{port}", state="ready", supervisor=supervisor,
        server=None, detached=True, engine_id="e", backend="cpu", model="m.gguf", slots="8", argv=("llama-server",),
        log_path="x.log", started_s=1.5, api_key="k",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "servers")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_mark_knows_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    mark = ProcessMark.of(sleeper.pid)
    assert mark.alive()
    assert not replace(mark, token=mark.token + "1").alive()
    assert not replace(mark, cmdline=("llama-server",)).alive()
    assert replace(mark, cmdline=mark.cmdline[-1:]).alive()
    assert not replace(mark, pid=os.getpid()).alive()


def test_a_zombie_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    mark = ProcessMark.of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
    assert not mark.alive()
    assert mark.send(signal.SIGTERM) is False


def test_send_reaches_only_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    mark = ProcessMark.of(sleeper.pid)
    assert replace(mark, token="other").send(signal.SIGKILL) is False
    assert sleeper.poll() is None
    assert mark.send(signal.SIGTERM) is True
    assert sleeper.wait(10) == -signal.SIGTERM
    assert mark.send(signal.SIGTERM) is False


def test_round_trip_and_mode(store: RecordStore) -> None:
    ours = record(ProcessMark.of(os.getpid()))
    store.claim(ours)
    assert store.read(8080) == ours
    assert store.path(8080).stat().st_mode & 0o777 == 0o600
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert "api_key" not in repr(ours)
    assert [p.name for p in store.folder.iterdir() if p.suffix != ".json"] == [".lock"]


def test_claim_refuses_a_live_one_and_replaces_a_stale_one(store: RecordStore) -> None:
    store.claim(record(GONE))
    ours = record(ProcessMark.of(os.getpid()))
    store.claim(ours)
    with pytest.raises(MoestreamError, match="port 8080 belongs to a server"):
        store.claim(record(GONE))
    assert store.read(8080) == ours


def test_only_the_owner_changes_a_record(store: RecordStore) -> None:
    ours = record(ProcessMark.of(os.getpid()))
    store.claim(ours)
    store.update(replace(ours, supervisor=GONE, state="exited"))
    store.remove(replace(ours, supervisor=GONE))
    assert store.read(8080) == ours
    store.update(replace(ours, state="stopping"))
    assert store.read(8080) == replace(ours, state="stopping")
    store.remove(ours)
    assert store.read(8080) is None


def test_remove_stale_leaves_what_runs(store: RecordStore) -> None:
    store.claim(record(ProcessMark.of(os.getpid())))
    assert store.remove_stale(8080) is False
    store.claim(record(GONE, port=1))
    assert store.remove_stale(1) is True
    assert [r.port for r in store.all()] == [8080]


def test_one_of_many_claims_wins(store: RecordStore, sleeper: subprocess.Popen[bytes]) -> None:
    """All find the same stale record; one replaces it."""

    class Slow(RecordStore):
        def read(self, port: int) -> ServerRecord | BrokenRecord | None:
            found = super().read(port)
            time.sleep(0.05)  # time for the others to find the same
            return found

    store = Slow(store.folder)
    store.claim(record(GONE))
    alive = ProcessMark.of(sleeper.pid)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def claim(i: int) -> None:
        barrier.wait()
        try:
            store.claim(replace(record(alive), engine_id=str(i)))
            won.append(i)
        except MoestreamError:
            pass

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    current = store.read(8080)
    assert isinstance(current, ServerRecord)
    assert [str(i) for i in won] == [current.engine_id]


def test_the_last_record_stays_for_who_asked_for_it(store: RecordStore) -> None:
    ours = record(ProcessMark.of(os.getpid()))
    store.claim(ours)
    store.finish(ours)
    assert store.read(8080) is None
    store.claim(ours)
    store.want_end(8080)
    store.finish(replace(ours, supervisor=GONE, outcome="killed"))
    assert store.read(8080) == ours  # not its owner
    last = replace(ours, supervisor=ours.supervisor, outcome="stopped")
    store.finish(last)
    assert store.read(8080) == last


def test_a_wish_dies_with_its_server(store: RecordStore) -> None:
    store.claim(record(GONE))
    store.want_end(8080)
    assert store.remove_stale(8080) is True
    assert [p.name for p in store.folder.iterdir()] == [".lock"]
    store.want_end(8080)
    ours = record(ProcessMark.of(os.getpid()))
    store.claim(ours)
    store.finish(ours)
    assert store.read(8080) is None


def test_limit_logs_keeps_the_newest_and_those_with_a_record(store: RecordStore) -> None:
    store.claim(record(GONE))
    for port in (1, 2, 3, 8080):
        store.log_path(port).touch()
        os.utime(store.log_path(port), (port, port))
    (store.folder / "4.log.1").touch()
    (store.folder / "notes.log").touch()
    store.limit_logs(keep=2)
    assert {p.name for p in store.folder.iterdir()} == {"3.log", "4.log.1", "8080.log", "8080.json", "notes.log", ".lock"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "moestream/server-record/1"}', '{"schema": "other/9"}'])
def test_broken_records(store: RecordStore, text: str) -> None:
    store.claim(record(GONE))
    store.path(8080).write_text(text)
    broken = store.read(8080)
    assert isinstance(broken, BrokenRecord)
    assert broken.reason
    store.claim(record(GONE))
    assert isinstance(store.read(8080), ServerRecord)


def test_a_later_field_does_not_matter(store: RecordStore) -> None:
    store.claim(record(GONE))
    raw = json.loads(store.path(8080).read_text())
    store.path(8080).write_text(json.dumps({**raw, "later": 1}))
    assert store.read(8080) == record(GONE)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoestreamError, match="cannot write") as caught:
        RecordStore(tmp_path / "file" / "servers").claim(record(GONE))
    assert caught.value.hint is not None and "MOESTREAM_HOME" in caught.value.hint


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == []
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail(log, 2) == ["line 998", "line 999"]
    assert tail(log, 0) == []
    assert tail(log, 5000) == [f"line {i}" for i in range(1000)]
    assert tail(log, 5000, max_bytes=20) == ["line 998", "line 999"]  # the cut line is left out


def test_fresh_log_keeps_the_one_before(tmp_path: Path) -> None:
    log = tmp_path / "servers" / "1.log"
    fresh_log(log)
    log.write_text("old")
    fresh_log(log)
    assert log.read_text() == ""
    assert log.with_name("1.log.1").read_text() == "old"
    assert log.stat().st_mode & 0o777 == 0o600


def test_limit_log_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "ab") as server:
        server.write(b"x" * 100)
        server.flush()
        assert limit_log(log, 100) is False
        server.write(b"y")
        server.flush()
        assert limit_log(log, 100) is True
        server.write(b"new")
        server.flush()
    assert log.read_bytes() == b"new"
    assert log.with_name("log.1").read_bytes() == b"x" * 100 + b"y"


def test_started_is_about_now(sleeper: subprocess.Popen[bytes]) -> None:
    assert abs(ProcessMark.of(sleeper.pid).created_s - time.time()) < 60


@pytest.mark.parametrize(
    "change",
    [
        {"url": 5}, {"started_s": "yesterday"}, {"port": 8081}, {"port": "8080"}, {"api_key": ["k"]},
        {"supervisor": {"pid": -1, "created_s": 0, "token": "t", "cmdline": []}},
        {"server": {"pid": 2**80, "created_s": 0, "token": "t", "cmdline": []}},
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_true(store: RecordStore, change: dict[str, object]) -> None:
    store.claim(record(GONE))
    path = store.path(8080)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert isinstance(store.read(8080), BrokenRecord)


def test_what_cannot_be_removed_is_an_error(store: RecordStore) -> None:
    store.path(8080).mkdir(parents=True)
    with pytest.raises(MoestreamError, match=r"cannot remove .*8080\.json: Is a directory"):
        store.remove_stale(8080)
    with pytest.raises(MoestreamError, match=r"cannot write .*8080\.json: Is a directory"):
        store.claim(record(GONE))


def test_a_port_is_listed_once(store: RecordStore) -> None:
    store.claim(record(GONE))
    (store.folder / "08080.json").write_text("{}")
    assert [r.port for r in store.all()] == [8080]
