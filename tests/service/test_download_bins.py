"""``moestream download-bins`` against a web server that behaves, and against ones that do not; real sockets, files, processes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from releases import (
    PADDING,
    ReleaseServer,
    archive_of,
    described,
    files_below,
    listed,
    manifest_of,
    member,
    members_of,
    serving,
    slowly,
    write_release,
)
from service_harness import FAKE, Home
from waiting import until

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import bins, engines
from moestream.upstream.releases import Origin, resolve_origin

ENGINE = described()
WHOLE = {"bin/libx.so", "bin/libx.so.0", "bin/llama-server", "engine.json", "licenses/llama.cpp"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits between two tries, and no proxy stands in between."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(bins.time, "sleep", lambda seconds: None)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine belongs, in a home of the test's own."""
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path / "home"))
    return paths.engines_dir() / ENGINE.id


@pytest.fixture
def site(tmp_path: Path, target: Path) -> Iterator[ReleaseServer]:
    """A release of ENGINE behind a server."""
    write_release(tmp_path / "site")
    with serving(tmp_path / "site") as server:
        yield server


class Recorder(bins.SilentReporter):
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.seen: list[tuple[int, int]] = []
        self.notes: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.seen.append((done_bytes, total_bytes))

    def note(self, text: str) -> None:
        self.notes.append(text)


def install(site: ReleaseServer | Path, **options) -> bins.Installed:
    return bins.install(Origin(site.url, None) if isinstance(site, ReleaseServer) else Origin(None, site), **options)


def archive_size(site: ReleaseServer) -> int:
    (archive,) = site.folder.glob("*.tar.xz")
    return archive.stat().st_size


def parts() -> list[Path]:
    return sorted(paths.downloads_dir().glob("*.part"))


def nothing_left(target: Path) -> bool:
    """Neither an engine, nor half of one, nor a download that nobody can use."""
    return not parts() and (not target.parent.exists() or files_below(target.parent) == set())


def refused(site: ReleaseServer | Path, message: str, **options) -> MoestreamError:
    with pytest.raises(MoestreamError) as caught:
        install(site, **options)
    assert message in caught.value.message
    assert caught.value.hint and caught.value.exit_code == 1
    return caught.value


# ---------------------------------------------------------------- it works


def test_installed_found_and_not_fetched_again(site, target):
    recorder = Recorder()
    outcome = install(site, reporter=recorder)
    assert outcome.installed and outcome.engine.path == target
    assert files_below(target) == WHOLE
    assert (target / "bin" / "libx.so").read_bytes() == PADDING
    assert os.access(target / "bin" / "llama-server", os.X_OK)
    assert engines.in_use() == outcome.engine
    size = archive_size(site)
    assert recorder.seen[-1] == (size, size) and recorder.seen == sorted(recorder.seen)
    assert parts() == []
    assert files_below(target.parent) == {f"{target.name}/{name}" for name in WHOLE}
    assert site.archives_asked() == [None]

    again = install(site)
    assert not again.installed and again.engine == outcome.engine
    assert site.archives_asked() == [None]


def test_a_slow_server(site, target):
    site.before_block = slowly
    assert install(site).installed
    assert site.archives_asked() == [None] and files_below(target) == WHOLE


def test_an_engine_that_lost_a_program_is_replaced(site, target):
    install(site)
    (target / "bin" / "llama-server").unlink()
    (target / "stray").touch()
    assert install(site).installed
    assert files_below(target) == WHOLE


def test_a_release_in_a_folder(tmp_path, target):
    write_release(tmp_path / "release")
    before = files_below(tmp_path / "release")
    assert install(tmp_path / "release").installed
    assert files_below(target) == WHOLE and files_below(tmp_path / "release") == before
    assert not install(tmp_path / "release").installed


def test_a_redirected_download(site, target, tmp_path):
    """As from the release pages that send everyone on to a storage server."""
    (tmp_path / "site" / "v1").mkdir()
    for file in list((tmp_path / "site").glob("moestream-*")):
        file.rename(tmp_path / "site" / "v1" / file.name)
    with serving(tmp_path / "site") as front:
        front.redirect_to = site.url
        assert bins.install(resolve_origin("v1", None, {"MOESTREAM_BINS_URL": front.url})).installed
    assert [path.rpartition("/")[0] for path, _ in site.seen] == ["/v1", "/v1"]


def test_a_native_engine_comes_before_a_downloaded_one(site, target):
    downloaded = install(site).engine
    native = dataclasses.replace(
        ENGINE, id="native", path=target.parent / "native", cpu=engines.cpu_kind(), portable=False, built_at="2025-01-01"
    )
    native.bin_dir.mkdir(parents=True)
    engines.write_description(native, native.path)
    assert [engine.id for engine in engines.installed()] == ["native", downloaded.id]
    assert engines.in_use() == native


# ---------------------------------------------------------------- connections that break off


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no-ranges"])
def test_a_connection_that_breaks_off_is_gone_on_with(site, target, ranges):
    """Without ranges everything is sent again, and what is there already is passed over."""
    site.ranges = ranges
    site.cuts = [20_000, 50_000] if ranges else [20_000, 90_000]
    recorder = Recorder()
    assert install(site, reporter=recorder).installed
    first, *rest = site.archives_asked()
    assert first is None and len(rest) == 2 and all(span for span in rest)
    assert recorder.seen == sorted(recorder.seen)  # never back to the start
    assert files_below(target) == WHOLE and (target / "bin" / "libx.so.0").read_bytes() == PADDING


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no-ranges"])
def test_a_later_run_goes_on(site, target, ranges):
    site.ranges = ranges
    site.cuts = [40_000, 0, 0, 0] if ranges else [40_000, 40_000, 40_000, 40_000]
    error = refused(site, "broke off after ")
    assert f"of {archive_size(site)} bytes" in error.message and "run it again, it goes on from there" in error.hint
    (part,) = parts()
    have = part.stat().st_size
    assert 0 < have <= 40_000 and not target.exists()
    site.seen.clear()
    site.cuts = []
    recorder = Recorder()
    assert install(site, reporter=recorder).installed
    assert site.archives_asked() == [f"bytes={have}-"]
    assert recorder.notes == [f"going on after the {have} bytes that are there already"]
    assert files_below(target) == WHOLE


def test_a_download_that_was_killed_is_gone_on_with(site, target, tmp_path):
    """SIGKILL in the middle of a slow transfer."""
    halfway, go_on = threading.Event(), threading.Event()

    def stop_halfway(sent: int) -> None:
        if sent >= 65_536:
            halfway.set()
            go_on.wait(30)

    site.before_block = stop_halfway
    process = cli_process(tmp_path, "download-bins", "--from", site.url)
    assert halfway.wait(30)
    until(lambda: parts() and parts()[0].stat().st_size > 0, "a part of the download")
    process.kill()
    process.communicate()
    go_on.set()
    assert not target.exists()
    have = parts()[0].stat().st_size
    site.before_block = lambda sent: None
    assert install(site).installed
    assert site.archives_asked()[-1] == f"bytes={have}-"


def test_a_server_that_fails_for_a_moment(site, target):
    site.replies = {".json": [503, 500], ".tar.xz": [502, 503]}
    assert install(site).installed


def test_a_server_that_fails_for_good(site, target):
    site.replies = {".json": [503] * 9}
    refused(site, f"cannot fetch {site.url}/moestream-engines.json: HTTP 503")
    site.replies = {".tar.xz": [500] * 9}
    refused(site, "broke off after 0 of")
    assert nothing_left(target)


@pytest.mark.parametrize(("status", "name"), [(404, "Not Found"), (403, "Forbidden")])
def test_what_is_not_there_is_not_asked_for_again(site, target, status, name):
    site.replies = {".json": [status] * 9}
    error = refused(site, f"cannot fetch {site.url}/moestream-engines.json: HTTP {status} {name}")
    assert "moestream build" in error.hint and len(site.seen) == 1
    site.replies = {".tar.xz": [status] * 9}
    refused(site, f".tar.xz: HTTP {status} {name}")
    assert len(site.archives_asked()) == 1 and nothing_left(target)


def test_nobody_listens(tmp_path, target):
    with serving(tmp_path) as server:
        url = server.url
    with pytest.raises(MoestreamError, match=f"^cannot fetch {url}/moestream-engines.json: ") as caught:
        bins.install(Origin(url, None))
    assert "moestream build" in caught.value.hint


def test_a_server_that_falls_silent(site, target, monkeypatch):
    monkeypatch.setattr(bins, "_TIMEOUT", 0.2)
    go_on = threading.Event()
    site.before_block = lambda sent: go_on.wait(30) if sent >= 32_768 else None
    assert install(site).installed  # each further request brings something
    assert len(site.archives_asked()) > 2
    shutil.rmtree(target)
    site.before_block = lambda sent: go_on.wait(30)
    refused(site, "broke off after 0 of ")
    go_on.set()
    assert not target.exists()


def test_a_range_that_was_not_asked_for_is_not_appended(site, target):
    site.cuts = [40_000, 0, 0, 0]
    refused(site, "broke off after ")
    (part,) = parts()
    before = part.read_bytes()
    site.headers = {"Content-Range": f"bytes 0-9/{archive_size(site)}"}
    error = refused(site, "it answered with another range")
    assert "run it again" in error.hint and part.read_bytes() == before
    site.headers = {}
    assert install(site).installed


# ---------------------------------------------------------------- servers that lie


@pytest.mark.parametrize("length", ["", "same"], ids=["chunk-by-chunk", "with-length"])
@pytest.mark.parametrize("off", [-1000, 1000])
def test_a_file_of_another_size_is_refused(site, target, off, length):
    (archive,) = site.folder.glob("*.tar.xz")
    content = archive.read_bytes()
    archive.write_bytes(content[:off] if off < 0 else content + b"x" * off)
    site.headers = {"Content-Length": length} if not length else {}
    error = refused(site, "instead of" if length else ("it ends before byte" if off < 0 else "more than"))
    assert str(len(content)) in error.message and nothing_left(target)


@pytest.mark.parametrize("from_folder", [False, True], ids=["web", "folder"])
def test_a_file_of_another_content_is_refused(site, target, from_folder):
    (archive,) = site.folder.glob("*.tar.xz")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    error = refused(site.folder if from_folder else site, "is not what the manifest lists: sha256 ")
    assert archive.name in error.message and "moestream build" in error.hint
    assert nothing_left(target) and archive.exists()


def test_a_part_of_another_file_does_not_stay(site, target):
    """What lay there is of the right name and wrong content: refused once, right the next time."""
    digest = json.loads((site.folder / "moestream-engines.json").read_text())["engines"][0]["sha256"]
    paths.downloads_dir().mkdir(parents=True)
    (paths.downloads_dir() / f"{digest}.part").write_bytes(b"rubbish")
    refused(site, "is not what the manifest lists: sha256 ")
    assert install(site).installed


@pytest.mark.parametrize("size_off", [0, 50])
def test_a_part_that_is_too_long_already(site, target, size_off):
    digest = json.loads((site.folder / "moestream-engines.json").read_text())["engines"][0]["sha256"]
    paths.downloads_dir().mkdir(parents=True)
    (paths.downloads_dir() / f"{digest}.part").write_bytes(b"x" * (archive_size(site) + size_off))
    refused(site, "is not what the manifest lists")
    assert parts() == [] and install(site).installed


def test_a_folder_without_the_archive_or_with_another_one(tmp_path, target):
    write_release(tmp_path / "release")
    (archive,) = (tmp_path / "release").glob("*.tar.xz")
    archive.write_bytes(archive.read_bytes() + b"x")
    refused(tmp_path / "release", f"{archive} is not what the manifest lists: ")
    archive.unlink()
    refused(tmp_path / "release", f"cannot read {archive}: No such file or directory")
    (tmp_path / "release" / "moestream-engines.json").unlink()
    error = refused(tmp_path / "release", "moestream-engines.json: No such file or directory")
    assert "pack-bins" in error.hint and nothing_left(target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>Not found</html>", "is not JSON"),
        (json.dumps(manifest_of(schema="moestream/engine-release/2")), "newer than this moestream reads"),
        (json.dumps(manifest_of({})), "engines.0.id: Field required"),
    ],
    ids=["html", "newer", "incomplete"],
)
def test_a_manifest_that_cannot_be_read(site, target, text, message):
    (site.folder / "moestream-engines.json").write_text(text)
    error = refused(site, message)
    assert error.message.startswith(f"{site.url}/moestream-engines.json") and nothing_left(target)


# ---------------------------------------------------------------- archives that hold something else


def with_member(info: tarfile.TarInfo, content: bytes = b"") -> list[tuple[tarfile.TarInfo, bytes]]:
    return [*members_of(ENGINE), (info, content)]


EVIL = {
    "absolute": with_member(*member("/tmp/evil", b"x")),
    "parent": with_member(*member("bin/../../evil", b"x")),
    "parent-of-all": with_member(*member("../evil", b"x")),
    "other-folder": with_member(*member("etc/evil", b"x")),
    "below-bin": with_member(*member("bin/a/evil", b"x")),
    "hidden": with_member(*member("bin/.evil", b"x")),
    "newline": with_member(*member("bin/a\nb", b"x")),
    "symlink-out": with_member(*member("bin/evil", type=tarfile.SYMTYPE, linkname="../../../evil")),
    "symlink-absolute": with_member(*member("bin/evil", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "symlink-for-a-folder": [
        member("bin", type=tarfile.SYMTYPE, linkname="/tmp"), *members_of(ENGINE)[1:],
    ],
    "symlink-elsewhere": with_member(*member("licenses/evil", type=tarfile.SYMTYPE, linkname="llama.cpp")),
    "symlink-to-nothing": with_member(*member("bin/evil", type=tarfile.SYMTYPE, linkname="nowhere")),
    "symlink-to-itself": with_member(*member("bin/evil", type=tarfile.SYMTYPE, linkname="evil")),
    "symlink-then-file": [
        member("bin/evil", type=tarfile.SYMTYPE, linkname="llama-server"), *with_member(*member("bin/evil", b"x")),
    ],
    "hard-link-out": with_member(*member("bin/evil", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "hard-link-inside": with_member(*member("bin/evil", type=tarfile.LNKTYPE, linkname="bin/llama-server")),
    "character-device": with_member(*member("bin/evil", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block-device": with_member(*member("bin/evil", type=tarfile.BLKTYPE, devmajor=8, devminor=0)),
    "fifo": with_member(*member("bin/evil", type=tarfile.FIFOTYPE)),
    "twice": with_member(*member("bin/llama-server", b"x", 0o755)),
    "description-as-a-link": [
        *members_of(ENGINE)[:4], member("engine.json", type=tarfile.SYMTYPE, linkname="bin/llama-server"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("evil", EVIL)
def test_an_evil_member_is_refused_and_nothing_is_written(tmp_path, target, evil):
    write_release(tmp_path / "release", EVIL[evil])
    before = files_below(tmp_path)
    error = refused(tmp_path / "release", ".tar.xz: '")
    assert "do not use this release" in error.hint
    assert nothing_left(target)
    assert {name for name in files_below(tmp_path) - before if "evil" in name} == set()
    assert not Path("/tmp/evil").exists()


def test_an_archive_that_unpacks_to_more_than_it_says(tmp_path, target):
    write_release(tmp_path / "release", [*members_of(ENGINE), member("bin/zeros", bytes(1 << 22))])
    refused(tmp_path / "release", "'bin/zeros' makes it larger than the 1048576 bytes of the manifest")
    assert nothing_left(target)


def test_modes_that_no_file_of_an_engine_has_are_dropped(tmp_path, target):
    members = members_of(ENGINE)
    for info, _ in members:
        if info.isreg():
            info.mode, info.uid, info.gid = info.mode | 0o6022, 12345, 12345
    write_release(tmp_path / "release", members)
    install(tmp_path / "release")
    for file in target.rglob("*"):
        if not file.is_symlink():
            assert file.stat().st_mode & 0o6022 == 0, file
            assert file.stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    "damage",
    [lambda archive: archive[: len(archive) // 2], lambda archive: b"PK\x03\x04" + archive, lambda archive: b"x" * 3000],
    ids=["cut", "zip", "rubbish"],
)
def test_a_damaged_archive_with_the_right_hash(tmp_path, target, damage):
    content = damage(archive_of(members_of(ENGINE)))
    entry = listed(ENGINE, content)
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / entry["file"]).write_bytes(content)
    (tmp_path / "release" / "moestream-engines.json").write_text(json.dumps(manifest_of(entry)))
    refused(tmp_path / "release", ".tar.xz is damaged: ")
    assert nothing_left(target)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"id": "other"}, "id is 'other' instead of"),
        ({"sources_sha256": "0" * 64}, "sources_sha256 is '000"),
        ({"backend": "cuda"}, "backend is 'cuda' instead of 'cpu'"),
        ({"tools": ("llama-server", "llama-cli")}, "tools is"),
        ({"portable": False, "cpu": "x86_64-123456"}, "its engine was built for x86_64-123456"),
    ],
)
def test_an_archive_with_another_engine_than_listed(tmp_path, target, inside, message):
    write_release(tmp_path / "release", members_of(dataclasses.replace(ENGINE, **inside)))
    refused(tmp_path / "release", f".tar.xz is not what the manifest lists: {message}")
    assert nothing_left(target)


@pytest.mark.parametrize("left_out", ["bin/llama-server", "engine.json"])
def test_an_incomplete_archive(tmp_path, target, left_out):
    write_release(tmp_path / "release", [(info, content) for info, content in members_of(ENGINE) if info.name != left_out])
    refused(tmp_path / "release", "is missing in it" if left_out.startswith("bin") else "it holds no engine")
    assert nothing_left(target)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho libx.so.9: cannot open shared object file\nexit 127\n", "exit code 127: libx.so.9: cannot open"),
        ("#!/bin/sh\nkill -ILL $$\n", "ended by signal 4"),
        ("#!/nonexistent/interpreter\n", "No such file or directory"),
        ("\x7fELF of another machine", "Exec format error"),
    ],
)
def test_an_engine_that_does_not_run_here_is_not_installed(tmp_path, target, script, message):
    write_release(tmp_path / "release", members_of(ENGINE, script))
    error = refused(tmp_path / "release", f"does not run on this machine: llama-server --version: {message}")
    assert "moestream build" in error.hint and nothing_left(target)


def test_a_broken_release_leaves_the_engine_that_is_there(tmp_path, target):
    write_release(tmp_path / "good")
    install(tmp_path / "good")
    (target / "bin" / "llama-server").unlink()  # so that it is to be replaced
    before = {name: (target / name).read_bytes() for name in files_below(target)}
    write_release(tmp_path / "bad", members_of(ENGINE, "#!/bin/sh\nexit 1\n"))
    refused(tmp_path / "bad", "does not run on this machine")
    assert {name: (target / name).read_bytes() for name in files_below(target)} == before


# ---------------------------------------------------------------- machines that it does not fit


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "riscv64"}, "it is for linux on riscv64"),
        ({"min_glibc": "2.999"}, "it needs glibc 2.999"),
        ({"cpu_features": ["avx2048"]}, "this processor lacks avx2048"),
        ({"sources_sha256": "0" * 64}, "it belongs to another version of moestream"),
    ],
)
def test_no_engine_fits_this_machine(tmp_path, target, changes, reason):
    write_release(tmp_path / "site", **changes)
    with serving(tmp_path / "site") as site:
        error = refused(site, f"no engine of {site.url} fits this machine:\n  {ENGINE.id}: {reason}")
        assert site.archives_asked() == []
    assert error.hint == "moestream build makes one that does" and nothing_left(target)


# ---------------------------------------------------------------- full disks


def test_a_disk_without_room_for_the_download(tmp_path, target):
    write_release(tmp_path / "site", size_bytes=1 << 60)
    with serving(tmp_path / "site") as site:
        refused(site, "needs about 1099511627776 MiB")
        assert site.archives_asked() == []


def test_a_disk_without_room_for_the_engine(tmp_path, target):
    write_release(tmp_path / "release", installed_bytes=1 << 60)
    refused(tmp_path / "release", "installing the engine needs about 1099511627776 MiB")
    assert nothing_left(target)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_disk_that_fills_up_while_downloading(site, target):
    """The kernel's own error: what is downloaded goes to the device that is always full."""
    digest = json.loads((site.folder / "moestream-engines.json").read_text())["engines"][0]["sha256"]
    paths.downloads_dir().mkdir(parents=True)
    (paths.downloads_dir() / f"{digest}.part").symlink_to("/dev/full")
    error = refused(site, "is full (while downloading)")
    assert "MOESTREAM_HOME" in error.hint and not target.exists()


@pytest.mark.parametrize("in_the_way", ["cache", "data"])
def test_folders_that_cannot_be_made(site, target, tmp_path, in_the_way):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / in_the_way).touch()
    error = refused(site, f"cannot install the engine: {tmp_path / 'home' / in_the_way}")
    assert "MOESTREAM_HOME" in error.hint and not target.exists()


def test_a_disk_that_fills_up_while_unpacking(tmp_path, target, monkeypatch):
    write_release(tmp_path / "release")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile, "copyfileobj", full)
    refused(tmp_path / "release", "is full (while installing the engine)")
    assert nothing_left(target)


# ---------------------------------------------------------------- the command, in processes of its own


def cli_process(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOESTREAM_", "LLAMA_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "moestream.cli", *arguments],
        env={**kept, "MOESTREAM_HOME": str(folder / "home"), "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def test_two_at_once_fetch_it_once(site, target, tmp_path):
    """The second comes in the middle of the first one's transfer, and says that it waits."""
    halfway, go_on = threading.Event(), threading.Event()

    def stop_halfway(sent: int) -> None:
        if sent >= 65_536:
            halfway.set()
            go_on.wait(30)

    site.before_block = stop_halfway
    first = cli_process(tmp_path, "download-bins", "--from", site.url, "--json")
    assert halfway.wait(30)
    second = cli_process(tmp_path, "download-bins", "--from", site.url, "--json")
    told = [line for line in iter(second.stderr.readline, "") if line.startswith("note:") and not go_on.set()]
    answers = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert told == ["note: another download of an engine is running; waiting for it\n"]
    assert [json.loads(stdout)["installed"] for stdout in answers] == [True, False]
    assert len(site.archives_asked()) == 1
    assert files_below(target.parent) == {f"{target.name}/{name}" for name in WHOLE}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl-c"])
def test_an_interrupted_installation_leaves_no_engine(tmp_path, target, how):
    """It is ended when everything is unpacked and the new program is being tried."""
    mark = tmp_path / "mark"
    write_release(tmp_path / "stuck", members_of(ENGINE, f"#!/bin/sh\n: > {mark}\nexec sleep 20\n"))
    process = cli_process(tmp_path, "download-bins", "--from", str(tmp_path / "stuck"))
    until(mark.exists, "the program to be tried")
    process.send_signal(how)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130), stderr
    assert engines.installed() == [] and not target.exists()
    if how is signal.SIGINT:
        assert nothing_left(target)
    write_release(tmp_path / "good")
    assert install(tmp_path / "good").installed
    assert [engine.id for engine in engines.installed()] == [ENGINE.id]
    assert files_below(target.parent) == {f"{target.name}/{name}" for name in WHOLE}  # what was left is gone


def test_what_the_command_prints(site, target, tmp_path):
    process = cli_process(tmp_path, "download-bins", "--from", site.url)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert stdout.splitlines()[0].startswith("installed in ")
    assert stdout.splitlines()[0].endswith(f": {ENGINE.id} (without the web page)")
    assert stdout.splitlines()[1:] == [str(target / "bin")]
    assert [line for line in stderr.splitlines() if "MiB" not in line] == [
        "reading the manifest", f"downloading moestream-{ENGINE.id}.tar.xz", "checking", "unpacking", "starting it once",
    ]  # fmt: skip
    assert f"downloading moestream-{ENGINE.id}.tar.xz: 0 of 0 MiB" in stderr.splitlines()
    stdout, _ = cli_process(tmp_path, "engines").communicate(timeout=60)
    assert stdout == f"* {ENGINE.id}  cpu, built 2026-01-02, 1 programs, without web page\n"
    stdout, _ = cli_process(tmp_path, "download-bins", "--from", site.url, "--json").communicate(timeout=60)
    data = json.loads(stdout)
    assert data.pop("elapsed_s") >= 0
    assert data == {
        "schema": "moestream/download-bins/1", "id": ENGINE.id, "installed": False, "backend": "cpu",
        "bin_dir": str(target / "bin"), "tools": ["llama-server"], "web_ui": False, "in_use": ENGINE.id, "passed_over": [],
    }  # fmt: skip


def test_what_was_passed_over_is_told(tmp_path, target):
    write_release(tmp_path / "release")
    path = tmp_path / "release" / "moestream-engines.json"
    manifest = json.loads(path.read_text())
    manifest["engines"].append(listed(described("cuda"), b"x", min_driver="99999"))
    path.write_text(json.dumps(manifest))
    process = cli_process(tmp_path, "download-bins", "--from", str(tmp_path / "release"), "--json")
    stdout, stderr = process.communicate(timeout=60)
    (passed,) = json.loads(stdout)["passed_over"]
    assert passed["id"] == described("cuda").id and "99999" in passed["reasons"][0]
    assert f"note: passed over {described('cuda').id}: it needs NVIDIA's driver 99999" in stderr


def test_start_serves_with_a_downloaded_engine(home: Home, tmp_path):
    """Found as one that was built; and one that is out of date is noticed."""
    home.server.unlink()
    (home.folder / "data" / "engines" / "fake" / "bin").rmdir()
    (home.folder / "data" / "engines" / "fake").rmdir()
    wrapper = (
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec {sys.executable} -IS "$(dirname "$0")/../licenses/fake.py" "$@"\n'
    )
    members = [*members_of(ENGINE, wrapper), member("licenses/fake.py", FAKE.read_bytes())]
    write_release(tmp_path / "release", members)
    done = home.run("start", "--model", "x.gguf")
    assert done.returncode == 1
    done = home.run("download-bins", "--from", str(tmp_path / "release"))
    assert done.returncode == 0, done.stderr
    done = home.run(*home.start_arguments("--detach", "--json"))
    assert done.returncode == 0, done.stderr
    assert home.record()["engine_id"] == ENGINE.id
    assert home.run("stop", "--port", str(home.port)).returncode == 0

    description = home.folder / "data" / "engines" / ENGINE.id / "engine.json"
    description.write_text(description.read_text().replace(ENGINE.sources_sha256, "0" * 64))
    home.variables["MOESTREAM_BINS_URL"] = "https://example.org"
    done = home.run(*home.start_arguments())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "error: no engine is built that matches this version of moestream and this processor\n"
        "hint: moestream build, or moestream download-bins\n"
    )


def test_the_archive_of_the_tests_is_one(tmp_path):
    """The helper makes what EVIL is measured against."""
    with tarfile.open(fileobj=io.BytesIO(archive_of(members_of(ENGINE)))) as tar:
        assert {info.name for info in tar if not info.isdir()} == WHOLE
