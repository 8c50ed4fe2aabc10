"""gguf_facts refuses what malformed.py makes: one MoestreamError, at once, in little memory."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from malformed import CASES, LARGE, LARGE_FILE, fuzzed, set_key, set_raw, tiny, truncations

from moestream import gguf_facts
from moestream.commands import start
from moestream.errors import MoestreamError
from moestream.server.arguments import ServerSettings

DEADLINE_S = 10.0  # a hang; on an idle machine the slowest takes a tenth of a second


def read(path: Path) -> gguf_facts.GgufFacts | MoestreamError:
    """Facts or the refusal; any other exception, and one second on an idle machine, fails the test."""
    began = time.monotonic()
    try:
        return gguf_facts.read(path)
    except MoestreamError as error:
        assert error.hint and path.name.split(".")[0] in f"{error.message} {error.hint}"
        assert len(error.message) < 600
        return error
    finally:
        assert time.monotonic() - began < DEADLINE_S


def refused(path: Path) -> str:
    found = read(path)
    assert isinstance(found, MoestreamError), found
    return found.message


def test_the_file_itself_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny().write())
    facts = gguf_facts.read(path)
    assert (facts.n_layer, facts.n_expert, facts.n_expert_used, len(facts.expert_tensors)) == (2, 8, 2, 6)


@pytest.mark.parametrize("name", CASES)
def test_cases(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(CASES[name].write())
    said = CASES[name].python
    if said is None:
        assert isinstance(read(path), gguf_facts.GgufFacts)
        return
    assert said in refused(path)
    with pytest.raises(MoestreamError, match="bad"):  # the command looks before it starts anything
        start.make_plan(ServerSettings(model=path))


@pytest.mark.parametrize("place", truncations())
def test_truncations(tmp_path: Path, place: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(tiny().write()[: truncations()[place]])
    assert any(part in refused(path) for part in ("ends inside its header", "is truncated", "is not a GGUF file"))


@pytest.mark.parametrize("name", LARGE)
def test_lengths_that_fit_a_large_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(LARGE[name].write())
    os.truncate(path, LARGE_FILE)  # a hole: takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refused(path)
    assert (LARGE[name].python or "") in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_many_keys_and_tensors(tmp_path: Path) -> None:
    """As many as are let through, each as small as it can be."""
    g = tiny()
    for i in range(gguf_facts.MAX_KEYS - len(g.kv)):
        g.kv[f"{i:x}"] = (0, b"\0")
    path = tmp_path / "bad.gguf"
    path.write_bytes(g.write())
    assert isinstance(read(path), gguf_facts.GgufFacts)
    g.set("y", 0, 0)
    path.write_bytes(g.write())
    assert f"absurd key count {gguf_facts.MAX_KEYS + 1}" in refused(path)


def test_a_long_text_is_stepped_over(tmp_path: Path) -> None:
    """A whole tokenizer in one key, as some files have it."""
    g = tiny()
    set_raw("tokenizer.huggingface.json", 8, (1 << 24).to_bytes(8, "little") + bytes(1 << 24))(g)
    set_key("general.last", 4, 7)(g)
    path = tmp_path / "long.gguf"
    path.write_bytes(g.write())
    metadata = gguf_facts.read(path).metadata
    assert (metadata["tokenizer.huggingface.json"], metadata["general.last"]) == ("", 7)


@pytest.mark.parametrize("seed", range(0, 600, 100))
def test_random_damage(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "bad.gguf"
    for s in range(seed, seed + 100):
        path.write_bytes(fuzzed(s))
        try:
            read(path)
        except Exception as error:
            pytest.fail(f"malformed.fuzzed({s}): {error!r}")


# --- what is no file of a model ---


def special(folder: Path) -> dict[str, tuple[Path, str]]:
    """Path and message."""
    fifo, loop, empty, gone = (folder / f"{name}.gguf" for name in ("fifo", "loop", "empty", "gone"))
    os.mkfifo(fifo)
    loop.symlink_to(folder / "loop2.gguf")
    (folder / "loop2.gguf").symlink_to(loop)
    gone.symlink_to(folder / "nothing.gguf")
    empty.touch()
    (folder / "folder.gguf").mkdir()
    return {
        "fifo": (fifo, "not a regular file"),
        "loop": (loop, "is a symbolic link that leads to no file"),
        "gone": (gone, "is a symbolic link that leads to no file"),
        "empty": (empty, "is not a GGUF file: it begins with nothing, it is empty"),
        "folder": (folder / "folder.gguf", "no GGUF model in the directory"),
        "zero": (Path("/dev/zero"), "not a regular file"),
        "null": (Path("/dev/null"), "not a regular file"),
        "nofile": (folder / "nofile.gguf", "no such model file"),
        "inside": (empty / "x.gguf", "no such model file"),
        "long": (folder / ("long" + "x" * 300), "cannot look for the model"),
    }


@pytest.mark.parametrize("name", ["fifo", "loop", "gone", "empty", "folder", "zero", "null", "nofile", "inside", "long"])
def test_no_model_files(tmp_path: Path, name: str) -> None:
    path, message = special(tmp_path)[name]
    began = time.monotonic()
    with pytest.raises(MoestreamError, match=message) as raised:
        gguf_facts.read(path)
    assert raised.value.hint
    assert time.monotonic() - began < DEADLINE_S


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: whoever runs as root may read anything."""
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny().write())

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(MoestreamError, match=r"cannot open .*secret.gguf: Permission denied"):
        gguf_facts.read(path)
