"""``moestream build``, ``moestream engines`` and the entry point, as a user sees them: exact text and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moestream
from moestream.upstream import engines
from moestream.upstream.build import PRODUCT_TARGETS
from moestream.upstream.pin import load_pin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def moestream_cli(home: Path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moestream.cli", *arguments],
            env={**os.environ, "MOESTREAM_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environment},
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip

    return run


@pytest.fixture
def engine(home: Path) -> engines.Engine:
    """An engine that matches this version, with empty programs."""
    source, sources, cpu = load_pin().version, engines.sources_hash(), engines.cpu_kind()
    name = engines.engine_id(source, sources, "cpu", cpu)
    engine = engines.Engine(
        id=name, path=home / "data" / "engines" / name, source=source, sources_sha256=sources, backend="cpu", cpu=cpu,
        built_at="2026-01-02T03:04:05+00:00", targets=PRODUCT_TARGETS, tools=PRODUCT_TARGETS, cmake_args=("-DA=1",),
        extra_cmake_args=(), web_ui=False, test_series_sha256="",
    )  # fmt: skip
    engine.bin_dir.mkdir(parents=True)
    for tool in engine.tools:
        (engine.bin_dir / tool).touch()
    engines.write_description(engine, engine.path)
    return engine


def test_version(moestream_cli):
    done = moestream_cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"moestream {moestream.__version__}\n", "")


def test_no_command_prints_the_commands(moestream_cli):
    done = moestream_cli()
    assert done.returncode == 2
    assert "build" in done.stdout + done.stderr and "engines" in done.stdout + done.stderr


def test_wrong_usage_is_exit_code_2(moestream_cli):
    done = moestream_cli("build", "--jobs", "many")
    assert done.returncode == 2 and done.stdout == ""
    assert "Invalid value for '--jobs'" in done.stderr


# ---------------------------------------------------------------- engines


def test_engines_when_there_are_none(moestream_cli):
    done = moestream_cli("engines")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no engine is built (moestream build)\n", "")
    done = moestream_cli("engines", "--json")
    assert json.loads(done.stdout) == {"schema": "moestream/engines/1", "in_use": None, "engines": []}
    done = moestream_cli("engines", "--path")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no engine is built\nhint: moestream build\n"


def test_engines_lists_and_marks_the_one_in_use(moestream_cli, engine, home):
    other = home / "data" / "engines" / "old"
    other.mkdir()
    text = (engine.path / "engine.json").read_text().replace(engine.id, "old").replace(f'"{engine.source}"', '"0.0.1"')
    (other / "engine.json").write_text(text.replace("2026-01-02", "2025-01-02"))
    done = moestream_cli("engines")
    assert done.stdout == (
        f"* {engine.id}  cpu, built 2026-01-02, 9 programs, without web page\n"
        "  old  cpu, built 2025-01-02, 9 programs, without web page\n"
    )
    data = json.loads(moestream_cli("engines", "--json").stdout)
    assert data["in_use"] == engine.id
    assert [(row["id"], row["in_use"]) for row in data["engines"]] == [(engine.id, True), ("old", False)]
    assert data["engines"][0] == {
        "id": engine.id, "path": str(engine.path), "source": engine.source, "sources_sha256": engine.sources_sha256,
        "backend": "cpu", "cpu": engine.cpu, "built_at": "2026-01-02T03:04:05+00:00", "targets": list(PRODUCT_TARGETS),
        "tools": list(PRODUCT_TARGETS), "cmake_args": ["-DA=1"], "extra_cmake_args": [], "web_ui": False,
        "test_series_sha256": "", "portable": False, "cuda_archs": [], "bin_dir": str(engine.bin_dir), "in_use": True,
    }  # fmt: skip


def test_only_outdated_engines(moestream_cli, engine):
    description = engine.path / "engine.json"
    description.write_text(description.read_text().replace(engine.sources_sha256, "0" * 64))
    done = moestream_cli("engines")
    assert done.stdout.endswith("none matches this version of moestream and this processor (moestream build)\n")
    assert done.stdout.startswith(f"  {engine.id}")
    assert moestream_cli("engines", "--path").returncode == 1


def test_engines_path_is_the_folder_of_the_programs(moestream_cli, engine):
    done = moestream_cli("engines", "--path")
    assert (done.stdout, done.stderr) == (f"{engine.bin_dir}\n", "")
    assert {file.name for file in Path(done.stdout.strip()).iterdir()} == set(PRODUCT_TARGETS)
    done = moestream_cli("engines", "--path", "--json")
    assert json.loads(done.stdout) == {
        "schema": "moestream/engine-path/1", "id": engine.id, "bin_dir": str(engine.bin_dir),
    }  # fmt: skip


def test_engines_of_a_backend(moestream_cli, engine):
    done = moestream_cli("engines", "--path", "--backend", "cuda")
    assert done.stderr == (
        "error: no engine for cuda is built that matches this version of moestream and this processor\n"
        "hint: moestream build --backend cuda\n"
    )
    done = moestream_cli("engines", "--backend", "opencl")
    assert done.returncode == 1
    assert done.stderr == "error: unknown backend 'opencl'\nhint: one of: cuda, hip, metal, vulkan, cpu\n"


# ---------------------------------------------------------------- build


def test_the_cards_of_an_engine_are_shown(moestream_cli, engine, home):
    other = home / "data" / "engines" / "gpu"
    other.mkdir()
    description = json.loads((engine.path / "engine.json").read_text()) | {
        "backend": "cuda",
        "cuda_archs": ["86-real", "90-real"],
    }
    (other / "engine.json").write_text(json.dumps(description))
    done = moestream_cli("engines", "--backend", "cuda")
    assert f"{engine.id}  cuda for 86-real, 90-real, built 2026-01-02, 9 programs" in done.stdout
    (listed,) = json.loads(moestream_cli("engines", "--backend", "cuda", "--json").stdout)["engines"]
    assert (listed["backend"], listed["cuda_archs"]) == ("cuda", ["86-real", "90-real"])


def test_cuda_needs_a_card_or_its_name(moestream_cli, engine):
    done = moestream_cli("build", "--backend", "cuda", PATH="/nonexistent")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: no NVIDIA card can be seen: nvidia-smi is not installed\n"
        "hint: name the architectures, for example: moestream build --backend cuda --cuda-archs 86,90 (a compute capability of 8.6 is 86)\n"
    )


def test_what_is_built_is_not_built_again(moestream_cli, engine):
    """No compiler, no cmake and no network are needed to say so."""
    done = moestream_cli("build", PATH="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"already built: {engine.id} (cpu, without the web page)\n{engine.bin_dir}\n"
    data = json.loads(moestream_cli("build", "--json", PATH="/nonexistent").stdout)
    assert data.pop("elapsed_s") < 5
    assert data == {
        "schema": "moestream/build/1", "id": engine.id, "built": False, "backend": "cpu", "portable": False, "cuda_archs": [],
        "bin_dir": str(engine.bin_dir), "tools": list(PRODUCT_TARGETS), "web_ui": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--backend", "opencl"], "unknown backend 'opencl'", "one of: cuda, hip, metal, vulkan, cpu"),
        (["--jobs", "0"], "--jobs is 0", "give at least 1, or leave it out"),
        (["--source", "/nonexistent"], "--source /nonexistent: no such file or folder", "name a llama.cpp folder or a .tar.gz of one"),
        (["--cmake-arg", "X=1"], "--cmake-arg X=1 is not of the form -DNAME=VALUE", "write it with its -D"),
        (["--portable", "--cmake-arg", "-DGGML_NATIVE=ON"],
         "--portable and -DGGML_NATIVE=ON contradict each other: such code may crash on other processors", "leave one of them out"),
    ],
)  # fmt: skip
def test_build_with_bad_input(moestream_cli, arguments, error, hint):
    done = moestream_cli("build", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {error}\nhint: {hint}\n"


# ---------------------------------------------------------------- prebuilt engines (more in tests/service, tests/unit/upstream)


def test_download_bins_while_nothing_is_published(moestream_cli, home):
    done = moestream_cli("download-bins", MOESTREAM_BINS_URL="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: no address of prebuilt engines is known: none have been published yet\n"
        "hint: moestream build makes an engine here; or name a release: --from URL|DIR, or MOESTREAM_BINS_URL=URL\n"
    )
    assert not home.exists()


def test_download_bins_from_a_folder_without_a_release(moestream_cli, home, tmp_path):
    (tmp_path / "empty").mkdir()
    done = moestream_cli("download-bins", "--from", str(tmp_path / "empty"), "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"reading the manifest\nerror: cannot read {tmp_path}/empty/moestream-engines.json: No such file or directory\n"
        "hint: name the folder that moestream pack-bins wrote\n"
    )
    assert not home.exists()


def test_pack_bins_refuses_what_was_built_for_this_processor(moestream_cli, engine, tmp_path):
    done = moestream_cli("pack-bins", "--output", str(tmp_path / "release"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {engine.id} was built for this machine's processor alone and may crash on others: it is not packed\n"
        "hint: moestream build --portable --backend cpu\n"
    )
    assert not (tmp_path / "release").exists()


def test_pack_bins_with_a_driver_that_is_no_version(moestream_cli, engine):
    done = moestream_cli("pack-bins", "--min-driver", "new")
    assert done.stderr == "error: --min-driver new is no version\nhint: for example: --min-driver 580.65.06\n"


def test_verbose_shows_where_an_error_comes_from(moestream_cli):
    done = moestream_cli("build", "--jobs", "0", "--verbose")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("hint: give at least 1, or leave it out\n")
