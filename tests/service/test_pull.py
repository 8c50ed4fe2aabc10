"""``moestream pull``, ``list``, ``rm`` and ``start --model NAME``, against a hub on real sockets."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_hub import FakeHub, Repo, fake_hub
from huggingface_hub import constants
from malformed import tiny, write_shards
from service_harness import DEMO, Home
from waiting import free_port, until

from moestream.cli import main
from moestream.errors import MoestreamError
from moestream.models import download
from moestream.models.hub import Hub
from moestream.models.store import ModelFile

MODEL = tiny().write()
NAME = "org/tiny-GGUF:Q4_K_M"
FILE = "tiny-Q4_K_M.gguf"
Cli = Callable[..., "Done"]
CHUNK = 10 << 20  # what huggingface_hub writes at once


@pytest.fixture
def hub(home: Home, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.repos["org/tiny-GGUF"] = Repo({FILE: MODEL, "mmproj-F16.gguf": b"no model", "README.md": b"# tiny"})
        home.variables |= {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }  # fmt: skip
        yield hub


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def apply(home: Home, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make this process see the environment that a command would; what huggingface_hub reads of it once is set by hand."""

    def apply() -> None:
        for name, value in {**home.variables, "MOESTREAM_HOME": str(home.folder)}.items():
            monkeypatch.setenv(name, value)
        endpoint = home.variables["HF_ENDPOINT"]
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(Path(home.variables["HF_HOME"]) / "token"))

    return apply


@pytest.fixture
def cli(apply: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line within this process, which saves half a second a command."""

    def run(*arguments: str) -> Done:
        apply()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def models(home: Home) -> Path:
    return home.folder / "data" / "models"


def files_below(folder: Path) -> list[str]:
    """Every file but locks."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() and p.suffix != ".lock")


def listed(cli: Cli) -> list[dict[str, Any]]:
    done = cli("list", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["models"]


# ---------------------------------------------------------------- pull


def test_pull_list_and_pull_again(cli: Cli, hub: FakeHub, models: Path) -> None:
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 0, done.stderr
    path = models / "org" / "tiny-GGUF" / FILE
    assert path.read_bytes() == MODEL
    assert f"downloading {NAME}" in done.stderr
    assert f"next        moestream start --model {NAME}\n" in done.stdout
    assert str(path) in done.stdout
    assert hub.ranges() == [None]
    assert len(files_below(models)) == 2  # and the record

    (model,) = listed(cli)
    assert model["name"] == NAME and model["state"] == "complete" and model["problem"] is None
    assert (model["quant"], model["shards"], model["size_bytes"], model["present_bytes"]) == (
        "Q4_K_M",
        1,
        len(MODEL),
        len(MODEL),
    )
    assert (model["is_moe"], model["n_expert"], model["n_expert_used"]) == (True, 8, 2)
    assert model["files"] == [
        {
            "path": str(path),
            "size_bytes": len(MODEL),
            "digest": f"sha256:{hashlib.sha256(MODEL).hexdigest()}",
            "made_by_pull": True,
        }
    ]
    text = cli("list").stdout
    assert text.splitlines()[0].split() == ["NAME", "STATE", "SIZE", "SHARDS", "EXPERTS", "USED", "ARCHITECTURE"]
    assert text.splitlines()[1].startswith(f"{NAME}  complete")

    again = cli("pull", "hf:ORG/Tiny-gguf:q4_k_m".replace("ORG/Tiny-gguf", "org/tiny-GGUF"), "--json")
    data = json.loads(again.stdout)
    assert data["schema"] == "moestream/pull/1"
    assert (data["downloaded_bytes"], data["resumed_bytes"], data["path"]) == (0, 0, str(path))
    assert hub.ranges() == [None]


def test_json_of_a_pull(cli: Cli, hub: FakeHub, models: Path) -> None:
    data = json.loads(cli("pull", "hf:org/tiny-GGUF", "--json").stdout)
    assert data.pop("elapsed_s") >= 0
    path = models / "org" / "tiny-GGUF" / FILE
    assert data == {
        "schema": "moestream/pull/1", "name": NAME, "repo": "org/tiny-GGUF", "quant": "Q4_K_M",
        "commit": hub.repos["org/tiny-GGUF"].commit, "state": "complete", "problem": None, "path": str(path),
        "folder": str(path.parent), "shards": 1, "size_bytes": len(MODEL), "present_bytes": len(MODEL), "update_pending": False,
        "files": [{
            "path": str(path), "size_bytes": len(MODEL), "digest": f"sha256:{hashlib.sha256(MODEL).hexdigest()}",
            "made_by_pull": True,
        }],
        "architecture": "qwen3moe", "is_moe": True, "n_expert": 8, "n_expert_used": 2, "downloaded_bytes": len(MODEL),
        "resumed_bytes": 0,
    }  # fmt: skip


def test_a_killed_pull_goes_on_where_it_stopped(home: Home, cli: Cli, hub: FakeHub, models: Path) -> None:
    """Only what is missing is fetched, by another process, and the whole is checked."""
    data = DEMO.read_bytes()
    hub.repos["org/demo"] = Repo({"demo-Q4_0.gguf": data})
    hub.stall_after = CHUNK + (1 << 20)
    process = home.popen("pull", "hf:org/demo:Q4_0")

    def part() -> Path | None:
        found = [p for p in models.rglob("*.incomplete") if p.stat().st_size >= CHUNK]
        return found[0] if found else None

    incomplete = until(part, "the first chunk on disk")
    # what the list says, and what start does, while it is under way
    (model,) = listed(cli)
    assert (model["name"], model["state"], model["present_bytes"]) == ("org/demo:Q4_0", "partial", CHUNK)
    assert model["is_moe"] is None
    busy = cli("pull", "hf:org/demo:Q4_0")
    assert busy.returncode == 1
    assert "error: another moestream is pulling or removing org/demo:Q4_0 right now" in busy.stderr
    assert cli("rm", "--yes", "org/demo:Q4_0").returncode == 1
    process.kill()
    process.wait()
    assert incomplete.stat().st_size == CHUNK

    text = cli("list").stdout
    assert "partial" in text and "10.0 MiB of 37.8 MiB" in text and "go on with: moestream pull hf:org/demo:Q4_0" in text
    started = home.run("start", "--model", "hf:org/demo:Q4_0", "--port", "0")
    assert (started.returncode, started.stderr) == (
        1, "error: --model hf:org/demo:Q4_0: it is not all downloaded\nhint: moestream pull hf:org/demo:Q4_0\n",
    )  # fmt: skip

    hub.stall_after = None
    hub.released.set()
    done = cli("pull", "hf:org/demo:Q4_0", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.ranges() == [None, f"bytes={CHUNK}-"]
    result = json.loads(done.stdout)
    assert (result["downloaded_bytes"], result["resumed_bytes"]) == (len(data) - CHUNK, CHUNK)
    assert Path(result["path"]).read_bytes() == data
    assert not list(models.rglob("*.incomplete")) and not list(models.rglob("*.pending.json"))


def test_ctrl_c_says_that_what_came_stays(home: Home, hub: FakeHub, models: Path) -> None:
    hub.repos["org/demo"] = Repo({"demo-Q4_0.gguf": DEMO.read_bytes()})
    hub.stall_after = CHUNK
    process = home.popen("pull", "hf:org/demo")
    until(lambda: any(p.stat().st_size for p in models.rglob("*.incomplete")), "the first chunk on disk")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.endswith("interrupted; what came so far stays, and the same command goes on from there\n")
    assert [p.stat().st_size for p in models.rglob("*.incomplete")] == [CHUNK]


def test_a_lost_connection_is_taken_up_again(home: Home, hub: FakeHub) -> None:
    data = DEMO.read_bytes()
    hub.repos["org/demo"] = Repo({"demo-Q4_0.gguf": data})
    hub.cuts = [CHUNK + 5]
    done = home.run("pull", "hf:org/demo", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.ranges() == [None, f"bytes={CHUNK}-"]
    assert Path(json.loads(done.stdout)["path"]).read_bytes() == data


def test_a_server_that_ignores_range_begins_anew_and_nothing_is_appended(home: Home, hub: FakeHub) -> None:
    data = DEMO.read_bytes()
    hub.repos["org/demo"] = Repo({"demo-Q4_0.gguf": data})
    hub.cuts, hub.no_range = [CHUNK + 5], True
    done = home.run("pull", "hf:org/demo", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.ranges() == [None, f"bytes={CHUNK}-"]
    assert Path(json.loads(done.stdout)["path"]).read_bytes() == data


def test_a_part_that_is_too_long_is_thrown_away(cli: Cli, hub: FakeHub, models: Path) -> None:
    part = models / "org" / "tiny-GGUF" / f"{FILE}.{hashlib.sha256(MODEL).hexdigest()[:16]}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(MODEL + b"x")
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    assert (part.parent / FILE).read_bytes() == MODEL and not part.exists()


def test_wrong_content_is_refused_and_leaves_nothing(cli: Cli, hub: FakeHub, models: Path) -> None:
    hub.repos["org/tiny-GGUF"].sha256[FILE] = "ab" * 32
    done = cli("pull", "hf:org/tiny-GGUF")
    assert (done.returncode, done.stdout) == (1, "")
    actual = hashlib.sha256(MODEL).hexdigest()
    assert f"error: {FILE} is not what the hub says: sha256 is {actual}, expected {'ab' * 32}\nhint: " in done.stderr
    assert not (models / "org" / "tiny-GGUF" / FILE).exists()
    assert not list(models.rglob("*.incomplete"))
    (model,) = listed(cli)
    assert (model["state"], model["present_bytes"]) == ("partial", 0)


def test_a_damaged_part_is_found_and_thrown_away(cli: Cli, hub: FakeHub, models: Path) -> None:
    """Bytes of an earlier pull are checked as well, not only those that come now."""
    part = models / "org" / "tiny-GGUF" / f"{FILE}.{hashlib.sha256(MODEL).hexdigest()[:16]}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"not what it was"[:10])
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1 and "is not what the hub says: sha256 is" in done.stderr
    assert hub.ranges() == ["bytes=10-"] and not part.exists()
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0


def test_a_file_in_git_is_checked_too(cli: Cli, hub: FakeHub) -> None:
    repo = hub.repos["org/tiny-GGUF"]
    repo.in_git = {FILE}
    done = cli("pull", "hf:org/tiny-GGUF", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"][0]["digest"].startswith("git-sha1:")


# ---------------------------------------------------------------- what the hub refuses


def test_a_gated_repository(home: Home, cli: Cli, hub: FakeHub) -> None:
    """Its files can be listed by everybody; the token goes to the hub, and to nobody else."""
    hub.repos["org/tiny-GGUF"].access = "gated"
    hint = f"hint: ask for access at {hub.url}/org/tiny-GGUF, then set HF_TOKEN or run: hf auth login\n"
    for token in ("", "hf_of_somebody_else"):
        home.variables["HF_TOKEN"] = token
        done = cli("pull", "hf:org/tiny-GGUF")
        assert done.returncode == 1
        assert f"error: org/tiny-GGUF is gated: who downloads it must have been given access\n{hint}" in done.stderr
    home.variables["HF_TOKEN"] = hub.token
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    assert [r.authorization for r in hub.requests if r.server == "hub"][-2:] == [f"Bearer {hub.token}"] * 2
    assert [r.authorization for r in hub.requests if r.server == "storage"] == [None]


def test_a_private_repository_with_the_token_of_a_login(home: Home, hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny-GGUF"].access = "private"
    done = home.run("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: there is no repository org/tiny-GGUF at {hub.url}, or it is private\nhint: check the name;" in done.stderr
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text(hub.token)
    assert home.run("pull", "hf:org/tiny-GGUF").returncode == 0


def test_a_missing_repository(cli: Cli, hub: FakeHub, models: Path) -> None:
    done = cli("pull", "hf:org/nothing")
    assert done.returncode == 1
    assert f"error: there is no repository org/nothing at {hub.url}, or it is private\n" in done.stderr
    assert not models.exists()


def test_a_file_that_is_listed_and_not_there(cli: Cli, hub: FakeHub) -> None:
    hub.repos["org/tiny-GGUF"].gone = {FILE}
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: org/tiny-GGUF/{FILE} is listed at {hub.url}, and is not there\nhint: " in done.stderr


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (401, "Invalid credentials in Authorization header", "check HF_TOKEN, or run: hf auth login"),
        (403, "Forbidden", "check HF_TOKEN, or run: hf auth login"),
        (503, "Overloaded", "try again later"),
    ],
)
def test_a_hub_that_refuses(cli: Cli, hub: FakeHub, code: int, said: str, hint: str) -> None:
    hub.refuses = (code, said)
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: {hub.url} refuses org/tiny-GGUF: HTTP {code}, {said}\nhint: {hint}\n" in done.stderr


def test_no_hub_there(home: Home, hub: FakeHub) -> None:
    home.variables["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
    done = home.run("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: cannot download org/tiny-GGUF from {home.variables['HF_ENDPOINT']}: " in done.stderr
    assert "hint: check the connection" in done.stderr and "internal error" not in done.stderr


@pytest.mark.parametrize("endpoint", ["nowhere", "ftp://host", "http://", "http://host:port"])
def test_an_endpoint_that_is_no_address(home: Home, cli: Cli, hub: FakeHub, endpoint: str) -> None:
    home.variables["HF_ENDPOINT"] = endpoint
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert "not the address of a hub\nhint: unset it" in done.stderr


def test_a_page_instead_of_an_answer(cli: Cli, hub: FakeHub) -> None:
    hub.html = True
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: {hub.url} does not answer for org/tiny-GGUF as a hub does: " in done.stderr


def test_offline(home: Home, hub: FakeHub) -> None:
    home.variables["HF_HUB_OFFLINE"] = "1"
    done = home.run("pull", "hf:org/tiny-GGUF")
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        1, ["error: HF_HUB_OFFLINE is set: nothing can be downloaded", "hint: unset it"],
    )  # fmt: skip


def test_a_mirror_that_tells_no_digests(cli: Cli, hub: FakeHub, models: Path) -> None:
    hub.repos["org/tiny-GGUF"].no_digest = True
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: {hub.url} does not say size and sha256 of org/tiny-GGUF/{FILE}" in done.stderr
    assert hub.ranges() == []


# ---------------------------------------------------------------- which file


def test_quants(cli: Cli, hub: FakeHub) -> None:
    names = ["a-Q8_0.gguf", "a-UD-Q4_K_XL.gguf", "a-BF16.gguf", "mmproj-Q2_K.gguf", "imatrix.gguf"]
    hub.repos["org/a"] = Repo(dict.fromkeys(names, MODEL))
    done = cli("pull", "hf:org/a", "--json")  # by preference
    assert json.loads(done.stdout)["quant"] == "UD-Q4_K_XL", done.stderr
    assert json.loads(cli("pull", "hf:org/a:bf16", "--json").stdout)["name"] == "org/a:BF16"
    done = cli("pull", "hf:org/a:Q2_K")
    size = f"{len(MODEL) / 1024:.1f} KiB"
    assert done.returncode == 1
    assert (
        f"error: org/a has no model 'Q2_K'; it has BF16 ({size}), Q8_0 ({size}), UD-Q4_K_XL ({size})\n"
        "hint: name one of them: moestream pull hf:org/a:BF16\n"
    ) in done.stderr
    assert [m["name"] for m in listed(cli)] == ["org/a:BF16", "org/a:UD-Q4_K_XL"]


def shards(folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    return {f"UD-Q4_K_XL/{p.name}": p.read_bytes() for p in write_shards(folder, "big-UD-Q4_K_XL", 3)}


def test_a_split_model(cli: Cli, hub: FakeHub, tmp_path: Path, models: Path) -> None:
    files = shards(tmp_path / "shards")
    hub.repos["org/big"] = Repo(files)
    done = cli("pull", "hf:org/big:Q4_K_XL", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["name"], data["shards"], data["n_expert"]) == ("org/big:UD-Q4_K_XL", 3, 8)
    assert {f["path"]: Path(f["path"]).read_bytes() for f in data["files"]} == {
        str(models / "org" / "big" / path): content for path, content in files.items()
    }
    # one of them is lost: it is said which, and it alone is fetched
    lost = models / "org" / "big" / sorted(files)[1]
    lost.unlink()
    (model,) = listed(cli)
    assert (model["state"], model["problem"]) == ("damaged", f"{lost} is missing")
    started = cli("start", "--model", "org/big:UD-Q4_K_XL", "--port", "0")
    assert started.returncode == 1
    assert started.stderr == (
        f"error: --model org/big:UD-Q4_K_XL: {lost} is missing\nhint: moestream pull hf:org/big:UD-Q4_K_XL\n"
    )
    n_before = len(hub.ranges())
    assert cli("pull", "hf:org/big").returncode == 0
    assert len(hub.ranges()) == n_before + 1 and lost.exists()
    assert listed(cli)[0]["state"] == "complete"


def test_a_split_model_that_lacks_a_shard(cli: Cli, hub: FakeHub, tmp_path: Path, models: Path) -> None:
    files = shards(tmp_path / "shards")
    lost = sorted(files)[2]
    del files[lost]
    hub.repos["org/big"] = Repo(files)
    done = cli("pull", "hf:org/big")
    assert done.returncode == 1
    assert f"error: org/big lacks shard {lost} of the 3 of UD-Q4_K_XL\nhint: " in done.stderr
    assert not models.exists() and hub.ranges() == []


def test_a_shard_that_fails_leaves_no_half_model(cli: Cli, hub: FakeHub, tmp_path: Path, models: Path) -> None:
    files = shards(tmp_path / "shards")
    repo = hub.repos["org/big"] = Repo(files, gone={sorted(files)[2]})
    assert cli("pull", "hf:org/big").returncode == 1
    assert list(models.rglob("*.gguf")) == []
    repo.gone = set()
    n_before = len(hub.ranges())
    assert cli("pull", "hf:org/big").returncode == 0
    assert len(hub.ranges()) == n_before + 1
    assert len(list(models.rglob("*.gguf"))) == 3


@pytest.mark.parametrize(
    "path", ["../../escape-Q4_0.gguf", "/tmp/escape-Q4_0.gguf", "a/../../../escape-Q4_0.gguf", "a\\..\\escape-Q4_0.gguf"]
)
def test_names_that_lead_out_of_the_folder(cli: Cli, hub: FakeHub, path: str, models: Path, tmp_path: Path) -> None:
    hub.repos["org/evil"] = Repo({path: MODEL})
    for more in ([], ["--to", str(tmp_path / "a" / "b")]):
        done = cli("pull", "hf:org/evil", *more)
        assert done.returncode == 1
        assert f"error: the repository names a file '{path}', which may lie outside of the folder for it\n" in done.stderr
    assert hub.ranges() == [] and not models.exists() and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "name", ["hf:../x", "hf:org/..", "hf:org", "hf:/etc/passwd", "hf:org/a/b", "hf:org/a:", "hf:or g/a", "hf:"]
)
def test_references_that_are_none(cli: Cli, hub: FakeHub, name: str) -> None:
    done = cli("pull", name)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {name}: not a model on a hub\nhint: write hf:OWNER/REPO")
    assert hub.requests == []


# ---------------------------------------------------------------- the disk


def test_a_disk_that_is_too_small(cli: Cli, hub: FakeHub, models: Path) -> None:
    """No disk holds an exbibyte: the check is the real one."""
    hub.repos["org/tiny-GGUF"].size[FILE] = 1 << 60
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1
    assert f"error: downloading {NAME} needs about {(1 << 40) + 64} MiB at {models / 'org' / 'tiny-GGUF'}, and " in done.stderr
    assert "hint: free some space, or pull to another disk: --to DIR\n" in done.stderr
    assert hub.ranges() == [] and files_below(models) == []


def test_a_file_that_cannot_grow_any_more(home: Home, cli: Cli, hub: FakeHub, models: Path) -> None:
    """What could be written stays."""
    hub.repos["org/demo"] = Repo({"demo-Q4_0.gguf": DEMO.read_bytes()})
    limit = CHUNK + (1 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "moestream.cli", "pull", "hf:org/demo"], env=home.environment(), capture_output=True, text=True,
        timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: cannot write " in done.stderr and "File too large" in done.stderr
    assert [p.stat().st_size >= CHUNK for p in models.rglob("*.incomplete")] == [True]
    assert cli("pull", "hf:org/demo").returncode == 0


@pytest.mark.skipif(os.geteuid() == 0 and sys.platform != "linux", reason="root writes everywhere")
def test_a_folder_that_cannot_be_made(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = cli("pull", "hf:org/tiny-GGUF", "--to", str(tmp_path / "file"))
    assert done.returncode == 1 and f"error: --to {tmp_path / 'file'}: it is no folder\n" in done.stderr
    done = cli("pull", "hf:org/tiny-GGUF", "--to", str(tmp_path / "file" / "below"))
    assert done.returncode == 1 and "error: cannot write " in done.stderr and "Not a directory" in done.stderr


def test_a_file_in_the_way_is_not_touched(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    to.mkdir()
    (to / FILE).write_bytes(b"mine")
    done = cli("pull", "hf:org/tiny-GGUF", "--to", str(to))
    assert done.returncode == 1
    assert f"error: {to / FILE} is there, and is not the file of {NAME}\n" in done.stderr
    assert (to / FILE).read_bytes() == b"mine" and hub.ranges() == []


def test_the_same_file_in_the_way_is_taken_and_never_removed(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    to.mkdir()
    (to / FILE).write_bytes(MODEL)
    assert cli("pull", "hf:org/tiny-GGUF", "--to", str(to)).returncode == 0
    assert hub.ranges() == []
    data = json.loads(cli("rm", "--yes", NAME, "--json").stdout)
    assert data == {"schema": "moestream/rm/1", "name": NAME, "removed": [], "kept": [str(to / FILE)], "freed_bytes": 0}
    assert (to / FILE).read_bytes() == MODEL and listed(cli) == []


def test_a_newer_version(cli: Cli, hub: FakeHub, models: Path) -> None:
    """The old one stays whole until the new one is."""
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    newer = MODEL + b"\0" * 32
    repo = hub.repos["org/tiny-GGUF"] = Repo({FILE: newer}, commit="f" * 40, gone={FILE})
    path = models / "org" / "tiny-GGUF" / FILE
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 1
    (model,) = listed(cli)
    assert (model["state"], model["update_pending"], path.read_bytes() == MODEL) == ("complete", True, True)
    repo.gone = set()
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    (model,) = listed(cli)
    assert (model["commit"], model["update_pending"], path.read_bytes() == newer) == ("f" * 40, False, True)
    assert len(files_below(models)) == 2


def test_a_newer_version_while_the_older_one_comes(cli: Cli, hub: FakeHub, models: Path) -> None:
    """Their bytes never mix, and what came of the older one is thrown away."""
    repo = hub.repos["org/tiny-GGUF"]
    repo.gone = {FILE}
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 1
    (part,) = models.rglob("*.incomplete")
    part.write_bytes(MODEL[:100])
    hub.repos["org/tiny-GGUF"] = Repo({FILE: MODEL + b"\0" * 32}, commit="f" * 40)
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    assert hub.ranges() == [None]
    assert not list(models.rglob("*.incomplete")) and len(files_below(models)) == 2


def test_a_newer_version_with_fewer_files(cli: Cli, hub: FakeHub, models: Path, tmp_path: Path) -> None:
    hub.repos["org/big"] = Repo(shards(tmp_path / "shards"))
    assert cli("pull", "hf:org/big").returncode == 0
    hub.repos["org/big"] = Repo({"big-UD-Q4_K_XL.gguf": MODEL}, commit="f" * 40)
    assert cli("pull", "hf:org/big").returncode == 0
    assert [p.name for p in models.rglob("*.gguf")] == ["big-UD-Q4_K_XL.gguf"]
    assert [(m["state"], m["shards"]) for m in listed(cli)] == [("complete", 1)]


def test_a_pull_that_died_before_its_last_step(cli: Cli, hub: FakeHub, models: Path) -> None:
    """The file has its name already, the record does not say so yet: it is checked and taken, and is pull's own."""
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    (record,) = models.rglob("*.json")
    record.rename(record.with_suffix(".pending.json"))
    assert listed(cli)[0]["state"] == "partial"
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    assert hub.ranges() == [None] and listed(cli)[0]["state"] == "complete"
    assert json.loads(cli("rm", "--yes", NAME, "--json").stdout)["freed_bytes"] == len(MODEL)


@pytest.mark.parametrize("token", ["hf_sesame\0", "hf_sesameü"])
def test_a_token_that_no_request_can_carry(cli: Cli, hub: FakeHub, token: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text(token, encoding="utf-8")
    done = cli("pull", "hf:org/tiny-GGUF")
    assert done.returncode == 1 and "sesame" not in done.stderr
    assert "error: the token for the hub has characters that no request can carry\nhint: check HF_TOKEN" in done.stderr


def test_pieces_of_a_file_that_is_too_large_for_one_answer(
    apply: Callable[[], None], hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for files beyond 32 GiB, with pieces of a size that a test can have; a server that sends all at once is refused."""
    monkeypatch.setattr(download, "PIECE_BYTES", 100_000)
    apply()
    repo = hub.repos["org/tiny-GGUF"]
    file = ModelFile(FILE, len(MODEL), f"sha256:{hashlib.sha256(MODEL).hexdigest()}")
    part = tmp_path / "part"
    part.write_bytes(MODEL[:300])
    download.fetch(Hub(), "org/tiny-GGUF", repo.commit, file, part, lambda n: None)
    assert part.read_bytes() == MODEL
    edges = [*range(300, len(MODEL), 100_000), len(MODEL)]
    assert hub.ranges() == [f"bytes={a}-{b - 1}" for a, b in itertools.pairwise(edges)]
    part.write_bytes(MODEL[:300])
    hub.no_range = True
    with pytest.raises(MoestreamError, match="the hub sends more of"):
        download.fetch(Hub(), "org/tiny-GGUF", repo.commit, file, part, lambda n: None)
    assert part.read_bytes() == MODEL[:300]


# ---------------------------------------------------------------- start and rm


def test_start_by_name_and_rm_of_what_is_in_use(home: Home, cli: Cli, hub: FakeHub, models: Path) -> None:
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    path = models / "org" / "tiny-GGUF" / FILE
    for given in ("hf:org/tiny-GGUF:Q4_K_M", "hf:org/tiny-GGUF", NAME, "org/tiny-GGUF"):
        done = home.run("start", "--model", given, "--slots", "4", "--port", str(home.port), "--detach", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model"] == str(path)
        if given != "org/tiny-GGUF":
            assert home.run("stop").returncode == 0
    refused = cli("rm", "--yes", NAME)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"error: {NAME} is in use by the server on port {home.port}: not removed\n"
        f"hint: stop it first: moestream stop --port {home.port}\n",
    )
    # nor is it replaced under the server
    hub.repos["org/tiny-GGUF"] = Repo({FILE: MODEL + b"\0" * 32})
    refused = cli("pull", "hf:org/tiny-GGUF")
    assert refused.returncode == 1 and "not replaced by a newer version" in refused.stderr
    assert path.read_bytes() == MODEL
    assert home.run("stop").returncode == 0
    done = cli("rm", "--yes", NAME)
    assert (done.returncode, done.stdout) == (0, f"removed {NAME}: {len(MODEL) / 1024:.1f} KiB freed\n")
    assert files_below(models) == [] and not (models / "org").exists()
    assert cli("list").stdout == "no model was pulled (moestream pull hf:OWNER/REPO)\n"


def test_start_with_what_is_not_pulled(cli: Cli, hub: FakeHub) -> None:
    for given in ("hf:org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q8_0"):
        done = cli("start", "--model", given)
        assert (done.returncode, done.stderr) == (
            1,
            f"error: --model {given}: not pulled\nhint: moestream pull hf:org/tiny-GGUF:Q8_0; moestream list shows what is there\n",
        )
    assert cli("start", "--model", "nowhere/model.gguf").stderr.startswith("error: no such model file: nowhere/model.gguf\n")
    assert hub.requests == []


def test_rm_asks(home: Home, cli: Cli, hub: FakeHub, models: Path) -> None:
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 0
    path = models / "org" / "tiny-GGUF" / FILE
    done = cli("rm", NAME)  # without a terminal
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {NAME} is not removed without being asked about, and there is no terminal to ask on\nhint: moestream rm --yes {NAME}\n",
    )
    for answer, code in ((b"n\n", 1), (b"\n", 1), (b"y\n", 0)):
        assert path.exists()
        terminal, end = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "moestream.cli", "rm", NAME], env=home.environment(), stdin=end, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        home.started.append(process)
        os.close(end)
        os.write(terminal, answer)
        stdout, stderr = process.communicate(timeout=60)
        os.close(terminal)
        assert process.returncode == code, stderr
        assert f"  {path}\n" in stderr and "remove 1 file, " in stderr
        assert ("freed" in stdout) == (code == 0)
    assert not path.exists()


def test_rm_leaves_what_it_did_not_make(cli: Cli, hub: FakeHub, tmp_path: Path) -> None:
    to = tmp_path / "mine"
    hub.repos["org/big"] = Repo(shards(tmp_path / "shards"))
    assert cli("pull", "hf:org/big", "--to", str(to)).returncode == 0
    (to / "UD-Q4_K_XL" / "notes.txt").write_text("mine")
    changed = sorted((to / "UD-Q4_K_XL").glob("*.gguf"))[0]
    changed.write_bytes(b"mine now")
    done = cli("rm", "--yes", "org/big:UD-Q4_K_XL")
    assert done.returncode == 0
    assert f"left: {changed}, which pull did not make, or which has changed since\n" in done.stdout
    assert files_below(to) == [f"UD-Q4_K_XL/{changed.name}", "UD-Q4_K_XL/notes.txt"]
    assert to.is_dir() and listed(cli) == []


def test_rm_of_what_was_begun(cli: Cli, hub: FakeHub, models: Path) -> None:
    hub.repos["org/tiny-GGUF"].gone = {FILE}
    assert cli("pull", "hf:org/tiny-GGUF").returncode == 1
    (part,) = models.rglob("*.incomplete")
    part.write_bytes(MODEL[:100])
    done = cli("rm", "--yes", "hf:org/tiny-GGUF")
    assert (done.returncode, done.stdout) == (0, f"removed {NAME}: 100 B freed\n")
    assert files_below(models) == []


def test_rm_of_what_is_not_there(cli: Cli, hub: FakeHub) -> None:
    done = cli("rm", "--yes", "org/nothing:Q4_0")
    assert (done.returncode, done.stderr) == (
        1,
        "error: org/nothing:Q4_0: not pulled\nhint: moestream list shows what is there\n",
    )


def test_a_damaged_record_is_shown(cli: Cli, models: Path) -> None:
    record = models / ".pulled" / "x.json"
    record.parent.mkdir(parents=True)
    record.write_text(
        '{"schema": "moestream/pulled-model/1", "files": [{"path": "../../x", "size_bytes": 1, "digest": "sha256:ab"}]'
    )
    text = cli("list").stdout
    assert text.splitlines()[0] == "no model was pulled (moestream pull hf:OWNER/REPO)"
    assert f"unreadable record {record} (" in text
