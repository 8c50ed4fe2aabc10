"""What cannot be honoured is refused at start, in plain words; docs/refusals.md lists it all."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_models import quantize, run, tool
from llama_server import LlamaServer, environment
from malformed import CASES, tiny
from waiting import free_port, until

from moestream.upstream import engines

DOC = Path(__file__).resolve().parents[2] / "docs" / "refusals.md"

COMBINATIONS = {
    "too few slots": (["--moe-slots", "5"], "--moe-slots 5 is too few: a token of this model uses 6 experts a layer; hint: --moe-slots 6 or more"),
    "no memory for auto": (["--moe-slots", "auto", "-c", "100000000"], "--moe-slots auto: 6 slots a layer, the fewest there can be, take"),
    "cpu-moe": (["--moe-slots", "8", "--cpu-moe"], "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "n-cpu-moe": (["--moe-slots", "8", "--n-cpu-moe", "1"], "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "override-tensor": (["--moe-slots", "all", "--override-tensor", "blk.7.ffn_down_exps=CPU"], "an --override-tensor that matches experts: 'blk.7.ffn_down_exps' matches 'blk.7.ffn_down_exps.weight'; hint: leave out one of them"),
    "mlock": (["--moe-slots", "8", "--load-mode", "mlock"], "--moe-slots cannot be combined with --load-mode mlock; hint: use --load-mode none, mmap or dio"),
    "mmap+mlock": (["--moe-slots", "auto", "--load-mode", "mmap+mlock"], "--moe-slots cannot be combined with --load-mode mmap+mlock"),
    "split-mode row": (["--moe-slots", "8", "--split-mode", "row"], "--moe-slots cannot be combined with --split-mode row; hint: use --split-mode layer or none"),
    "io without slots": (["--moe-io", "direct"], "--moe-io does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-io"),
    "threads without slots": (["--moe-io-threads", "2"], "--moe-io-threads does nothing without --moe-slots"),
    "backend without slots": (["--moe-io-backend", "uring"], "--moe-io-backend does nothing without --moe-slots"),
    "policy without slots": (["--moe-policy", "lfu"], "--moe-policy does nothing without --moe-slots"),
    "overlap without slots": (["--moe-overlap", "off"], "--moe-overlap does nothing without --moe-slots"),
    "staging without slots": (["--moe-staging", "ring"], "--moe-staging does nothing without --moe-slots"),
    "ring without overlap": (["--moe-slots", "8", "--moe-staging", "ring", "--moe-overlap", "off"], "--moe-staging ring cannot be combined with --moe-overlap off: matmuls wait for what passes through the ring; hint: leave out one of them"),
    "RAM tier without slots": (["--moe-ram", "1GiB"], "--moe-ram does nothing without --moe-slots"),
    "prefetch without slots": (["--moe-prefetch", "off"], "--moe-prefetch does nothing without --moe-slots"),
    "RAM tier below an expert": (["--moe-slots", "8", "--moe-ram", "1KiB"], "--moe-ram 1024 has no room for an expert of this model, which takes 62208 bytes; hint: --moe-ram 1GiB, say, or leave it out"),
    "prefetch without overlap": (["--moe-slots", "8", "--moe-prefetch", "on", "--moe-overlap", "off"], "--moe-prefetch on cannot be combined with --moe-overlap off: matmuls wait for what was guessed; hint: leave out one of them"),
    "GPU path without slots": (["--moe-gpu-path", "copy"], "--moe-gpu-path does nothing without --moe-slots"),
    "pool without slots": (["--moe-pool", "host"], "--moe-pool does nothing without --moe-slots"),
    "required GPU without slots": (["--moe-require-gpu", "on"], "--moe-require-gpu does nothing without --moe-slots"),
    "GPU path without a GPU": (["--moe-slots", "8", "--moe-gpu-path", "mailbox"], "--moe-gpu-path does nothing: the experts of all layers are computed on the cpu; hint: leave out --moe-gpu-path"),
    "pool without a GPU": (["--moe-slots", "8", "--moe-pool", "device"], "--moe-pool does nothing: the experts of all layers are computed on the cpu"),
    "required GPU and none": (["--moe-slots", "8", "--moe-require-gpu", "on"], "--moe-require-gpu: the experts of 8 of 8 layers would be computed on the cpu, because no device here takes slots; hint: "),
    "trace without slots": (["--moe-trace", "no/file"], "--moe-trace does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-trace"),
    "trace's limit without slots": (["--moe-trace-limit", "5"], "--moe-trace-limit does nothing without --moe-slots"),
    "trace's limit without a trace": (["--moe-slots", "8", "--moe-trace-limit", "5"], "--moe-trace-limit does nothing without --moe-trace; hint: add --moe-trace FILE"),
    "trace in another file": (["--moe-slots", "8", "--moe-trace", str(DOC)], "the file exists and holds no trace; hint: choose another name"),
    "trace nowhere": (["--moe-slots", "8", "--moe-trace", "no/folder/t"], "--moe-trace: cannot record a trace in 'no/folder/t': No such file or directory; hint: "),
    "pins without slots": (["--moe-map-pin", "1"], "--moe-map-pin does nothing without --moe-slots"),
    "warm without slots": (["--moe-warm", "0"], "--moe-warm does nothing without --moe-slots"),
    "check-tensors": (["--moe-slots", "8", "--check-tensors"], "--moe-slots cannot be combined with --check-tensors, which would read all experts"),
}  # fmt: skip

# With RPC, and so a device that counts as a GPU: on the CPU alone a message of upstream's comes before ours.
WITH_RPC = {
    "rpc": (["--moe-slots", "8"], "--moe-slots cannot be combined with --rpc; hint: leave out one of them"),
    "rpc, nothing offloaded": (["--moe-slots", "8", "-ngl", "0"], "--moe-slots cannot be combined with --rpc"),
    "split-mode tensor": (["--moe-slots", "8", "--split-mode", "tensor"], "--moe-slots cannot be combined with --split-mode tensor; hint: use --split-mode layer or none"),
}  # fmt: skip

# Of the flags' own environment variables; other flags' are upstream's.
ENVIRONMENT = {
    "too few slots": ({"MOE_SLOTS": "5"}, "--moe-slots 5 is too few: a token of this model uses 6 experts a layer"),
    "cpu-moe": ({"MOE_SLOTS": "8", "CPU_MOE": "1"}, "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "n-cpu-moe": ({"MOE_SLOTS": "8", "N_CPU_MOE": "1"}, "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "mlock": ({"MOE_SLOTS": "8", "LOAD_MODE": "mlock"}, "--moe-slots cannot be combined with --load-mode mlock"),
    "split-mode row": ({"MOE_SLOTS": "8", "SPLIT_MODE": "row"}, "--moe-slots cannot be combined with --split-mode row"),
    "io without slots": ({"MOE_IO": "direct"}, "--moe-io does nothing without --moe-slots"),
    "threads without slots": ({"MOE_IO_THREADS": "2"}, "--moe-io-threads does nothing without --moe-slots"),
    "policy without slots": ({"MOE_POLICY": "lfu"}, "--moe-policy does nothing without --moe-slots"),
    "overlap without slots": ({"MOE_OVERLAP": "off"}, "--moe-overlap does nothing without --moe-slots"),
    "staging without slots": ({"MOE_STAGING": "full"}, "--moe-staging does nothing without --moe-slots"),
    "RAM tier without slots": ({"MOE_RAM": "auto"}, "--moe-ram does nothing without --moe-slots"),
    "prefetch without slots": ({"MOE_PREFETCH": "on"}, "--moe-prefetch does nothing without --moe-slots"),
    "trace without slots": ({"MOE_TRACE": "no/file"}, "--moe-trace does nothing without --moe-slots"),
}  # fmt: skip

# llama-bench has a parser of its own.
IN_BENCH = {
    "too few slots": (["--moe-slots", "5"], "--moe-slots 5 is too few"),
    "n-cpu-moe": (["--moe-slots", "8", "--n-cpu-moe", "1"], "cannot be combined with --cpu-moe, --n-cpu-moe or an --override-tensor that matches experts"),
    "override-tensor": (["--moe-slots", "8", "--override-tensor", "ffn_up_exps=CPU"], "'ffn_up_exps' matches 'blk.0.ffn_up_exps.weight'"),
    "mlock": (["--moe-slots", "8", "--load-mode", "mlock"], "--moe-slots cannot be combined with --load-mode mlock"),
    "split-mode row": (["--moe-slots", "8", "--split-mode", "row"], "--moe-slots cannot be combined with --split-mode row"),
    "io without slots": (["--moe-io", "direct"], "--moe-io does nothing without --moe-slots"),
}  # fmt: skip

# Every program of an engine: those that stream, with what else they need; those that do not know the flags; and test programs.
STREAM = {
    "llama-server": ("--port", "1"),
    "llama-cli": (),
    "llama-completion": (),
    "llama-perplexity": (),
    "llama-bench": (),
    "llama-results": ("--output", "/dev/null"),
}
KNOW_NO_FLAGS = {
    "llama-quantize": "usage: ",
    "llama-gguf-split": "error: unknown argument: --moe-slots",
}
REFUSE = {"llama-imatrix"}

SAVING = "saving the model is not possible while experts are streamed (--moe-slots)"
TRAINING = "training is not possible while experts are streamed (--moe-slots)"
IMATRIX = "--moe-slots cannot be combined with an importance matrix; hint: leave out --moe-slots"
DENSE = "--moe-slots: this is not a mixture-of-experts model (architecture 'qwen3' has no expert tensors here)"

VALUES = {
    "--moe-slots": (["0", "-1", "-2", "6.5", "8x", "many", "", "99999999999999999999"], "expected a number of slots from 1, 'all', 'auto' or 'map'"),
    "--moe-io-threads": (["0", "-4", "257", "two", "4 "], "expected a number from 1 to 256"),
    "--moe-io": (["mmap", "Direct", ""], "expected 'auto', 'direct' or 'buffered'"),
    "--moe-io-backend": (["aio", "io_uring", ""], "expected 'auto', 'threads' or 'uring'"),
    "--moe-policy": (["mru", "LRU", ""], "expected 'lru', 'lfu' or 'heat'"),
    "--moe-overlap": (["yes", "1", ""], "expected 'on' or 'off'"),
    "--moe-staging": (["half", "none", ""], "expected 'auto', 'full' or 'ring'"),
    "--moe-ram": (["", "many", "-1", "1e3", "inf", "nan", "0x10", "4GiB5", "4PiB", ".5MiB", "0", "99999999TiB"], "expected a size ('4GiB', say), 'auto' or 'none'"),
    "--moe-prefetch": (["yes", ""], "expected 'auto', 'on' or 'off'"),
    "--moe-gpu-path": (["range", "host", ""], "expected 'auto', 'copy' or 'mailbox'"),
    "--moe-pool": (["gpu", ""], "expected 'auto', 'device' or 'host'"),
    "--moe-require-gpu": (["yes", ""], "expected 'on' or 'off'"),
    "--moe-trace": ([""], "expected the name of a file"),
    "--moe-trace-limit": (["0", "-1", "2G", ""], "expected a number of MiB from 1"),
    "--moe-map": ([""], "expected the path of a router map"),
    "--moe-map-pin": (["-1", "all", "1.5", ""], "expected a number of experts"),
    "--moe-warm": (["-1", "on", "86401", ""], "expected a number of seconds up to 86400, or 'off'"),
}  # fmt: skip


def refused(program: str, *arguments: str | Path, env: dict[str, str] | None = None, within_s: float = 5.0) -> str:
    """The output of a program that must end by itself, with exit code 1, at once."""
    began = time.monotonic()
    done = run(tool(program), *arguments, env=environment(env), timeout_s=60, ok=False)
    assert done.returncode == 1, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert time.monotonic() - began < within_s
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(demo: Path, name: str) -> None:
    arguments, message = COMBINATIONS[name]
    assert message in refused("llama-server", "-m", demo, "--port", "1", *arguments)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_combinations_in_the_environment(demo: Path, name: str) -> None:
    variables, message = ENVIRONMENT[name]
    env = {f"LLAMA_ARG_{key}": value for key, value in variables.items()}
    assert message in refused("llama-server", "-m", demo, "--port", "1", env=env)


@pytest.mark.parametrize("name", IN_BENCH)
def test_combinations_in_llama_bench(demo: Path, name: str) -> None:
    arguments, message = IN_BENCH[name]
    assert message in refused("llama-bench", "-m", demo, *arguments)


@pytest.mark.parametrize("program", STREAM)
def test_every_program_refuses(demo: Path, program: str) -> None:
    assert "is too few" in refused(program, "-m", demo, "--moe-slots", "5", *STREAM[program])


@pytest.mark.parametrize("program", KNOW_NO_FLAGS)
def test_other_programs_do_not_know_the_flag(demo: Path, tmp_path: Path, program: str) -> None:
    out = tmp_path / "out.gguf"
    assert KNOW_NO_FLAGS[program] in refused(program, "--moe-slots", "8", demo, out)
    if program == "llama-quantize":
        assert "--moe-slots" in refused(program, demo, out, "Q8_0", "--moe-slots", "8")
    assert not out.exists()


def test_no_program_is_left_out() -> None:
    built = {name for name in engines.in_use("cpu").tools if not name.startswith(("test-", "moe-"))}
    assert built == {*STREAM, *KNOW_NO_FLAGS, *REFUSE}


# --- RPC ---


@pytest.fixture(scope="module")
def rpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a server that computes for others, and the environment in which programs know RPC."""
    env = {"LD_PRELOAD": str(tool("moe-rpc-server").with_name("libmoe-test-rpc.so"))}
    port = free_port()
    log = tmp_path_factory.mktemp("rpc") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [tool("moe-rpc-server"), "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment(env),
        )  # fmt: skip
    try:
        until(lambda: _listens(port) or process.poll() is not None, "the RPC server to listen")
        assert process.poll() is None, log.read_text()
        yield f"127.0.0.1:{port}", env
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.parametrize("name", WITH_RPC)
def test_rpc(demo: Path, rpc: tuple[str, dict[str, str]], name: str) -> None:
    address, env = rpc
    arguments, message = WITH_RPC[name]
    for program, more in (("llama-server", ("--port", "1")), ("llama-bench", ())):
        assert message in refused(program, "-m", demo, "--rpc", address, *arguments, *more, env=env)


# --- programs of one's own ---


def test_saving_and_training(tmp_path: Path) -> None:
    model, saved = tmp_path / "tiny.gguf", tmp_path / "saved.gguf"
    model.write_bytes(tiny().write())
    done = run(tool("moe-refuse"), model, "4", saved, env=environment(), timeout_s=60)
    assert done.stdout.splitlines() == [
        "slots as text: refused",
        "slots -7: refused",
        "2^30 threads: refused",
        "files that nobody added: refused",
        "threads without slots: refused",
        f"save: {SAVING}",
        f"train: {TRAINING}",
        "decode: 0",
    ]
    assert not saved.exists()
    for why in (
        "setting 'moestream.slots' has the wrong type",
        "setting 'moestream.slots' is -7: expected a number of slots, -1 (auto), -2 (all) or -3 (map)",
        "--moe-io-threads 1073741824: expected 1 to 256",
        "setting 'moestream.files' is 3: expected a number from moe_add_files()",
        "--moe-io-threads does nothing without --moe-slots",
    ):
        assert why in done.stderr


# --- models and values ---


def test_dense_models(disk_folder: Path) -> None:
    run(tool("test-llama-archs"), "-o", disk_folder, "-a", "qwen3", "-s", "1")
    output = refused("llama-server", "-m", disk_folder / "qwen3-dense.gguf", "--port", "1", "--moe-slots", "8")
    assert DENSE in output
    assert "hint: leave out --moe-slots" in output


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, (values, _) in VALUES.items() for value in values])
def test_values(demo: Path, flag: str, value: str) -> None:
    message = f"{flag} '{value}': {VALUES[flag][1]}"
    assert message in refused("llama-server", "-m", demo, "--port", "1", flag, value)
    name = "LLAMA_ARG_" + flag[2:].upper().replace("-", "_")
    if value:  # an empty variable counts as not set
        assert message in refused("llama-server", "-m", demo, "--port", "1", env={name: value})


def test_values_in_llama_bench(demo: Path) -> None:
    for flag, (values, message) in VALUES.items():
        assert message in refused("llama-bench", "-m", demo, flag, values[0])
        assert f"{flag} needs a value" in refused("llama-bench", "-m", demo, flag)


def test_importance_matrix(demo: Path, tmp_path: Path) -> None:
    output = refused("llama-imatrix", "-m", demo, "-f", DOC, "-o", tmp_path / "imatrix.gguf", "--moe-slots", "8")
    assert IMATRIX in output
    assert not (tmp_path / "imatrix.gguf").exists()


@pytest.mark.parametrize("arguments", [
    ("--override-tensor", "attn_q=CPU"),
    ("--load-mode", "none"),
    ("--moe-slots", "1000"),
], ids=" ".join)  # fmt: skip
def test_what_is_not_refused(demo: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "8", *arguments) as server:
        stats = server.stats()
        assert stats["streaming"] is True
        assert stats["slots"] == (64 if "1000" in arguments else 8)
        server.complete("The", 4)


def test_settings_from_the_environment(demo: Path, tmp_path: Path) -> None:
    env = {
        "LLAMA_ARG_MOE_SLOTS": "7", "LLAMA_ARG_MOE_IO": "buffered", "LLAMA_ARG_MOE_IO_THREADS": "3",
        "LLAMA_ARG_MOE_POLICY": "lfu", "LLAMA_ARG_MOE_OVERLAP": "off",
    }  # fmt: skip
    with LlamaServer(demo, tmp_path / "log", env=env) as server:
        stats = server.stats()
    assert (stats["slots"], stats["slots_requested"], stats["policy"], stats["overlap"]) == (7, "7", "lfu", False)
    assert (stats["io"]["mode"], stats["io"]["requested"], stats["io"]["threads"]) == ("buffered", "buffered", 3)


@pytest.mark.parametrize("repack", [True, False])
def test_experts_are_repacked_like_other_weights(tmp_path: Path, repack: bool) -> None:
    """Experts of a type that this processor has repacked kernels for are repacked too, in the pool; it is said."""
    source, model = tmp_path / "f32.gguf", tmp_path / "q4_0.gguf"
    source.write_bytes(tiny().write())
    quantize(source, model)
    arguments = ["-p", "abc", "-n", "2", "-no-cnv", "-t", "1", "-c", "64", "-v", *([] if repack else ["--no-repack"])]
    output = run(tool("llama-completion"), "-m", model, "--moe-slots", "4", *arguments, env=environment()).stderr
    extra = re.findall(r"CPU_REPACK model buffer size = +([\d.]+) MiB", output)
    kernels = re.search(r"moestream: kernels: experts (\w+), dense weights (\w+)", output)
    assert kernels and kernels.groups() == (("repacked",) * 2 if extra else ("plain",) * 2)
    assert repack or not extra
    pool = re.findall(r"MoE_Pool model buffer size = +([\d.]+) MiB", output)
    assert float(pool[-1]) > 0


@pytest.mark.parametrize("arguments", [
    ["--check-tensors"], ["--load-mode", "mlock"], ["--split-mode", "row"], ["--cpu-moe"],
], ids=" ".join)  # fmt: skip
def test_start_says_why(demo: Path, arguments: list[str]) -> None:
    message = next(said for given, said in COMBINATIONS.values() if given[2:] == arguments)
    command = [
        sys.executable,
        "-m",
        "moestream.cli",
        "start",
        "--model",
        demo,
        "--slots",
        "8",
        "--no-map",
        "--port",
        str(free_port()),
    ]
    env = environment({k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"})
    done = subprocess.run([*command, "--", *arguments], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    first, *_, hint = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert message.split("; hint")[0].replace("--moe-slots", "--slots") in first and hint.startswith("hint: ")
    assert "Traceback" not in done.stderr


# --- the document ---


def tables() -> dict[str, list[tuple[str, str]]]:
    """(first cell, message) of each row of docs/refusals.md, by heading."""
    found: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in DOC.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif row := re.match(r"^\| (.+?) \| `([^`]*)` \|", line):
            found.setdefault(heading, []).append((row[1], row[2]))
    return found


def test_every_message_in_the_document_is_tested() -> None:
    said = [message for group in (COMBINATIONS, WITH_RPC, VALUES) for _, message in group.values()]
    said += [SAVING, TRAINING, IMATRIX, DENSE, *(case.engine for case in CASES.values() if case.engine)]
    for name in ("test_malformed.py", "test_map.py"):
        said += re.findall(r'"([^"\n]+)"', Path(__file__).with_name(name).read_text())
    # with a card; what takes two models, or two writers, is tested natively
    said += re.findall(r'"([^"\n]+)"', (DOC.parents[1] / "tests" / "gpu" / "test_cuda.py").read_text())
    said += re.findall(r'"([^"\n]+)"', (DOC.parents[1] / "tests" / "native" / "test-trace.cpp").read_text())
    rows = [row for group in tables().values() for row in group]
    assert len(rows) >= 28
    assert [row for row in rows if not any(row[1] in message for message in said)] == []


def test_every_refusal_is_in_the_document() -> None:
    quoted = [message for group in tables().values() for _, message in group]
    said = [message for group in (COMBINATIONS, WITH_RPC, VALUES) for _, message in group.values()]
    said += [SAVING, TRAINING, IMATRIX, DENSE]
    missing = [m for m in said if not any(q in m or m.split(":")[0] in q for q in quoted)]
    assert missing == []
