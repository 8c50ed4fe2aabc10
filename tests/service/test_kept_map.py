"""The router map that ``moestream start`` keeps of a model: recorded, used by the next start, and in nobody's way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from service_harness import DEMO, Home
from trace_files import trace_bytes
from waiting import free_port, until

from moestream import gguf_facts
from moestream.routing.fingerprint import fingerprint

N_TOKENS = 3


@pytest.fixture(scope="module")
def own() -> str:
    return fingerprint(gguf_facts.read(DEMO))


@pytest.fixture
def records(tmp_path: Path, own: str) -> str:
    """The fake's switch: it records the choices of some tokens of the demo model."""
    header = {
        "model": {"fingerprint": own, "architecture": "qwen3moe", "name": DEMO.name},
        "n_expert_used": 6,
        "layers": [{"layer": i, "n_expert": 64} for i in range(8)],
    }
    path = tmp_path / "recorded"
    path.write_bytes(trace_bytes([(i, [[9, 8, 7, 6, 5, 4]] * N_TOKENS) for i in range(8)], header))
    return f"records={path}"


def kept_of(home: Home, own: str) -> Path:
    return home.folder / "data" / "maps" / f"{own}.json"


def tokens(home: Home, own: str) -> int | None:
    path = kept_of(home, own)
    return json.loads(path.read_text())["tokens"] if path.exists() else None


def leftovers(home: Home) -> list[str]:
    folder = home.folder / "state" / "servers"
    return [p.name for p in folder.iterdir() if not p.name.endswith((".log", ".log.1", ".lock"))]


def detached(home: Home, *more: str, fake: str = "", port: int | None = None) -> tuple[dict[str, Any], str]:
    """The report, and what was told."""
    arguments = ["start", "--model", str(DEMO), "--slots", "8", "--port", str(port or home.port), "--detach", "--json", *more]
    done = home.run(*arguments, fake=fake)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_second_start_uses_what_the_first_recorded(home: Home, own: str, records: str) -> None:
    first, told = detached(home, fake=records)
    path = kept_of(home, own)
    assert first["kept_map"] == {"path": str(path), "used": False, "tokens": 0, "learning": True, "problem": None}
    assert "--moe-map" not in first["argv"] and told == ""
    assert json.loads((home.folder / "state" / "servers" / f"{home.port}.json").read_text())["argv"] == first["argv"]
    assert home.run("stop").stdout == f"port {home.port}: stopped\n"
    assert tokens(home, own) == N_TOKENS and leftovers(home) == []

    second, told = detached(home, fake=records)
    assert second["kept_map"] == {"path": str(path), "used": True, "tokens": N_TOKENS, "learning": True, "problem": None}
    assert told == f"notice: slots are filled by what was chosen most in 3 tokens, as kept in {path} (--no-map: without)\n"
    passed = Path(second["argv"][second["argv"].index("--moe-map") + 1])
    assert json.loads(passed.read_text()) == json.loads(path.read_text())
    assert home.run("stop").returncode == 0
    assert tokens(home, own) == 2 * N_TOKENS and leftovers(home) == []


def test_ctrl_c_in_the_foreground(home: Home, own: str, records: str) -> None:
    process = home.popen(*home.start_arguments(), fake=records)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(10)]
    assert f"map         none yet, learning for the next start: {kept_of(home, own)}\n" in lines
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert errors == f"notice: the choices of 3 tokens are added to the router map {kept_of(home, own)}\nstopped\n"
    assert process.returncode == 0 and tokens(home, own) == N_TOKENS


def test_a_server_that_dies(home: Home, own: str, records: str) -> None:
    detached(home, fake=f"{records},dies-later=0.2")
    until(lambda: tokens(home, own) == N_TOKENS, "what it recorded to be kept")


def test_a_supervisor_that_is_killed(home: Home, own: str, records: str) -> None:
    report, _ = detached(home, fake=records)
    subprocess.run(["kill", "-9", str(report["supervisor_pid"])], check=True)
    until(lambda: not home.servers(), "its server gone too")
    assert tokens(home, own) is None and f"{home.port}.trace" in leftovers(home)
    second, told = detached(home)
    assert second["kept_map"]["tokens"] == N_TOKENS and "slots are filled by" in told
    assert tokens(home, own) == N_TOKENS


def test_another_model_is_another_map(home: Home, own: str, records: str, tmp_path: Path) -> None:
    detached(home, fake=records)
    home.run("stop")
    model = tmp_path / "tuned.gguf"
    shutil.copyfile(DEMO, model)
    router = gguf_facts.read(DEMO).routers[0]
    with model.open("r+b") as file:
        file.seek(router.offset)
        file.write(b"\0\1\2\3")
    done = home.run("start", "--model", str(model), "--slots", "8", "--port", str(home.port), "-d", "--json")
    report = json.loads(done.stdout)
    assert "--moe-map" not in report["argv"] and done.stderr == ""
    assert report["kept_map"]["learning"] and report["kept_map"]["path"] != str(kept_of(home, own))


def test_without(home: Home, own: str, records: str, tmp_path: Path) -> None:
    """--no-map, and --map: neither uses nor changes what is kept."""
    detached(home, fake=records)
    home.run("stop")
    before = kept_of(home, own).read_bytes()
    report, told = detached(home, "--no-map", fake=records)
    assert not any(a in report["argv"] for a in ("--moe-map", "--moe-trace")) and report["kept_map"] is None and told == ""
    home.run("stop")
    mine = tmp_path / "mine.json"
    shutil.copyfile(kept_of(home, own), mine)
    report, told = detached(home, "--map", str(mine), "--router-top-k", "2", fake=records)
    assert report["argv"][report["argv"].index("--moe-map") + 1] == str(mine)
    assert "--moe-trace" not in report["argv"] and told == ""
    home.run("stop")
    assert kept_of(home, own).read_bytes() == before


def test_two_at_once(home: Home, own: str, records: str) -> None:
    started = [
        home.popen("start", "--model", str(DEMO), "--slots", "8", "--port", str(port), fake=records)
        for port in (home.port, free_port())
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline().startswith("ready")
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.communicate(timeout=20)
        assert process.returncode == 0
    assert tokens(home, own) == 2 * N_TOKENS and leftovers(home) == []


def test_a_damaged_map(home: Home, own: str, records: str) -> None:
    path = kept_of(home, own)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "moestream.map", "ver')
    report, told = detached(home, fake=records)
    assert told.startswith(f"warning: the kept router map is not used: {path} is not a map: it is no JSON")
    assert "(moestream map forget removes it)" in told
    assert "--moe-map" not in report["argv"]
    assert report["kept_map"]["problem"].startswith(f"{path} is not a map") and report["kept_map"]["used"] is False
    assert home.run("stop").returncode == 0
    assert tokens(home, own) == N_TOKENS and path.with_name(f"{path.name}.damaged").exists()


@pytest.mark.parametrize(
    ("more", "then"),
    [((), "a new one is begun when the server ends"), (("--learn", "off"), "moestream map forget removes it")],
)
def test_a_damaged_map_is_not_called_none(home: Home, own: str, more: tuple[str, ...], then: str) -> None:
    path = kept_of(home, own)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    done = home.run(*home.start_arguments("--detach", *more))
    assert f"map         the kept one is damaged and not used, {then}: {path}\n" in done.stdout
    assert "none yet" not in done.stdout


def test_a_damaged_trace(home: Home, own: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"MOETRACE and then nothing that makes sense")
    process = home.popen(*home.start_arguments(), fake=f"records={tmp_path / 'bad'}")
    assert process.stdout is not None and process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors.startswith("warning: what was recorded is not added to the kept router map: ")
    assert errors.endswith("; it is lost\nstopped\n")
    assert tokens(home, own) is None and leftovers(home) == []


def test_a_folder_that_cannot_be_written(home: Home, own: str, records: str) -> None:
    """It is told at the start; serving and stopping go on, and the next start tries again."""
    maps = home.folder / "data" / "maps"
    maps.write_text("in the way")
    process = home.popen(*home.start_arguments(), fake=records)
    assert process.stdout is not None and process.stdout.readline().startswith("ready")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert errors.startswith(f"warning: what is recorded cannot be added to the kept router map now: cannot write to {maps}: ")
    assert process.returncode == 0
    assert f"warning: what was recorded is not added to the kept router map: cannot write to {maps}: " in errors
    assert errors.endswith("; the next start tries again\nstopped\n")
    assert len(leftovers(home)) == 1
    _, told = detached(home, "--learn", "off")  # nothing has changed: it waits on
    assert told.count("; the next start tries again") == 1 and home.run("stop").returncode == 0
    assert len(leftovers(home)) == 1
    maps.unlink()
    report, _ = detached(home)
    assert report["kept_map"]["tokens"] == N_TOKENS
    home.run("stop")
    assert leftovers(home) == []


def test_a_trace_that_cannot_be_written(home: Home, records: str) -> None:
    (home.folder / "state" / "servers" / f"{home.port}.trace").mkdir(parents=True)
    report, told = detached(home, fake=records)
    assert "warning: nothing is recorded for the kept router map: cannot write" in told
    assert "--moe-trace" not in report["argv"] and report["kept_map"]["learning"] is False


def test_forget(home: Home, own: str, records: str) -> None:
    forget = ("map", "forget", "--model", str(DEMO))
    assert home.run(*forget).stdout == "nothing was kept\n"
    detached(home, fake=records)
    home.run("stop")
    detached(home, fake=records)
    told = f"the server on port {home.port} goes on recording, and adds to a new map when it ends\n"
    assert home.run(*forget).stdout == f"removed {kept_of(home, own)}\n{told}"
    assert not kept_of(home, own).exists()
    assert home.run("stop").returncode == 0
    assert tokens(home, own) == N_TOKENS
    done = home.run("map", "forget", "--all", "--json")
    removed = [str(kept_of(home, own))]
    assert json.loads(done.stdout) == {"schema": "moestream/map-forget/1", "removed": removed, "recording_ports": []}
    for wrong in (("map", "forget"), (*forget, "--all")):
        done = home.run(*wrong)
        assert done.returncode == 1 and "hint: moestream map forget --model FILE, or --all" in done.stderr


def test_forget_a_folder_of_that_name(home: Home, own: str, records: str) -> None:
    """It is none of ours: it stays, and keeps nothing else from being removed."""
    detached(home, fake=records)
    home.run("stop")
    damaged = kept_of(home, own).with_name(f"{own}.json.damaged")
    damaged.mkdir()
    (damaged / "mine").touch()
    done = home.run("map", "forget", "--all")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: cannot remove {damaged}: it is a folder, and no router map\nhint: look at it and remove it by hand\n"
    )
    assert not kept_of(home, own).exists() and (damaged / "mine").exists()
    kept_of(home, own).mkdir()
    done = home.run("map", "forget", "--model", str(DEMO))
    assert done.returncode == 1 and f"cannot remove {kept_of(home, own)}: it is a folder" in done.stderr
    report, told = detached(home, fake=records)
    assert "the kept router map is not used" in told and report["kept_map"]["problem"]


def test_forget_a_model_of_a_folder_or_a_name(home: Home, own: str, records: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(DEMO)
    config = home.folder / "config"
    config.mkdir()
    (config / "moestream.yaml").write_text(f"models:\n  coder: {{model: {DEMO}}}\n")
    for name in (str(folder), "coder"):
        detached(home, fake=records)
        home.run("stop")
        assert home.run("map", "forget", "--model", name).stdout == f"removed {kept_of(home, own)}\n"


def test_status_says_which_map_is_in_use(home: Home, own: str, records: str, tmp_path: Path) -> None:
    def shown() -> tuple[Any, str]:
        data = json.loads(home.run("status", "--json").stdout)["servers"][0]["map"]
        text = home.run("status").stdout
        home.run("stop")
        return data, text

    path = str(kept_of(home, own))
    detached(home, fake=records)
    data, text = shown()
    assert data == {"path": None, "kept": False, "learning": True}
    assert f"  map       none yet, learning for the next start: {path}\n" in text
    detached(home, fake=records)
    data, text = shown()
    assert data == {"path": path, "kept": True, "learning": True}
    assert f"  map       {path}, as kept when it was started; learning\n" in text
    shutil.copyfile(path, tmp_path / "mine.json")
    detached(home, "--map", str(tmp_path / "mine.json"), "--router-top-k", "2")
    data, text = shown()
    assert data == {"path": str(tmp_path / "mine.json"), "kept": False, "learning": False}
    assert f"  map       {tmp_path / 'mine.json'}\n" in text
    detached(home, "--no-map")
    data, text = shown()
    assert data is None and "  map " not in text


def test_too_many_pins_are_refused_before_a_start(home: Home, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("{}")
    done = home.run(*home.start_arguments("--map", str(tmp_path / "m.json"), "--router-top-k", "3"))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: --router-top-k 3 is too many: layer 0 has 8 slots, and a token of {DEMO.name} uses 6 experts\n"
        "hint: --router-top-k 2 or less, or --slots 9\n"
    )
    assert home.record() is None
