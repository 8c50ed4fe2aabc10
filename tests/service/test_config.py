"""moestream.yaml with real processes: what starts, what is refused before anything does, and what ``config`` says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from service_harness import DEMO, Home


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def user(home: Home) -> Path:
    path = home.folder / "config" / "moestream.yaml"
    path.parent.mkdir()
    return path


def run(home: Home, cwd: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moestream.cli", *arguments],
        env={**home.environment(), **variables}, cwd=cwd, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def after(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_a_model_by_its_name(home: Home, project: Path, user: Path) -> None:
    user.write_text(
        f"defaults: {{port: {home.port}, detach: true, policy: lfu}}\n"
        f"models:\n  demo:\n    model: {DEMO}\n    slots: 9\n    ctx: 512\n    llama_args: [--alias, a, --threads, 1]\n"
    )
    (project / "moestream.yaml").write_text("models:\n  demo: {ctx: 256, kept_map: false}\n")
    done = run(home, project, "start", "demo", "--json", "--io", "buffered", "--", "--alias", "b", MOESTREAM_POLICY="heat")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    argv = report["argv"]
    assert report["detached"] and report["port"] == home.port and report["model"] == str(DEMO)
    flags = ("--moe-slots", "--moe-policy", "-c", "--moe-io", "--threads", "--moe-trace")
    assert [after(argv, flag) for flag in flags] == ["9", "heat", "256", "buffered", "1", None]
    assert argv[-6:] == ["--alias", "a", "--threads", "1", "--alias", "b"]
    mine = project / "moestream.yaml"
    assert report["config_sources"] == {
        "model": f"{user}:4", "slots": f"{user}:5", "ctx": f"{mine}:2", "port": f"{user}:1", "policy": "MOESTREAM_POLICY",
        "kept_map": f"{mine}:2", "detach": f"{user}:1", "llama_args": f"{user}:7",
    }  # fmt: skip
    assert home.run("stop").returncode == 0
    done = run(home, project, "start", "--model", "demo", "--slots", "10")
    assert f"settings    model from {user}:4, ctx from {mine}:2, " in done.stdout and "10 of 64 experts" in done.stdout


@pytest.mark.parametrize("arguments", [("start", "demo"), ("config", "show"), ("config", "check")])
def test_a_wrong_file_starts_nothing(home: Home, project: Path, arguments: tuple[str, ...]) -> None:
    path = project / "moestream.yaml"
    path.write_text(f"models:\n  demo:\n    model: {DEMO}\n    slot: 9\n    ctx: many\n")
    done = run(home, project, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {path}:4:5: unknown key 'slot' in models.demo: did you mean 'slots'?\n"
        f"{path}:5:10: models.demo.ctx is 'many': expected a whole number\n"
        "hint: docs/config.md lists the keys; moestream config check looks at everything\n"
    )
    assert home.record() is None


def test_what_start_refuses_names_the_line(home: Home, project: Path) -> None:
    path = project / "moestream.yaml"
    path.write_text(f"models:\n  demo:\n    model: {DEMO}\n    slots: 65\n")
    done = run(home, project, "start", "demo")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --slots 65: too many, a layer of")
    assert done.stderr.endswith(f"; slots is from {path}:4\n")


def test_models_that_are_not_known(home: Home, project: Path) -> None:
    done = run(home, project, "start")
    assert (done.returncode, done.stderr) == (2, "error: no model is given\nhint: moestream start --model FILE\n")
    done = run(home, project, "config", "show", "--model", "dmeo")
    assert (
        done.returncode == 1 and "--model dmeo: neither a file nor a name that is known\nhint: no moestream.yaml" in done.stderr
    )
    (project / "moestream.yaml").write_text("models:\n  demo: {model: hf:owner/repo:q4}\n  other: {}\n")
    done = run(home, project, "start")
    assert done.stderr.endswith("; or the models of moestream.yaml: demo, other\n")
    for arguments in (("start", "dmeo"), ("config", "show", "--model", "dmeo")):
        done = run(home, project, *arguments)
        assert done.returncode == 1 and done.stderr == (
            "error: --model dmeo: neither a file nor a name that is known\nhint: the models of moestream.yaml: demo, other\n"
        )
    assert "hf:owner/repo:q4" in run(home, project, "config", "show", "--model", "demo").stdout
    done = run(home, project, "start", "demo")
    assert done.returncode == 1 and "--model hf:owner/repo:q4" in done.stderr and "model is from" in done.stderr
    done = run(home, project, "start", "other")
    assert f"{project}/moestream.yaml:3: the model 'other' has no file" in done.stderr
    done = run(home, project, "start", "demo", "--model", "other")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: two models are given: demo and --model other")


def test_show_path_and_check(home: Home, project: Path, user: Path) -> None:
    done = run(home, project, "config", "path")
    assert done.stdout == f"project  {project}/moestream.yaml (none)\nuser     {user} (none)\n"
    assert run(home, project, "config", "check").stdout.startswith("no moestream.yaml")
    user.write_text(f"models:\n  demo: {{model: {DEMO}, slots: off}}\n  gone: {{model: gone.gguf}}\n")
    files = json.loads(run(home, project, "config", "path", "--json").stdout)
    assert files == {"schema": "moestream/config-path/1", "files": [
        {"kind": "project", "path": f"{project}/moestream.yaml", "exists": False},
        {"kind": "user", "path": str(user), "exists": True},
    ]}  # fmt: skip
    shown = json.loads(run(home, project, "config", "show", "--model", "demo", "--json", MOESTREAM_CTX="7").stdout)
    assert (shown["schema"], shown["model"], shown["models"]) == ("moestream/config-show/1", "demo", ["demo", "gone"])
    assert shown["settings"]["slots"] == {"value": "off", "source": f"{user}:2"}
    assert shown["settings"]["ctx"] == {"value": 7, "source": "MOESTREAM_CTX"}
    assert shown["settings"]["port"] == {"value": 8080, "source": "default"}
    text = run(home, project, "config", "show").stdout.splitlines()
    assert [line.split() for line in text[:2]] == [["model", "-", "default"], ["slots", "auto", "default"]]
    assert text[-1] == "models: demo, gone (--model NAME)"
    checked = json.loads(run(home, project, "config", "check", "--json", MOESTREAM_SLTOS="7").stdout)
    assert checked == {"schema": "moestream/config-check/1", "files": [str(user)], "models": ["demo", "gone"], "notices": [
        "MOESTREAM_SLTOS is read by nothing: did you mean MOESTREAM_SLOTS?",
        f"{user}:3: there is no {user.parent}/gone.gguf",
    ]}  # fmt: skip
    done = run(home, project, "config", "check", MOESTREAM_CTX="many")
    assert done.returncode == 1 and done.stderr.startswith("error: MOESTREAM_CTX=many: expected a whole number\n")


def test_both_files_are_checked(home: Home, project: Path, user: Path) -> None:
    user.write_text("a: 1\n")
    (project / "moestream.yaml").write_text("b: 1\n")
    done = run(home, project, "config", "check")
    assert done.returncode == 1
    assert f"{project}/moestream.yaml:1:1: unknown key 'b'" in done.stderr and f"{user}:1:1: unknown key 'a'" in done.stderr
