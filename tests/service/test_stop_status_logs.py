"""``stop``, ``status`` and ``logs``: they find what runs, and touch nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
from service_harness import DEMO, Home, running
from waiting import free_port, until


def start_detached(home: Home, fake: str = "", port: int | None = None) -> dict[str, Any]:
    arguments = ["start", "--model", str(DEMO), "--slots", "8", "--port", str(port or home.port), "--detach", "--json"]
    done = home.run(*arguments, fake=fake)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def servers(home: Home, *arguments: str) -> list[dict[str, Any]]:
    done = home.run("status", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "moestream/status/1"
    return report["servers"]


def rewrite_record(home: Home, **changes: Any) -> None:
    path = home.folder / "state" / "servers" / f"{home.port}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_detached_life(home: Home) -> None:
    report = start_detached(home)
    assert report["detached"] is True
    assert running(report["supervisor_pid"])
    [status] = servers(home)
    assert status["state"] == "ready"
    assert status["model"] == str(DEMO)
    assert status["hit_rate"] == 0.75
    assert status["stats"]["memory"]["total_bytes"] == 16 << 20
    assert status["rss_bytes"] > 1 << 20
    assert home.servers() == [status["pid"]]

    done = home.run("stop", "--json")
    assert json.loads(done.stdout)["servers"][0]["outcome"] == "stopped"
    assert not running(report["supervisor_pid"])
    assert not running(status["pid"])
    assert servers(home) == []


def test_text_of_status(home: Home) -> None:
    start_detached(home)
    text = home.run("status").stdout
    assert text.startswith(f"port {home.port}: ready\n")
    assert "hit rate 75.0%, 240 hits, 80 misses, 80.0 MiB read, 12 ms stalled" in text
    assert "16.0 MiB in all: expert slots 4.0 MiB" in text


@pytest.mark.parametrize(("fake", "text"), [("streaming-off", "off: "), ("no-stats", "unknown: ")])
def test_status_says_when_nothing_streams(home: Home, fake: str, text: str) -> None:
    start_detached(home, fake)
    assert f"slots     {text}" in home.run("status").stdout


def test_status_of_a_sleeping_server(home: Home) -> None:
    start_detached(home, "sleeps")
    text = home.run("status").stdout
    assert text.startswith(f"port {home.port}: ready, asleep until the next request\n")
    assert "slots     none while the server sleeps; streaming resumes with the next request (--slots 8)\n" in text
    assert [(s["state"], s["sleeping"], s["streaming"]) for s in servers(home)] == [("ready", True, False)]
    asked = {line.split()[-4] for line in home.run("logs").stdout.splitlines() if line.startswith("request: ")}
    assert asked == {"/health", "/props", "/moe/stats"}  # what llama-server answers asleep


def test_status_of_one_that_is_awake(home: Home) -> None:
    start_detached(home)
    assert [s["sleeping"] for s in servers(home)] == [False]


def test_status_while_loading(home: Home) -> None:
    home.popen(*home.start_arguments(), fake="never-healthy")
    home.record_in_state("loading")
    assert [s["state"] for s in servers(home)] == ["loading"]


def test_stop_needs_to_know_which(home: Home) -> None:
    other = free_port()
    start_detached(home)
    start_detached(home, port=other)
    done = home.run("stop")
    assert done.returncode == 1
    assert "2 servers run" in done.stderr
    assert f"--port {min(home.port, other)}" in done.stderr
    assert len(home.servers()) == 2
    assert home.run("stop", "--port", str(other)).returncode == 0
    assert [s["port"] for s in servers(home)] == [home.port]
    assert home.run("stop", "--all").stdout == f"port {home.port}: stopped\n"
    assert home.servers() == []


def test_stop_of_nothing(home: Home) -> None:
    assert home.run("stop").returncode == 1
    assert home.run("stop", "--port", "4711").returncode == 1
    assert home.run("stop", "--all").stdout == "no server runs\n"


def test_stop_of_a_foreground_server(home: Home) -> None:
    process = home.popen(*home.start_arguments())
    home.record_in_state("ready")
    assert home.run("stop").returncode == 0
    assert process.wait(20) == 0
    assert home.servers() == []


def test_stop_kills_what_ignores_sigterm(home: Home) -> None:
    report = start_detached(home, "ignores-sigterm")
    done = home.run("stop", "--grace", "0", "--json")  # 5 s more for the supervisor, less than its own 10
    assert json.loads(done.stdout)["servers"][0]["outcome"] == "killed"
    assert home.servers() == []
    assert not running(report["supervisor_pid"])


@pytest.mark.parametrize("detach", [False, True])
def test_stop_of_a_busy_server(home: Home, detach: bool) -> None:
    if detach:
        start_detached(home, "busy")
    else:
        process = home.popen(*home.start_arguments(), fake="busy")
        home.record_in_state("ready")
    begun = time.monotonic()
    done = home.run("stop", *["--json"] * detach)
    assert 3 < time.monotonic() - begun < 8  # and not the 10 s after which it would be killed
    if detach:
        [report] = json.loads(done.stdout)["servers"]
        assert report["outcome"] == "terminated while busy"
        assert "second interrupt" in home.run("logs").stdout
        assert "a second SIGTERM ended it" in home.run("logs").stdout
    else:
        expected = "terminated while busy: it had not ended 3 s after SIGTERM, a second one ended it"
        assert done.stdout == f"port {home.port}: {expected}\n"
        assert process.communicate(timeout=20)[1].endswith("a second SIGTERM ended it\nterminated while busy\n")
    assert home.servers() == []
    assert sorted(p.name for p in (home.folder / "state" / "servers").iterdir()) == [".lock", f"{home.port}.log"]


def test_stop_tells_that_the_supervisor_had_to_kill(home: Home) -> None:
    start_detached(home, "ignores-sigterm")
    done = home.run("stop", "--json")
    assert json.loads(done.stdout)["servers"][0]["outcome"] == "killed"
    assert home.servers() == []
    assert home.record() is None


def test_an_unsupervised_busy_server_gets_the_second_sigterm_too(home: Home) -> None:
    start_detached(home)
    home.run("stop")
    argv = [str(home.server), "--host", "127.0.0.1", "--port", str(home.port)]
    stand_in = subprocess.Popen(argv, env=home.environment("busy"))
    try:
        _record_of(home, stand_in.pid, argv)
        until(lambda: [s["state"] for s in servers(home)] == ["ready"], "ready")
        reaper = threading.Thread(target=stand_in.wait)
        reaper.start()
        done = home.run("stop", "--json")
        reaper.join()
        assert json.loads(done.stdout)["servers"][0]["outcome"] == "terminated while busy"
        assert stand_in.returncode == 1
    finally:
        stand_in.kill()
        stand_in.wait()


def test_stop_without_a_supervisor(home: Home) -> None:
    """On Linux a server does not outlive its supervisor, so a stand-in is recorded as one that does."""
    start_detached(home)
    home.run("stop")
    stand_in = subprocess.Popen([str(home.server), "--host", "127.0.0.1", "--port", str(home.port)])
    try:
        _record_of(home, stand_in.pid, [str(home.server), "--host", "127.0.0.1", "--port", str(home.port)])
        until(lambda: [s["state"] for s in servers(home)] == ["ready"], "ready")
        assert "its supervisor is gone" in home.run("status").stdout
        assert home.run("stop").returncode == 0
        assert stand_in.wait(10) == 0
    finally:
        stand_in.kill()
        stand_in.wait()


def _record_of(home: Home, pid: int, argv: list[str]) -> None:
    from dataclasses import asdict

    from moestream.server.records import SCHEMA, ProcessMark

    gone = ProcessMark(pid=2**22 + 1, created_s=0.0, token="gone", cmdline=("gone",))
    record = {
        "schema": SCHEMA, "port": home.port, "host": "127.0.0.1", "url": f"http://127.0.0.1:{home.port}",
        "state": "ready", "supervisor": asdict(gone), "server": asdict(ProcessMark.of(pid, argv)), "detached": True,
        "engine_id": "x", "backend": "cpu", "model": "m.gguf", "slots": "8", "argv": argv, "log_path": "",
        "started_s": time.time(),
    }  # fmt: skip
    (home.folder / "state" / "servers" / f"{home.port}.json").write_text(json.dumps(record))


@pytest.mark.parametrize("same", ["pid alone", "pid and command line", "pid and create time"])
def test_a_reused_pid_is_never_touched(home: Home, same: str) -> None:
    """A record whose pids belong to a bystander now: every part of the comparison must hold by itself."""
    start_detached(home)
    record = home.record()
    assert record is not None
    home.run("stop")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        from dataclasses import asdict

        from moestream.server.records import ProcessMark

        mark = asdict(ProcessMark.of(bystander.pid))
        if same in ("pid alone", "pid and command line"):
            mark["token"] = "another boot:1"
        if same in ("pid alone", "pid and create time"):
            mark["cmdline"] = record["server"]["cmdline"]
        path = home.folder / "state" / "servers" / f"{home.port}.json"
        path.write_text(json.dumps({**record, "supervisor": mark, "server": mark}))
        assert [s["state"] for s in servers(home)] == ["ended"]
        done = home.run("stop", "--json")
        assert json.loads(done.stdout)["servers"][0]["outcome"] == "stale"
        assert not path.exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_killed_supervisor_leaves_a_stale_record_that_is_cleaned(home: Home) -> None:
    report = start_detached(home)
    subprocess.run(["kill", "-9", str(report["supervisor_pid"])], check=True)
    until(lambda: not home.servers(), "the server went with its supervisor")
    [status] = servers(home)
    assert status["state"] == "ended"
    done = home.run("stop")
    assert "did not run any more" in done.stdout
    assert home.record() is None


def test_start_replaces_a_stale_record(home: Home) -> None:
    report = start_detached(home)
    subprocess.run(["kill", "-9", str(report["supervisor_pid"])], check=True)
    until(lambda: not home.servers(), "the server went with its supervisor")
    assert start_detached(home)["supervisor_pid"] != report["supervisor_pid"]


def test_unreadable_record(home: Home) -> None:
    start_detached(home)
    home.run("stop")
    path = home.folder / "state" / "servers" / f"{home.port}.json"
    path.write_text("{ half a rec")
    assert [s["state"] for s in servers(home)] == ["unknown"]
    assert "unreadable state file removed" in home.run("stop").stdout
    assert not path.exists()


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_one_bad_entry_does_not_keep_from_the_others(home: Home, arguments: tuple[str, ...]) -> None:
    start_detached(home)
    bad = home.folder / "state" / "servers" / "9.json"
    bad.mkdir()
    assert [s["state"] for s in servers(home)] == ["unknown", "ready"]
    assert f"port 9: unreadable state file {bad} (Is a directory)" in home.run("status").stdout
    done = home.run("stop", *arguments)
    assert home.servers() == []
    assert done.returncode == 1
    assert done.stdout == f"port 9: failed: cannot remove {bad}: Is a directory\nport {home.port}: stopped\n"
    assert done.stderr == f"error: cannot remove {bad}: Is a directory\nhint: look at it and remove it by hand\n"
    [failed] = [home.run("stop", "--port", "9")]
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", done.stderr)


def test_start_on_a_port_with_a_bad_entry(home: Home) -> None:
    bad = home.folder / "state" / "servers" / f"{home.port}.json"
    bad.mkdir(parents=True)
    done = home.run(*home.start_arguments("--detach"))
    assert done.returncode == 1
    assert f"error: cannot write {bad}: Is a directory\nhint: look at it" in done.stderr
    assert home.servers() == []


def test_stop_without_a_state_that_can_be_written(home: Home) -> None:
    """As with a full disk: how it ended is not known, but it did, and that is what was asked for."""
    start_detached(home)
    lock = home.folder / "state" / "servers" / ".lock"
    lock.unlink()
    lock.mkdir()
    done = home.run("stop")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"port {home.port}: it ended; how is not known; its state file stays: cannot write ")
    assert home.servers() == []


def test_a_detached_server_that_died_is_told_afterwards(home: Home) -> None:
    start_detached(home, "dies-later=3")
    home.record_in_state("exited")
    [status] = servers(home)
    assert (status["state"], status["ended"]) == ("ended", "exit code 9")
    assert "the disk went away" in home.run("logs").stdout
    assert "exit code 9" in home.run("stop").stdout
    assert home.record() is None


def test_detach_interrupted_before_ready(home: Home) -> None:
    process = home.popen(*home.start_arguments("--detach"), fake="never-healthy")
    home.record_in_state("loading")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "stopped before the server was ready" in errors
    until(lambda: not home.servers(), "no llama-server left")
    assert home.record() is None


def test_detached_survives_its_terminal(home: Home) -> None:
    """The group of the command that started it gets SIGHUP, as when a terminal closes."""
    code = "import sys; from moestream.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *home.start_arguments("--detach")], env=home.environment(),
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.wait(30) == 0
    with pytest.raises(ProcessLookupError):  # nobody is left in it who could be hit
        import os

        os.killpg(process.pid, signal.SIGHUP)
    assert [s["state"] for s in servers(home)] == ["ready"]


def test_logs(home: Home) -> None:
    start_detached(home)
    done = home.run("logs", "-n", "1", "--json")
    assert json.loads(done.stdout)["schema"] == "moestream/logs/1"
    assert len(json.loads(done.stdout)["lines"]) == 1
    assert home.run("logs").stdout.startswith("fake llama-server -m ")
    assert home.run("logs", "--port", "4711").returncode == 1


def test_logs_follow_until_the_server_ends(home: Home) -> None:
    start_detached(home)
    process = home.popen("logs", "-f", "-n", "0")
    until(lambda: any(f.path.endswith(".log") for f in psutil.Process(process.pid).open_files()), "the log is open")
    home.run("status")  # its question is in the log, behind what was there when it was opened
    assert process.stdout is not None
    assert "GET /" in process.stdout.readline()
    home.run("stop")
    assert process.wait(20) == 0


def test_logs_follow_until_ctrl_c(home: Home) -> None:
    start_detached(home)
    process = home.popen("logs", "-f")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("fake llama-server")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert len(home.servers()) == 1
