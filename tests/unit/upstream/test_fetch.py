from __future__ import annotations

import errno
import shutil
import sys
import tarfile

import pytest

from moestream.errors import MoestreamError
from moestream.upstream import disk, fetch
from moestream.upstream.fetch import Source, fetch_pinned, resolve_source, unpack

from .conftest import FILES, PREFIX, write_archive

# ------------------------------------------------------------------- pip


@pytest.fixture
def pip(tmp_path, monkeypatch, write_program):
    """Stands in for ``python -m pip``: runs a script that sees the download folder as $folder."""

    def use(script: str) -> None:
        header = 'echo "$@" >> ' + str(tmp_path / "calls") + '\nfor a; do [ "$p" = -d ] && folder=$a; p=$a; done\n'
        monkeypatch.setattr(sys, "executable", str(write_program("python", header + script)))

    return use


def test_the_pinned_archive_is_fetched_once(tmp_path, archive, pin, pip):
    pip(f"cp {archive} $folder/llama_cpp_python-9.9.9.tar.gz")
    first = fetch_pinned(pin, tmp_path / "downloads")
    second = fetch_pinned(pin, tmp_path / "downloads")
    assert first == second and first.read_bytes() == archive.read_bytes()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert "-m pip download --no-deps --no-binary llama-cpp-python" in calls[0]
    assert [file.name for file in (tmp_path / "downloads").iterdir()] == [first.name]


def test_pip_gets_the_digest(tmp_path, archive, pin, pip):
    pip(f"cat $folder/requirement.txt > {tmp_path}/requirement; cp {archive} $folder/x.tar.gz")
    fetch_pinned(pin, tmp_path / "downloads")
    assert (tmp_path / "requirement").read_text() == f"llama-cpp-python==9.9.9 --hash=sha256:{pin.sha256}\n"


def test_a_cached_archive_that_went_bad_is_fetched_again(tmp_path, archive, pin, pip):
    pip(f"cp {archive} $folder/x.tar.gz")
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "llama-cpp-python-9.9.9.tar.gz").write_text("cut short")
    assert fetch_pinned(pin, tmp_path / "downloads").read_bytes() == archive.read_bytes()


def test_a_wrong_archive_is_not_kept(tmp_path, pin, pip):
    pip("echo other > $folder/x.tar.gz")
    with pytest.raises(MoestreamError) as caught:
        fetch_pinned(pin, tmp_path / "downloads")
    assert pin.sha256 in caught.value.message and "sha256 is" in caught.value.message
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\\n     Got        0123abcd", "sha256 is 0123abcd, expected", "mirror"),
        ("WARNING: Retrying (Retry(total=1)\\nERROR: No matching distribution", "no connection to pip", "--source FILE"),
        ("ERROR: No matching distribution found", "No matching distribution found", "pip config list"),
        ("ERROR: [Errno 28] No space left on device", "is full (while downloading)", "MOESTREAM_HOME"),
        ("python: No module named pip", "has no pip", "-m ensurepip"),
    ],
)
def test_what_pip_says_becomes_a_plain_error(tmp_path, pin, pip, output, message, hint):
    pip(f"printf '{output}\\n' >&2; exit 1")
    with pytest.raises(MoestreamError) as caught:
        fetch_pinned(pin, tmp_path / "downloads")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_too_little_space_is_said_before_the_download(tmp_path, pin, pip, monkeypatch):
    pip("exit 1")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1 << 20))
    with pytest.raises(MoestreamError, match=r"needs about 80 MiB at .*, and 1 MiB are free"):
        fetch_pinned(pin, tmp_path / "downloads")
    assert not (tmp_path / "calls").exists()


# ---------------------------------------------------------------- --source


def test_without_source_it_is_the_pin(tmp_path, pin):
    assert resolve_source(None, pin, tmp_path).pinned


def test_the_pinned_archive_by_hand_counts_as_the_pin(tmp_path, archive, pin):
    assert resolve_source(archive, pin, tmp_path) == Source(archive, "9.9.9", pinned=True)


def test_another_archive_is_named_by_its_content(tmp_path, make_archive, pin):
    other = make_archive("other.tar.gz", {"src/llama.cpp": "else\n"})
    source = resolve_source(other, pin, tmp_path)
    assert not source.pinned and source.label == f"src.{fetch.sha256_of(other)[:10]}"


def test_a_folder_is_named_by_its_content(tmp_path, pin):
    folder = tmp_path / "checkout"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    first = resolve_source(folder, pin, tmp_path).label
    (folder / "build").mkdir()
    (folder / "build" / "x.o").write_text("object")
    assert resolve_source(folder, pin, tmp_path).label == first
    (folder / "src" / "llama.cpp").write_text("changed\n")
    assert resolve_source(folder, pin, tmp_path).label != first


def test_a_folder_or_archive_without_llama_cpp(tmp_path, pin):
    with pytest.raises(MoestreamError, match=r"no llama\.cpp in it"):
        resolve_source(tmp_path, pin, tmp_path)
    empty = write_archive(tmp_path / "empty.tar.gz", {"readme": "hello"})
    with pytest.raises(MoestreamError, match=r"no llama\.cpp in it"):
        resolve_source(empty, pin, tmp_path)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(MoestreamError, match="is not a readable tar archive"):
        resolve_source(tmp_path / "text", pin, tmp_path)
    with pytest.raises(MoestreamError, match="no such file or folder"):
        resolve_source(tmp_path / "missing", pin, tmp_path)


# ---------------------------------------------------------------- unpacking


def test_only_llama_cpp_is_unpacked_and_not_its_git_file(tmp_path, archive):
    unpack(Source(archive, "x", False), tmp_path / "tree")
    found = {file.relative_to(tmp_path / "tree").as_posix() for file in (tmp_path / "tree").rglob("*") if file.is_file()}
    assert found == set(FILES) - {".git"}
    assert (tmp_path / "tree/src/llama.cpp").read_text() == FILES["src/llama.cpp"]


def test_an_archive_of_llama_cpp_alone(tmp_path):
    archive = write_archive(tmp_path / "a.tar.gz", {"llama.cpp-b1/" + name: text for name, text in FILES.items()})
    unpack(Source(archive, "x", False), tmp_path / "tree")
    assert (tmp_path / "tree/include/llama.h").is_file()


def _member(name: str, **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(PREFIX + name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    "member",
    [
        _member("../../../escaped", size=1),
        _member("src/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        _member("src/hard", type=tarfile.LNKTYPE, linkname=PREFIX + "src/llama.cpp"),
        _member("/etc/absolute", size=1),
    ],
)
def test_an_unsafe_archive_is_refused(tmp_path, make_archive, member):
    archive = make_archive(extra=[member])
    with pytest.raises(MoestreamError, match="is not a plain file inside"):
        unpack(Source(archive, "x", False), tmp_path / "deep" / "er" / "tree")
    assert not list(tmp_path.rglob("escaped"))


def test_a_damaged_archive(tmp_path, archive):
    source = Source(archive, "x", False)
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(MoestreamError, match="is damaged"):
        unpack(source, tmp_path / "tree")


def test_a_disk_that_fills_up_while_unpacking(tmp_path, archive, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(MoestreamError, match=r"is full \(while unpacking llama.cpp\)"):
        unpack(Source(archive, "x", False), tmp_path / "tree")


def test_other_os_errors_are_not_called_a_full_disk(tmp_path):
    with pytest.raises(PermissionError), disk.full_disk_reported(tmp_path, "testing"):
        raise PermissionError(errno.EACCES, "denied")
