"""All checks together, and the documentation of them."""

from __future__ import annotations

import string
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moestream import config, paths
from moestream.commands.doctor import report
from moestream.doctor import gpu, host, memory, survey
from moestream.doctor.checks import Check, Finding, Remedy, Status
from moestream.doctor.survey import CHECKS, Survey, examine
from moestream.upstream import engines

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"


def by_name(found: Survey) -> dict[str, Finding]:
    return {finding.check: finding for finding in found.findings}


def test_every_check_is_there_once_and_in_order(model_file: Path) -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert [f.check for f in examine(None, environment={}).findings] == names
    found = examine(str(model_file), environment={})
    assert [f.check for f in found.findings] == names and found.model == str(model_file)
    assert sum(found.count(status) for status in Status) == len(names)


def test_what_is_not_ok_has_a_hint_and_what_is_has_none(model_file: Path, root) -> None:
    for finding in (*examine(str(model_file), environment={}, root=root.path).findings, *examine("none").findings):
        assert (finding.hint is not None) == (finding.status in ("warn", "fail")) == bool(finding.case), finding


def test_without_a_model_its_checks_are_skipped() -> None:
    found = by_name(examine(None, environment={}))
    for name in ("model", "model-length", "model-content", "read-speed"):
        assert (found[name].status, found[name].found) == ("skipped", "no MODEL is given")
    assert found["drive"].status != "skipped"  # of the folder of models


def test_a_wrong_model_keeps_nothing_else_from_running(model_file: Path) -> None:
    model_file.write_bytes(model_file.read_bytes()[:5000])
    found = by_name(examine(str(model_file), environment={}))
    assert found["model"].status == "fail"
    assert found["read-speed"].found == found["model-length"].found == "not without a model that can be read"
    assert found["direct-io"].status == "ok"


def test_a_wrong_configuration_keeps_nothing_else_from_running(model_file: Path) -> None:
    path = config.user_path()
    path.parent.mkdir(parents=True)
    path.write_text("defaults: {port: [1]}\n")
    found = by_name(examine(str(model_file), environment={}))
    assert found["config"].status == "fail"
    assert (found["model"].status, found["model"].found) == ("skipped", "not before the configuration is right")
    assert "127.0.0.1 port 8080" in found["port"].found or "8080" in found["port"].found
    assert found["memory"].status != "skipped"


def test_the_port_is_that_of_the_configuration() -> None:
    assert by_name(examine(None, environment={"MOESTREAM_PORT": "0"}))["port"].found == "any free one is taken (--port 0)"


def test_the_drive_is_that_of_the_model(model_file: Path, root) -> None:
    folder = str(model_file.parent.resolve())
    root.mounts(("/", "0:1", "overlay", "overlay"), (folder, "0:2", "nfs4", "srv:/models"))
    found = by_name(examine(str(model_file), environment={}, root=root.path))
    assert found["drive"].case == "network"
    assert by_name(examine(None, environment={}, root=root.path))["drive"].data["path"] == folder  # nearest to the home there


def test_memory_is_not_measured_as_a_drive(root) -> None:
    root.mounts(("/", "0:1", "tmpfs", "tmpfs"))
    found = by_name(examine(str(DEMO), environment={}, root=root.path))
    assert (found["read-speed"].status, found["read-speed"].found) == ("skipped", "the model is in memory")


def test_a_model_that_does_not_fit(model_file: Path, root) -> None:
    root.memory(0)
    found = by_name(examine(str(model_file), environment={}, root=root.path))
    assert (found["memory"].status, found["memory"].case) == ("fail", "too-little")


def test_what_cannot_be_found_out_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> Finding:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr(memory, "numa", broken)
    monkeypatch.setattr(host, "io_uring", broken)
    monkeypatch.setattr(survey.drives, "direct_io", broken)
    found = by_name(examine(None, environment={}))
    for name in ("numa", "io-uring", "direct-io"):
        assert (found[name].status, found[name].found) == ("skipped", "cannot be found out: /x Permission denied")


def test_a_folder_of_models_that_cannot_be_looked_up(home: Path) -> None:
    paths.data_dir().parent.mkdir(parents=True)
    paths.data_dir().symlink_to("n" * 300)
    found = by_name(examine(None, environment={}))
    assert found["engine"].case in ("none", "unreadable")
    assert found["models-space"].status == found["drive"].status == "skipped"


def test_tools_are_needed_where_no_engine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    used = object.__new__(engines.Engine)
    object.__setattr__(used, "backend", "cpu")
    for engine, status in ((None, "fail"), (used, "warn")):
        monkeypatch.setattr(survey.engine, "engine", lambda backend, engine=engine: (survey.engine.ENGINE.ok(""), engine))
        found = by_name(examine(None, environment={}))
        assert {found[name].status for name in ("compiler", "build-tools", "git")} == {status}


def test_an_engine_for_a_gpu_that_is_asked_for_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "look", lambda root: gpu.Nvidia(False, "nvidia-smi is not installed"))
    found = by_name(examine(None, environment={"MOESTREAM_BACKEND": "cuda"}))
    assert found["gpu-driver"].status == "fail" and found["engine"].found.startswith("no engine for cuda is built")
    assert by_name(examine(None, environment={}))["gpu-driver"].status == "skipped"


def test_text_from_elsewhere_cannot_steer_the_terminal() -> None:
    check = Check("x", "", {"bad": Remedy("", "look at {it}")})
    finding = check.fail("bad", "a\x1b[31mb\nc", {"it": "d\re"})
    assert (finding.found, finding.hint) == ("a [31mb c", "look at d e")


def test_the_report() -> None:
    check = Check("x", "", {"bad": Remedy("", "do {it}")})
    longer = Check("longer", "", {"bad": Remedy("", "do that")})
    findings = (
        check.ok("good", n_bytes=1),
        longer.warn("bad", "slow"),
        check.fail("bad", "gone", {"it": "this"}),
        check.skipped("no"),
    )
    result = report(Survey(findings, "m.gguf"))
    assert result.text == (
        "ok       x       good\n"
        "warn     longer  slow\n"
        "                 hint: do that\n"
        "fail     x       gone\n"
        "                 hint: do this\n"
        "skipped  x       no\n"
        "1 ok, 1 warn, 1 fail, 1 skipped"
    )
    assert (result.kind, result.version, result.data["model"]) == ("doctor", 1, "m.gguf")
    assert result.data["counts"] == {"ok": 1, "warn": 1, "fail": 1, "skipped": 1}
    assert result.data["checks"][0] == {
        "name": "x", "status": "ok", "case": None, "found": "good", "hint": None, "data": {"n_bytes": 1},
    }  # fmt: skip
    assert result.data["checks"][2]["hint"] == "do this"


# --- the documentation ---


def test_remedies_are_complete() -> None:
    for check in CHECKS:
        assert check.what and check.remedies
        for case, remedy in check.remedies.items():
            assert remedy.when and remedy.hint and case != "ok"
            assert all(name != "" for _, name, _, _ in string.Formatter().parse(remedy.hint))


def test_the_page_lists_every_check_with_its_remedies() -> None:
    """When this fails: python docs/doctor_checks.py"""
    done = subprocess.run([sys.executable, "docs/doctor_checks.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "doctor_checks.py"
    script.write_text((ROOT / "docs" / "doctor_checks.py").read_text())
    page = tmp_path / "doctor.md"
    page.write_text((ROOT / "docs" / "doctor.md").read_text().replace("sudo dmesg", "dmesg"))
    stale = page.read_text()
    check = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert (check.returncode, check.stdout, page.read_text() == stale) == (1, "out of date: doctor.md\n", True), check.stderr
    assert subprocess.run([sys.executable, str(script)], capture_output=True, cwd=ROOT).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "doctor.md").read_text()
    page.write_text("nothing\n")
    assert subprocess.run([sys.executable, str(script)], capture_output=True, cwd=ROOT).returncode == 1
