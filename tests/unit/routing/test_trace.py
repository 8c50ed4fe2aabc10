"""Reading traces: what is in them, and everything that is wrong with one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import HEADER

from moestream.errors import MoestreamError
from moestream.routing import trace

RECORDS = [
    (0, [[0, 1], [1, 3], [1, 0]]),
    (1, [[299, 256], [5, 299], [7, 8]]),
    (0, [[2, 1]]),
    (1, [[299, 0]]),
    (0, [[2, 3]]),
    (1, [[0, 299]]),
]


def test_choices_and_accesses(write_trace: Callable[..., Path]) -> None:
    t = trace.read(write_trace(RECORDS))
    assert (t.model.fingerprint, t.model.architecture, t.model.name) == ("0123456789abcdef", "qwen3moe", "m.gguf")
    assert (t.n_expert_used, t.n_records, t.n_batches, t.n_tokens, t.n_single, t.truncated) == (2, 6, 3, 5, 2, False)
    small, large = t.layers
    assert (small.layer, small.n_expert, small.n_tokens) == (1, 4, 5)
    assert small.counts.tolist() == [2, 4, 2, 2]
    assert small.accesses.tolist() == [1, 2, 2, 2], "an expert that two tokens of a batch want is one access"
    assert {e: n for e, n in enumerate(large.counts.tolist()) if n} == {0: 2, 5: 1, 7: 1, 8: 1, 256: 1, 299: 4}
    assert {e: n for e, n in enumerate(large.accesses.tolist()) if n} == {0: 2, 5: 1, 7: 1, 8: 1, 256: 1, 299: 3}


def test_without_records(write_trace: Callable[..., Path]) -> None:
    t = trace.read(write_trace())
    assert (t.n_records, t.n_tokens, t.truncated) == (0, 0, False)
    assert all(layer.counts.sum() == 0 for layer in t.layers)


def test_a_last_record_cut_short_is_left_out(write_trace: Callable[..., Path]) -> None:
    path = write_trace(RECORDS)
    whole, last = path.read_bytes(), 8 + 4
    for n in range(1, last):
        path.write_bytes(whole[:-n])
        t = trace.read(path)
        assert (t.truncated, t.n_records, t.layers[1].n_tokens) == (True, 5, 4)
    path.write_bytes(whole[:-last])
    assert trace.read(path).truncated is False


@pytest.mark.parametrize(("record", "message"), [
    ((0, [[0, 4]]), "layer 1 has a choice of expert 4 of 4"),
    ((1, [[0, 300]]), "layer 3 has a choice of expert 300 of 300"),
    ((0, [[0, 1], [2, 2]]), "layer 1 has an expert twice for one token"),
    ((2, [[0, 1]]), "record 1 is of layer 2 of 2"),
    ((0, [[0, 1, 2, 3, 0]]), "record 1 has 1 tokens that use 5 of 4 experts"),
    ((0, [[]]), "record 1 has 1 tokens that use 0 of 4 experts"),
])  # fmt: skip
def test_impossible_records(write_trace: Callable[..., Path], record: Any, message: str) -> None:
    with pytest.raises(MoestreamError) as caught:
        trace.read(write_trace([RECORDS[0], record]))
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(("header", "message"), [
    (b"{", "its header is no JSON"),
    (b"\xff", "its header is no JSON"),
    (b"[]", "its header names no model"),
    ({"model": {"fingerprint": 5, "architecture": "", "name": ""}}, "its header names no model"),
    ({"n_expert_used": 0}, "n_expert_used is 0 in its header"),
    ({"n_expert_used": True}, "n_expert_used is True in its header"),
    ({"layers": []}, "its header names no layers"),
    ({"layers": {}}, "its header names no layers"),
    ({"layers": [5]}, "its header has the impossible layer 5"),
    ({"layers": [{"layer": -1, "n_expert": 4}]}, "the impossible layer {'layer': -1"),
    ({"layers": [{"layer": 1, "n_expert": 65537}]}, "the impossible layer"),
    ({"layers": [{"layer": 1, "n_expert": 4}, {"layer": 1, "n_expert": 4}]}, "its header has layer 1 twice"),
    (b"[" * 100_000, "its header is no JSON"),
])  # fmt: skip
def test_damaged_headers(write_trace: Callable[..., Path], header: Any, message: str) -> None:
    with pytest.raises(MoestreamError) as caught:
        trace.read(write_trace(header=header if isinstance(header, bytes) else {**HEADER, **header}))
    assert message in caught.value.message
    assert caught.value.hint


def test_no_trace(tmp_path: Path, write_trace: Callable[..., Path]) -> None:
    path = tmp_path / "x"
    for data in (b"", b"MOETRACE", b"GGUF" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(MoestreamError, match="is not a trace: it does not begin with MOETRACE"):
            trace.read(path)
    with pytest.raises(MoestreamError, match="is a trace of version 2: expected 1"):
        trace.read(write_trace(version=2))
    good = write_trace()
    good.write_bytes(good.read_bytes()[:-1])
    with pytest.raises(MoestreamError, match="ends inside its header: "):
        trace.read(good)
    with pytest.raises(MoestreamError, match=r"cannot read the trace .*: Is a directory"):
        trace.read(tmp_path)


def test_only_the_beginning_of_what_is_no_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"GGUF")
    os.truncate(path, 1 << 43)  # no memory would hold it
    with pytest.raises(MoestreamError, match="is not a trace"):
        trace.read(path)
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it
    with pytest.raises(MoestreamError, match=r"cannot read the trace .*pipe: it is no regular file"):
        trace.read(tmp_path / "pipe")


def test_what_may_be_recorded_over(tmp_path: Path, write_trace: Callable[..., Path]) -> None:
    trace.check_replaceable(tmp_path / "none")
    trace.check_replaceable(write_trace(RECORDS))
    (tmp_path / "text").write_text("mine")
    with pytest.raises(MoestreamError, match=r"text: the file exists and holds no trace"):
        trace.check_replaceable(tmp_path / "text")
    with pytest.raises(MoestreamError, match="Is a directory"):
        trace.check_replaceable(tmp_path)
    with (tmp_path / "t").open("rb+") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(MoestreamError, match="another model records in it"):
            trace.check_replaceable(tmp_path / "t")
