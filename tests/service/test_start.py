"""``moestream start`` with real processes: readiness, deaths, and no orphans."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_harness import DEMO, ROOT, Home, running
from waiting import free_port, until


def ready_report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the one JSON object that a foreground start prints when it is ready."""
    assert process.stdout is not None
    text = ""
    while line := process.stdout.readline():
        text += line
        if line == "}\n":
            return json.loads(text)
    _, errors = process.communicate()
    pytest.fail(f"ended without a report: {text!r} {errors!r}")


def all_gone(home: Home) -> None:
    until(lambda: not home.servers(), "no llama-server left")


def test_foreground_reports_once_and_serves(home: Home) -> None:
    process = home.popen(*home.start_arguments("--json", "--ctx", "512", "--parallel", "2", "--", "--alias", "x"))
    report = ready_report(process)
    assert report["schema"] == "moestream/start/1"
    assert report["address"] == f"http://127.0.0.1:{home.port}"
    assert report["openai_base_url"] == report["address"] + "/v1"
    assert report["stats"]["slots"] == 8
    assert report["supervisor_pid"] == process.pid
    assert report["argv"][1:] == [
        "-m", str(DEMO), "--moe-trace", str(home.folder / "state" / "servers" / f"{home.port}.trace"),
        "--moe-trace-limit", "16", "--moe-slots", "8", "--moe-warm", "0", "--metrics",
        "--host", "127.0.0.1", "--port", str(home.port), "-c", "512", "-np", "2", "--alias", "x",
    ]  # fmt: skip
    answer = httpx.post(
        report["openai_base_url"] + "/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "You asked: hello"

    status = json.loads(home.run("status", "--json").stdout)["servers"]
    assert [(s["port"], s["state"], s["detached"]) for s in status] == [(home.port, "ready", False)]

    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "")
    assert errors.splitlines()[-1] == "stopped"
    all_gone(home)
    assert home.record() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("guard", ["pdeathsig", "pipe"])
def test_a_signal_leaves_nothing(home: Home, number: int, guard: str) -> None:
    process = supervised(home, guard)
    process.send_signal(number)
    assert process.wait(20) == 0
    all_gone(home)
    assert home.record() is None


@pytest.mark.parametrize("fake", ["", "ignores-sigterm", "never-healthy"])
@pytest.mark.parametrize("guard", ["pdeathsig", "pipe"])
def test_kill_9_leaves_no_orphan(home: Home, guard: str, fake: str) -> None:
    process = supervised(home, guard, fake)
    server = home.record_in_state("ready" if "never" not in fake else "loading")["server"]["pid"]
    assert running(server)
    process.kill()
    process.wait()
    all_gone(home)
    until(lambda: not running(server), "the guard, where there is one, gone too")


def test_nohup_is_respected(home: Home) -> None:
    process = supervised(home, "pdeathsig", hangup="SIG_IGN")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGCONT)  # delivered after it
    assert json.loads(home.run("status", "--json").stdout)["servers"][0]["state"] == "ready"
    process.terminate()
    assert process.wait(20) == 0
    all_gone(home)


def supervised(home: Home, guard: str, fake: str = "", hangup: str = "SIG_DFL") -> subprocess.Popen[str]:
    """A foreground start with a given guard: the one for systems without PR_SET_PDEATHSIG is tried here too."""
    code = f"""
import dataclasses, pathlib, signal
signal.signal(signal.SIGHUP, signal.{hangup})  # the tests may run under nohup themselves
from moestream.commands.start import make_plan, serve
from moestream.server.arguments import ServerSettings
plan = make_plan(ServerSettings(model=pathlib.Path({str(DEMO)!r}), slots="8", port={home.port}))
for result in serve(dataclasses.replace(plan, guard={guard!r}, stop_grace_s=1.0)):
    print("ready", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=home.environment(fake), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    home.started.append(process)
    home.record_in_state("ready", "loading")
    if "never" not in fake:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return process


def test_closing_the_terminal_leaves_no_orphan(home: Home) -> None:
    controller, terminal = pty.openpty()

    def in_child() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "moestream.cli", *home.start_arguments()],
        env=home.environment(), stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, preexec_fn=in_child,
    )  # fmt: skip
    home.started.append(process)  # type: ignore[arg-type]
    os.close(terminal)
    home.record_in_state("ready")
    os.close(controller)
    process.wait(20)
    all_gone(home)
    assert home.record() is None


def test_death_before_ready_is_reported_at_once(home: Home) -> None:
    begun = time.monotonic()
    done = home.run(*home.start_arguments(), fake="dies-at-once=3")
    assert time.monotonic() - begun < 5  # starting Python twice included; the report itself is a matter of 0.1 s
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ended before it was ready" in done.stderr
    assert "exit code 3" in done.stderr
    assert "the tensor data is damaged" in done.stderr
    assert f"hint: the whole log: {home.folder}" in done.stderr
    assert home.record() is None


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_death_by_signal_names_it(home: Home, detach: tuple[str, ...]) -> None:
    done = home.run(*home.start_arguments(*detach), fake=f"dies-by={signal.SIGSEGV.value}")
    assert done.returncode == 1
    assert "signal 11 (SIGSEGV)" in done.stderr


def test_sigkill_points_at_memory(home: Home) -> None:
    done = home.run(*home.start_arguments(), fake="dies-by=9")
    assert "signal 9 (SIGKILL)" in done.stderr
    assert "fewer --slots" in done.stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_unknown_architecture(home: Home, detach: tuple[str, ...]) -> None:
    done = home.run(*home.start_arguments(*detach), fake="unknown-arch")
    assert done.returncode == 1
    assert done.stderr.startswith("error: llama.cpp does not know the model's architecture 'marvin42'")


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_refusal_is_shown_in_the_engine_s_words_alone(home: Home, detach: tuple[str, ...]) -> None:
    done = home.run(*home.start_arguments(*detach), fake="refuses")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --slots auto: 6 slots take 9.5 MiB\nhint: a smaller context (--ctx), or --slots 6\n"


def test_death_while_serving_is_reported(home: Home) -> None:
    process = home.popen(*home.start_arguments("--json"), fake="dies-later=3")
    server = ready_report(process)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "ended while serving" in errors
    assert "exit code 9" in errors
    assert "the disk went away" in errors
    assert server["state"] == "ready"
    assert home.record() is None


@pytest.mark.parametrize("fake", ["never-healthy", "never-listens", "hangs"])
def test_never_ready_ends_with_an_error(home: Home, fake: str) -> None:
    done = home.run(*home.start_arguments("--ready-timeout", "1"), fake=fake)
    assert done.returncode == 1
    assert "was not ready after 1." in done.stderr
    assert "--ready-timeout" in done.stderr
    all_gone(home)


def test_slow_start_is_waited_for_with_progress(home: Home) -> None:
    controller, terminal = pty.openpty()
    process = home.popen(*home.start_arguments("--json"), fake="slow=1.5", stderr=terminal)
    os.close(terminal)
    report = ready_report(process)
    assert report["elapsed_s"] >= 1.5
    shown = os.read(controller, 65536).decode()
    assert f"starting llama-server on port {home.port}" in shown
    assert "loading the model" in shown or "GET /health" in shown
    process.terminate()
    process.wait(20)
    os.close(controller)


def test_ctrl_c_during_start_stops_it(home: Home) -> None:
    process = home.popen(*home.start_arguments(), fake="never-healthy")
    home.record_in_state("loading")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "error: stopped before the server was ready" in errors
    all_gone(home)


def test_much_output_blocks_nothing(home: Home) -> None:
    done = home.run(*home.start_arguments("--detach", "--json"), fake="prints-much=16")
    report = json.loads(done.stdout)
    assert Path(report["log_path"]).stat().st_size > 16 << 20
    assert home.run("stop").returncode == 0


def test_ignored_sigterm_becomes_sigkill_with_a_notice(home: Home) -> None:
    process = supervised(home, "pdeathsig", "ignores-sigterm")  # a grace period of 1 s
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "did not end on SIGTERM within 1 s and was killed\nkilled\n" in errors
    all_gone(home)


def test_ctrl_c_while_busy_becomes_a_second_sigterm_with_a_notice(home: Home) -> None:
    process = home.popen(*home.start_arguments("--json"), fake="busy")
    ready_report(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors.endswith(
        "notice: llama-server was still busy 3 s after SIGTERM; a second SIGTERM ended it\nterminated while busy\n"
    )
    all_gone(home)


def test_ctrl_c_during_imports_is_quiet(home: Home, tmp_path: Path) -> None:
    """An import that goes wrong when it is interrupted, as some of C extensions do."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "typer.py").write_text(
        "import time\nprint('importing', flush=True)\ntry:\n    time.sleep(30)\nexcept KeyboardInterrupt:\n    raise ImportError"
    )
    code = "from moestream.cli import main; main()"  # as the installed program does
    process = subprocess.Popen(
        [sys.executable, "-c", code, "status"],
        env={**home.environment(), "PYTHONPATH": f"{tmp_path / 'slow'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    home.started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, rest, errors) == (130, "", "")


def test_second_ctrl_c_kills_at_once(home: Home) -> None:
    process = home.popen(*home.start_arguments("--json"), fake="ignores-sigterm")  # a grace period of 10 s
    ready_report(process)
    process.send_signal(signal.SIGINT)
    home.record_in_state("stopping")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert time.monotonic() - begun < 5
    all_gone(home)


def test_stdout_that_is_closed_stops_the_server(home: Home) -> None:
    process = home.popen(*home.start_arguments(), fake="slow=0.5")
    assert process.stdout is not None
    process.stdout.close()
    process.wait(20)
    all_gone(home)


def test_port_in_use_names_the_process(home: Home) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", home.port))
        mine.listen()
        done = home.run(*home.start_arguments())
    assert done.returncode == 1
    assert f"port {home.port} on 127.0.0.1 is in use by pid {os.getpid()}" in done.stderr
    assert "hint: use a free port: --port " in done.stderr
    assert home.servers() == []


def test_port_of_another_moestream_server(home: Home) -> None:
    assert home.run(*home.start_arguments("--detach")).returncode == 0
    done = home.run(*home.start_arguments("--detach"))
    assert done.returncode == 1
    assert "in use by a server that moestream has started" in done.stderr
    assert f"moestream stop --port {home.port}" in done.stderr
    assert len(home.servers()) == 1


def test_two_starts_at_the_same_time(home: Home) -> None:
    both = [home.popen(*home.start_arguments("--json"), fake="slow=1") for _ in range(2)]
    until(lambda: any(p.poll() is not None for p in both), "one of them gives up")
    loser = next(p for p in both if p.poll() is not None)
    winner = next(p for p in both if p is not loser)
    assert loser.returncode == 1
    assert ready_report(winner)["port"] == home.port
    record = home.record()
    assert record is not None
    assert record["supervisor"]["pid"] == winner.pid
    assert len(home.servers()) == 1


def test_port_0_chooses_one(home: Home) -> None:
    done = home.run("start", "--model", str(DEMO), "--port", "0", "--detach", "--json")
    port = json.loads(done.stdout)["port"]
    assert port > 0
    assert home.run("stop", "--port", str(port)).returncode == 0


def test_logs_of_failed_starts_do_not_pile_up(home: Home) -> None:
    folder = home.folder / "state" / "servers"
    assert home.run(*home.start_arguments("--detach")).returncode == 0
    for port in range(1, 10):
        (folder / f"{port}.log").write_text(f"{port}\n")
        os.utime(folder / f"{port}.log", (port, port))
    (folder / "3.log.1").touch()  # belongs to 3.log and is the newest of all
    done = home.run("start", "--model", str(DEMO), "--port", "0", fake="dies-at-once=3")
    assert done.returncode == 1
    assert Path(done.stderr.rsplit("the whole log: ")[1].strip()).exists()
    kept = {p.name for p in folder.glob("[1-9].*")}
    assert kept == {"9.log", "8.log", "7.log", "6.log", "3.log", "3.log.1"}
    assert (folder / f"{home.port}.log").exists()  # of one that runs


@pytest.mark.parametrize("detach", [False, True])
def test_an_open_address_without_a_key_is_told(home: Home, detach: bool) -> None:
    def errors(*arguments: str) -> str:
        if detach:
            done = home.run(*home.start_arguments("--detach", "--json", *arguments))
            home.run("stop")
            return done.stderr
        process = home.popen(*home.start_arguments("--json", *arguments))
        ready_report(process)
        process.terminate()
        return process.communicate(timeout=20)[1]

    warning = f"warning: listening on 0.0.0.0 without an API key: whoever can reach port {home.port} can use this server "
    assert [line for line in errors("--host", "0.0.0.0").splitlines() if line.startswith(warning)]
    assert "warning" not in errors("--host", "0.0.0.0", "--", "--api-key", "k")
    assert "warning" not in errors()


def test_api_key_is_used_and_not_shown(home: Home) -> None:
    done = home.run(*home.start_arguments("--detach", "--json", "--", "--api-key", "s3cret"), fake="needs-key=s3cret")
    report = json.loads(done.stdout)
    assert report["stats"]["slots"] == 8
    assert "s3cret" not in done.stdout
    status = home.run("status", "--json").stdout
    assert json.loads(status)["servers"][0]["hit_rate"] == 0.75
    assert "s3cret" not in status
    record = home.folder / "state" / "servers" / f"{home.port}.json"
    assert record.stat().st_mode & 0o077 == 0


def test_a_prefix_from_the_environment(home: Home) -> None:
    home.variables["LLAMA_ARG_API_PREFIX"] = "/env"
    done = home.run(*home.start_arguments("--detach", "--json", "--ready-timeout", "5"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["openai_base_url"] == f"http://127.0.0.1:{home.port}/env/v1"
    home.variables.clear()
    assert json.loads(home.run("status", "--json").stdout)["servers"][0]["state"] == "ready"


def test_stock_server_without_stats(home: Home) -> None:
    done = home.run(*home.start_arguments("--detach"), fake="no-stats")
    assert done.returncode == 0
    assert "unknown: this llama-server has no /moe/stats" in done.stdout


def test_streaming_off(home: Home) -> None:
    done = home.run(
        "start", "--model", str(DEMO), "--slots", "off", "--port", str(home.port), "--detach", "--json",
        fake="streaming-off",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["streaming"] is False
    assert not any(a.startswith("--moe") for a in report["argv"])


def refused(home: Home, *arguments: str) -> str:
    done = home.run("start", *arguments, "--port", str(free_port()))
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert "\nhint: " in done.stderr
    assert "internal error" not in done.stderr
    return done.stderr


def test_wrong_models_are_refused_before_anything_runs(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    assert "no GGUF model in the directory" in refused(home, "--model", str(folder))
    assert "no such model file" in refused(home, "--model", str(folder / "absent.gguf"))
    (folder / "text.gguf").write_bytes(b"PK\x03\x04 no model" * 10)
    assert "PK" in refused(home, "--model", str(folder / "text.gguf"))
    shutil.copy(DEMO, folder / "a.gguf")
    assert "text.gguf" in refused(home, "--model", str(folder))
    assert "too few" in refused(home, "--model", str(DEMO), "--slots", "5")
    assert "--slots 6" in refused(home, "--model", str(DEMO), "--slots", "5")
    assert "too many" in refused(home, "--model", str(DEMO), "--slots", "65")
    assert "--slots many" in refused(home, "--model", str(DEMO), "--slots", "many")
    assert home.servers() == []


@pytest.mark.parametrize("number", ["0", "257", "-1"])
def test_io_threads_out_of_range(home: Home, number: str) -> None:
    done = home.run(*home.start_arguments("--io-threads", number))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: --io-threads {number}: expected a number from 1 to 256\nhint: ")
    assert home.record() is None


def test_streaming_flags_without_streaming(home: Home) -> None:
    off = ("--model", str(DEMO), "--slots", "off")
    message = refused(home, *off, "--policy", "lfu", "--io", "direct")
    assert message.startswith("error: --io direct, --policy lfu cannot be combined with --slots off")
    assert home.servers() == []


def test_a_router_map(home: Home, tmp_path: Path) -> None:
    gone = tmp_path / "none.json"
    message = refused(home, "--model", str(DEMO), "--slots", "8", "--map", str(gone), "--router-top-k", "2")
    assert message.startswith(f"error: --map {gone}: no such file\nhint: ")
    assert refused(home, "--model", str(DEMO), "--router-top-k", "2").startswith(
        "error: --router-top-k 2 needs a router map\nhint: add --map FILE"
    )
    assert refused(home, "--model", str(DEMO), "--slots", "8", "--map", "").startswith(
        "error: --map .: it is no regular file\n"
    )
    (tmp_path / "map.json").write_text("{}")
    given = ("--map", os.path.relpath(tmp_path / "map.json"), "--router-top-k", "2", "--warm", "9")
    report = json.loads(home.run(*home.start_arguments("--detach", "--json", *given)).stdout)
    at = report["argv"].index("--moe-map")
    passed, *others = report["argv"][at + 1 : at + 6]
    assert Path(passed).is_absolute() and Path(passed).samefile(tmp_path / "map.json")
    assert others == ["--moe-map-pin", "2", "--moe-warm", "9"]


def test_arguments_that_collide(home: Home) -> None:
    message = refused(home, "--model", str(DEMO), "--", "--moe_slots", "9")
    assert "--moe_slots" in message and "--slots" in message


def test_a_directory_with_one_model(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(DEMO, folder / "model.gguf")
    done = home.run("start", "--model", str(folder), "--port", str(home.port), "--detach", "--json")
    assert json.loads(done.stdout)["model"] == str(folder / "model.gguf")


def in_a_deleted_folder(home: Home, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import os; os.chdir({str(folder)!r}); os.rmdir({str(folder)!r}); from moestream.cli import main; main()"
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=home.environment(), capture_output=True, text=True, timeout=60
    )


def test_a_working_directory_that_was_deleted(home: Home, tmp_path: Path) -> None:
    shutil.copy(DEMO, tmp_path / "m.gguf")  # .. still leads there
    done = in_a_deleted_folder(home, tmp_path / "gone", "start", "--model", "../m.gguf", "--port", str(home.port), "-d")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: ../m.gguf: relative to the working directory, which has been deleted\n"
        "hint: cd to a folder that exists, or give an absolute path\n"
    )
    done = in_a_deleted_folder(home, tmp_path / "gone", *home.start_arguments("--detach"))
    assert done.returncode == 0, done.stderr
    home.variables["MOESTREAM_HOME"] = "relative"
    done = in_a_deleted_folder(home, tmp_path / "gone", "status")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1, "error: relative: relative to the working directory, which has been deleted",
    )  # fmt: skip


def test_no_engine(home: Home) -> None:
    shutil.rmtree(home.folder / "data")
    assert "moestream build" in refused(home, "--model", str(DEMO))
