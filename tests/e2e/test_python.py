"""``moestream.Llama`` in processes of its own: the bindings find their library once in each."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from llama_server import environment

from moestream.routing import trace as traces
from moestream.upstream import engines

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed: make venv, or see CONTRIBUTING.md, Python bindings",
)

PROMPT = "The command grep"
# One thread: two that spin are slow where tests share a machine.
LOAD = """
import json, sys
import moestream
from moestream.errors import MoestreamError
MODEL = sys.argv[1]
def load(**more):
    more = {"slots": 6, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **more}
    return moestream.Llama(more.pop("model", MODEL), **more)
def text(llm, prompt="The command grep", n=40):
    return llm.create_completion(prompt, max_tokens=n, temperature=0, seed=1)["choices"][0]["text"]
"""


def python(
    code: str, model: Path, *, code_expected: int = 0, home: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"}
    env = environment({**kept, **({"MOESTREAM_HOME": str(home)} if home else {}), **more})
    done = subprocess.run(
        [sys.executable, "-c", LOAD + textwrap.dedent(code), str(model)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == code_expected, done.stdout + done.stderr
    return done


def answer(code: str, model: Path, **more: Any) -> Any:
    """What the code prints, as JSON."""
    done = python(code, model, **more)
    assert done.stderr == ""
    return json.loads(done.stdout)


def refusal(code: str, model: Path, **more: Any) -> str:
    """The traceback of a MoestreamError, from its last line on."""
    done = python(code, model, code_expected=1, **more)
    _, found, message = done.stderr.rpartition("moestream.errors.MoestreamError: ")
    assert found, done.stderr
    return message


def test_same_text_and_statistics(demo: Path) -> None:
    expected = run(
        tool("llama-completion"), "-m", demo, "-p", PROMPT, "-n", "40", "--temp", "0", "-no-cnv", "-fa", "off", "-t", "1", "-c", "256",
    ).stdout  # fmt: skip
    found = answer(
        """
        with_slots, whole = load(), load(slots=None)
        before = with_slots.moe_stats()
        said = [text(with_slots), text(whole)]
        after = with_slots.moe_stats()
        off = whole.moe_stats()
        with_slots.close()
        print(json.dumps([said, before, after, off, with_slots.moe_stats()]))
        """,
        demo,
    )  # fmt: skip
    said, before, after, off, closed = found
    assert said[0] == said[1]
    assert (PROMPT + said[0]).strip() == expected.strip()
    assert (after["schema"], after["slots"], before["totals"]["misses"]) == ("moestream/stats/1", 6, 0)
    assert after["totals"]["misses"] > 0 and after["totals"]["evictions"] > 0 and after["totals"]["tokens_decode"] >= 39
    assert off == closed == {"schema": "moestream/stats/1", "streaming": False}


def test_settings_reach_the_engine(demo: Path, tmp_path: Path) -> None:
    trace = tmp_path / "a trace"
    stats = answer(
        f"""
        TRACE = {str(trace)!r}
        llm = load(slots=12, io="direct", io_threads=2, io_backend="threads", policy="lfu", staging="ring", ram="2MiB", prefetch="off",
                   trace=TRACE, trace_limit=1)
        text(llm)
        print(json.dumps(llm.moe_stats()))
        """,
        demo,
    )  # fmt: skip
    assert (stats["slots"], stats["policy"], stats["io"]["mode"], stats["io"]["threads"]) == (12, "lfu", "direct", 2)
    assert stats["staging"].startswith("ring of") and stats["ram_requested"] == str(2 << 20)
    assert stats["prefetch"]["requested"] == "off"
    assert traces.read(trace).n_tokens > 40


def test_slots_auto_without_the_rest(demo: Path) -> None:
    stats = answer('print(json.dumps(load(slots="auto").moe_stats()))', demo)  # not closed: it ends with the process
    assert (stats["slots_requested"], stats["slots"]) == ("auto", 64)


def test_a_copy_by_pickle(demo: Path) -> None:
    same, slots, add_bos = answer(
        """
        import pickle
        llm = load(slots=7, policy="heat", kv_overrides={"tokenizer.ggml.add_bos_token": False})
        copy = pickle.loads(pickle.dumps(llm))
        stats = copy.moe_stats()
        print(json.dumps([text(llm) == text(copy), [stats["slots"], stats["policy"]], copy.kv_overrides["tokenizer.ggml.add_bos_token"]]))
        """,
        demo,
    )  # fmt: skip
    assert (same, slots, add_bos) == (True, [7, "heat"], False)


def test_a_failed_read_is_told_and_the_model_goes_on(demo_copy: Path, demo: Path) -> None:
    # not mapped: dense weights behind the end of a mapped file end the process
    done = python(
        """
        import os
        llm = load(use_mmap=False)
        size = os.path.getsize(MODEL)
        content = open(MODEL, "rb").read()
        os.truncate(MODEL, 9 * size // 10)
        try:
            text(llm)
            notes = None
        except RuntimeError as error:
            notes = error.__notes__
        with open(MODEL, "r+b") as file:
            file.write(content)
        llm.reset()
        print(json.dumps([notes, text(llm)]))
        """,
        demo_copy,
    )  # fmt: skip
    notes, said = json.loads(done.stdout)
    assert notes and notes[0].startswith("moestream: reading ") and "failed" in notes[0]
    assert said == answer("print(json.dumps(text(load())))", demo)


@pytest.mark.parametrize(("arguments", "message"), [
    ("slots=5", "slots 5: too few, a token of moestream-demo-q4_0.gguf uses 6 experts in a layer"),
    ('policy="fifo"', "policy 'fifo': expected lru, lfu or heat"),
    ("map_pin=2", "map_pin does nothing without map"),
    ('map="/nowhere", map_pin=2', "map /nowhere: No such file or directory"),
    ('kv_overrides={"moestream.slots": 3}', "kv_overrides has moestream.slots: such keys are moestream's own\nhint: use the argument slots="),
    ('model="/nowhere.gguf"', "/nowhere.gguf"),
    ("use_mlock=True", "cannot be combined with load_mode mmap+mlock"),
])  # fmt: skip
def test_refused(demo: Path, arguments: str, message: str) -> None:
    assert message in refusal(f"load({arguments})", demo)


def test_no_engine(demo: Path, tmp_path: Path) -> None:
    assert "no engine is built\nhint: moestream build" in refusal("load()", demo, home=tmp_path)


def test_bindings_of_another_version(demo: Path, tmp_path: Path) -> None:
    info = tmp_path / "llama_cpp_python-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.0.1\n")
    message = refusal(f"sys.path.insert(0, {str(tmp_path)!r}); load()", demo)
    assert message.startswith("llama-cpp-python is 0.0.1, and moestream's engine is that of ")


def test_another_library(demo: Path, tmp_path: Path) -> None:
    """The same files elsewhere: what matters is which were loaded."""
    other = tmp_path / "bin"
    other.mkdir()
    for file in engines.in_use("cpu").bin_dir.glob("lib*"):
        shutil.copy(file, other / file.name, follow_symlinks=False)
    code = f"import os; os.environ['LLAMA_CPP_LIB_PATH'] = {str(other)!r}\n"
    assert refusal(f"{code}load()", demo).startswith(f"LLAMA_CPP_LIB_PATH is set to {other}, and moestream's engine is ")
    message = refusal(f"{code}import llama_cpp\ndel os.environ['LLAMA_CPP_LIB_PATH']\nload()", demo)
    assert message.startswith(f"llama_cpp is already imported, with the library {other}/libllama")
    assert "hint: in a new process" in message


def test_bindings_imported_with_our_library_are_taken(demo: Path) -> None:
    folder = str(engines.in_use("cpu").bin_dir)
    code = f"import os; os.environ['LLAMA_CPP_LIB_PATH'] = {folder!r}\nimport llama_cpp\nprint(json.dumps(load().moe_stats()['slots']))"
    assert answer(code, demo) == 6
