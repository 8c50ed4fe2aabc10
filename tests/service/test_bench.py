"""``moestream bench`` with a fake engine: wrong output, deaths, hangs, refusals, Ctrl-C. No fault leaves a process behind."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from service_harness import DEMO, Home
from waiting import until

SHORT = ("--slots", "8", "--runs", "1", "--tokens", "24", "--prompt", "8")


def bench(home: Home, *more: str, fake: str = "", code: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON (empty when there is none) and stderr."""
    done = home.run("bench", str(DEMO), *SHORT, "--json", *more, fake=fake)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert home.servers() == []
    return json.loads(done.stdout or "{}"), done.stderr


def last_lines(stderr: str) -> tuple[str, str]:
    """The first line of the error, and the hint."""
    lines = stderr[stderr.index("error: ") :].splitlines()
    return lines[0].removeprefix("error: "), next((x.removeprefix("hint: ") for x in lines if x.startswith("hint: ")), "")


def test_measured(home: Home) -> None:
    data, _ = bench(home, "--vs", "stock", "--runs", "2")
    assert (data["complete"], data["failures"], data["output"]["equal"]) == (True, [], True)
    order = [(run["side"], run["cache"]) for run in data["runs"]]
    ours, stock = "moestream 8 slots", "stock"
    assert order == [(side, cache) for side in (ours, stock, stock, ours) for cache in ("cold", "warm")], "sides in turn"
    assert all(len(run["token_s"]) == 23 for run in data["runs"])
    assert not (home.folder / "data" / "maps").exists(), "nothing is learned from it"
    assert "--moe-slots" in data["sides"][ours]["argv"] and "--moe-slots" not in data["sides"][stock]["argv"]


def test_a_model_of_the_configuration_and_arguments_for_the_server(home: Home) -> None:
    file = home.folder / "config" / "moestream.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"models:\n  small:\n    model: {DEMO}\n    slots: 12\n    policy: lfu\n    port: 1\n    host: 0.0.0.0\n")
    arguments = ("bench", "small", "--vs", "stock", "--warm", "--runs", "1", "--tokens", "4", "--json", "--")
    done = home.run(*arguments, "--moe-staging", "ring", "-t", "1")
    assert done.returncode == 0, done.stderr
    argv = {side: " ".join(facts["argv"]) for side, facts in json.loads(done.stdout)["sides"].items()}
    assert "--moe-slots 12 --moe-policy lfu --moe-warm off" in argv["moestream 12 slots"]
    assert argv["moestream 12 slots"].endswith("--moe-staging ring -t 1")
    assert "--moe" not in argv["stock"] and argv["stock"].endswith("-np 1 -t 1")
    assert all("--host 127.0.0.1" in line and "--port 1 " not in line for line in argv.values()), "for nobody else, on any port"


def test_wrong_output_of_one_side(home: Home) -> None:
    data, said = bench(home, "--vs", "stock", fake="stock-only,wrong-token=3", code=3)
    message, _ = last_lines(said)
    assert message == (
        "outputs differ, so no speed is shown: moestream 8 slots, first answer and stock, first answer part at "
        "token 3: 103 ' 103' and 900 ' 900'"
    )
    assert data["output"] == {
        "equal": False, "sha256": None, "answers": 1,
        "difference": {
            "first": "moestream 8 slots, first answer", "second": "stock, first answer", "token": 3,
            "first_token": {"n_tokens": 3, "token": 103, "text": " 103"},
            "second_token": {"n_tokens": 3, "token": 900, "text": " 900"},
        },
    }  # fmt: skip
    assert (data["runs"], data["summary"], data["versus"], data["complete"]) == ([], [], [], False)
    done = home.run("bench", str(DEMO), *SHORT, "--vs", "stock", fake="stock-only,wrong-token=3")
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("token", [2, 20])
def test_wrong_output_later(home: Home, token: int) -> None:
    """In a run that counts, behind what the first comparison saw too; the speeds from before it are not shown."""
    data, said = bench(home, fake=f"second-answer,wrong-token={token}", code=3)
    assert f"warm, round 1 part at token {token}: " in last_lines(said)[0]
    assert data["runs"] == []


def test_stock_that_is_killed_is_told_and_is_no_speed(home: Home) -> None:
    data, _ = bench(home, "--vs", "stock", fake="stock-only,dies-by=9")
    (failure,) = data["failures"]
    assert (failure["side"], failure["kind"]) == ("stock", "killed")
    assert {row["side"] for row in data["summary"]} == {"moestream 8 slots"}
    assert data["versus"] == [] and data["complete"] is False
    text = home.run("bench", str(DEMO), *SHORT, "--vs", "stock", fake="stock-only,dies-by=9").stdout
    assert "stock: no speed, killed: llama-server ended before it was ready" in text
    assert "-- --no-repack measures the mapped file alone" in text
    assert not any(line.startswith("stock ") for line in text.splitlines()), "no row of speeds"


@pytest.mark.parametrize(("fake", "message"), [
    ("refuses", "--slots auto: 6 slots take 9.5 MiB"),
    ("unknown-arch", "llama.cpp does not know the model's architecture 'marvin42'"),
    ("dies-in-answer=4", "llama-server ended while serving"),
    ("hangs-in-answer=4", "there was no whole answer within 1 s"),
    ("slow-answer=0.2", "there was no whole answer within 1 s"),
    ("never-healthy", "llama-server was not ready after"),
    ("fails-in-answer=4", "the server answered with an error: layer 3: a read failed"),
    ("short-answer=4", "the server answered with 4 tokens instead of"),
])  # fmt: skip
def test_a_side_that_cannot_be_measured(home: Home, fake: str, message: str) -> None:
    data, said = bench(home, "--timeout", "1", "--ready-timeout", "1", fake=fake, code=1)
    assert data == {}, "nothing was measured"
    found, hint = last_lines(said)
    assert found.startswith(f"moestream 8 slots could not be measured: {message}")
    assert hint


@pytest.mark.parametrize(("fake", "kind"), [
    ("refuses", "not loaded"), ("never-healthy", "timeout"), ("dies-in-answer=4", "died"), ("hangs-in-answer=4", "timeout"),
    ("fails-in-answer=4", "no answer"),
])  # fmt: skip
def test_the_other_side_is_measured_all_the_same(home: Home, fake: str, kind: str) -> None:
    data, _ = bench(home, "--vs", "stock", "--timeout", "1", "--ready-timeout", "1", "--warm", fake=f"stock-only,{fake}")
    assert [(failure["side"], failure["kind"]) for failure in data["failures"]] == [("stock", kind)]
    assert [run["side"] for run in data["runs"]] == ["moestream 8 slots"]


def test_a_death_in_the_middle_keeps_what_there_was(home: Home) -> None:
    data, said = bench(home, "--vs", "stock", fake="second-answer,dies-in-answer=4", code=1)
    assert [(run["side"], run["cache"]) for run in data["runs"]] == [("moestream 8 slots", "cold"), ("stock", "cold")]
    assert [(failure["side"], failure["kind"]) for failure in data["failures"]] == [
        ("moestream 8 slots", "died"),
        ("stock", "died"),
    ]
    assert "fatal: the disk went away" in said
    assert "moestream 8 slots could not be measured: llama-server ended while serving" in last_lines(said)[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ctrl_c_prints_what_there_is(home: Home, number: int) -> None:
    command = home.popen("bench", str(DEMO), *SHORT, "--json", fake="second-answer,hangs-in-answer=2")

    def hangs() -> bool:
        """The second answer of the measured server is under way; the first one is a cold run."""
        logs = (home.folder / "state" / "servers").glob("*.log")
        return any(log.read_text().count('"POST /completion') == 2 for log in logs)

    until(hangs, "the warm run")
    (server,) = home.servers()
    if sys.platform == "linux":
        assert Path(f"/proc/{server}/oom_score_adj").read_text() == "1000\n", "where memory runs out, it goes first"
    command.send_signal(number)
    out, said = command.communicate(timeout=20)
    until(lambda: home.servers() == [], "no server is left")
    if number == signal.SIGKILL:
        return
    assert command.returncode == 130
    data = json.loads(out)
    assert (data["complete"], [(run["cache"], run["round"]) for run in data["runs"]]) == (False, [("cold", 0)])
    assert last_lines(said)[0] == "stopped: 1 of 2 runs were measured"


def test_a_model_that_goes_away_keeps_what_there_was(home: Home, tmp_path: Path) -> None:
    model = tmp_path / "x.gguf"
    shutil.copyfile(DEMO, model)
    command = home.popen("bench", str(model), *SHORT, "--runs", "2", "--cold", "--json", fake="slow-answer=0.1")

    seen: set[str] = set()

    def measuring() -> bool:
        """The server of the first round, behind the one whose output was compared, and whose log is gone."""
        seen.update(path.name for path in (home.folder / "state" / "servers").glob("*.log"))
        return len(seen) == 2

    until(measuring, "the first round")
    until(home.servers, "its server")
    until(lambda: any("POST /completion" in p.read_text() for p in newest_log(home)), "its answer")
    model.unlink()
    out, said = command.communicate(timeout=30)
    assert (command.returncode, home.servers()) == (1, [])
    assert [run["round"] for run in json.loads(out)["runs"]] == [0]
    assert str(model) in last_lines(said)[0]


def test_logs_of_other_servers_stay(home: Home) -> None:
    folder = home.folder / "state" / "servers"
    folder.mkdir(parents=True, mode=0o700)
    for port in range(19000, 19004):
        (folder / f"{port}.log").write_text("of a server that is no more")
    assert home.run("bench", str(DEMO), *SHORT, "--runs", "3", "--cold").returncode == 0
    assert sorted(p.name for p in folder.glob("*.log")) == [f"{port}.log" for port in range(19000, 19004)]


def newest_log(home: Home) -> list[Path]:
    return sorted((home.folder / "state" / "servers").glob("*.log"), key=lambda path: path.stat().st_mtime)[-1:]


def test_ctrl_c_before_the_first_run(home: Home) -> None:
    command = home.popen("bench", str(DEMO), *SHORT, fake="never-healthy")
    until(home.servers, "a server")
    command.send_signal(signal.SIGINT)
    out, said = command.communicate(timeout=20)
    assert (command.returncode, out, home.servers()) == (130, "", [])
    assert last_lines(said)[0] == "stopped: nothing was measured"


def test_refused_before_a_process_starts(home: Home) -> None:
    def refusal(*arguments: str) -> tuple[int, str]:
        done = home.run("bench", *arguments)
        assert done.stdout == "" and not list((home.folder).glob("state/servers/*.log"))
        return done.returncode, last_lines(done.stderr)[0]

    assert refusal() == (2, "no model is given")
    assert refusal(str(DEMO), "--slots", "5") == (1, f"--slots 5: too few, a token of {DEMO.name} uses 6 experts in a layer")
    code, message = refusal(str(DEMO), "--tokens", "9000")
    assert (code, message.startswith("--prompt 128 and --tokens 9000 do not fit into a context of ")) == (1, True)
    assert refusal(str(DEMO), "--plot", "x.jpg") == (1, "--plot x.jpg: expected a name that ends with .png or .svg")
    assert "collides with moestream's own --slots" in refusal(str(DEMO), "--", "--moe-slots", "8")[1]
    assert refusal(str(home.folder / "none.gguf"))[0] == 1
