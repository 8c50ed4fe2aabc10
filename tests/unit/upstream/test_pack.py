"""Packing, with an engine of tiny programs that the system's compiler makes; what packing reads of them is real."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from releases import described, files_below

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import bins, engines, pack
from moestream.upstream.build import PRODUCT_TARGETS
from moestream.upstream.engines import Engine
from moestream.upstream.manifest import Manifest, parse, render
from moestream.upstream.pin import load_pin
from moestream.upstream.releases import Origin

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="packing is for Linux")
BASE = {"x86_64": "x64", "aarch64": "armv8.0_1"}[platform.machine()]


def compile_elf(target: Path, source: str, *arguments: str) -> Path:
    language = "c++" if "#include <string>" in source else "c"
    compiler = "g++" if language == "c++" else "gcc"
    command = [compiler, "-x", language, "-", "-x", "none", "-o", target, "-Wl,--disable-new-dtags", *arguments]
    subprocess.run(command, input=source, text=True, check=True)
    return target


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, a library of C++ that it needs, and two modules."""
    folder = tmp_path_factory.mktemp("binaries")
    library = '#include <string>\nint x() { return std::string("a").append("b").find("b"); }\n'
    compile_elf(folder / "libx.so.0.1", library, "-shared", "-fPIC", "-Wl,-soname,libx.so.0", "-Wl,-rpath,$ORIGIN")
    (folder / "libx.so.0").symlink_to("libx.so.0.1")
    (folder / "libx.so").symlink_to("libx.so.0")
    main = "int _Z1xv(void); int main(void) { return _Z1xv() - 1; }\n"
    compile_elf(folder / "program", main, f"-L{folder}", "-lx", "-Wl,-rpath,$ORIGIN", f"-Wl,-rpath-link,{folder}")
    for variant in (BASE, "fast"):
        compile_elf(folder / f"libggml-cpu-{variant}.so", "int score(void) { return 1; }\n", "-shared", "-fPIC")
    return folder


@pytest.fixture
def make(binaries: Path) -> Callable[..., Engine]:
    """Puts a portable engine of this version into the home; ``changes`` make it another one."""

    def put(**changes) -> Engine:
        engine = described(targets=(*PRODUCT_TARGETS, "test-x"), tools=(*PRODUCT_TARGETS, "test-x"))
        engine = replace(engine, **changes)
        engine = replace(engine, path=paths.engines_dir() / engine.id)
        engine.bin_dir.mkdir(parents=True)
        for tool in engine.tools:
            shutil.copy(binaries / "program", engine.bin_dir / tool)
        for file in binaries.iterdir():
            if ".so" in file.name:
                shutil.copy(file, engine.bin_dir / file.name, follow_symlinks=False)
        shutil.copy(binaries / "libx.so.0.1", engine.bin_dir / "libmoe-test-rpc.so")
        (engine.path / "licenses").mkdir()
        for name in ("moestream", "llama.cpp"):
            (engine.path / "licenses" / name).write_text("MIT\n")
        engines.write_description(engine, engine.path)
        return engine

    return put


def refused(message: str, engine: Engine, output: Path, **options) -> MoestreamError:
    with pytest.raises(MoestreamError) as caught:
        pack.pack(engine, output, **options)
    assert message in caught.value.message and caught.value.hint
    assert not output.exists() or [file for file in output.iterdir() if file.name.startswith(".")] == []
    return caught.value


def members(archive: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(archive) as tar:
        return {info.name: info for info in tar}


def test_archive_and_manifest(make, tmp_path):
    engine = make()
    packed = pack.pack(engine, tmp_path / "release")
    assert {file.name for file in (tmp_path / "release").iterdir()} == {packed.archive.name, "moestream-engines.json"}
    entry = packed.entry
    assert parse((tmp_path / "release" / "moestream-engines.json").read_bytes(), "").engines == (entry,)
    assert (entry.id, entry.backend, entry.os, entry.arch) == (engine.id, "cpu", "linux", platform.machine())
    assert (entry.source, entry.llama_cpp_commit) == (load_pin().version, load_pin().llama_cpp_commit)
    assert entry.tools == PRODUCT_TARGETS and entry.cpu_variants == tuple(sorted(("fast", BASE)))
    assert (entry.min_driver, entry.gpu_archs, entry.system_libraries, entry.cpu_features) == ("", (), (), ())
    assert entry.file == packed.archive.name and entry.size_bytes == packed.archive.stat().st_size

    inside = members(packed.archive)
    # the test programs stay here, the C++ library's runtime comes along
    assert inside.keys() == {
        "bin", "licenses", "engine.json", *(f"bin/{tool}" for tool in PRODUCT_TARGETS), "bin/libx.so", "bin/libx.so.0",
        "bin/libx.so.0.1", f"bin/libggml-cpu-{BASE}.so", "bin/libggml-cpu-fast.so", "bin/libstdc++.so.6", "bin/libgcc_s.so.1",
        "licenses/moestream", "licenses/llama.cpp", "licenses/runtime-libraries",
    }  # fmt: skip
    assert inside["bin/libx.so"].issym() and inside["bin/libx.so"].linkname == "libx.so.0"
    assert inside["bin/libstdc++.so.6"].isreg() and inside["bin/libstdc++.so.6"].size > 100_000
    assert {(info.uid, info.gid, info.uname, info.gname) for info in inside.values()} == {(0, 0, "", "")}
    assert entry.installed_bytes >= sum(info.size for info in inside.values())


def test_the_newest_glibc_that_any_file_asks_for(make, tmp_path):
    """Against objdump's opinion of the same files."""
    packed = pack.pack(make(), tmp_path / "release")
    with tarfile.open(packed.archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    asked = set()
    for file in (tmp_path / "out" / "bin").iterdir():
        text = subprocess.run(["objdump", "-p", file], capture_output=True, text=True, check=True).stdout
        references = text.partition("Version References:")[2]
        asked |= {line.split("GLIBC_")[1].strip() for line in references.splitlines() if "GLIBC_2" in line}
    assert packed.entry.min_glibc == max(asked, key=lambda version: [int(number) for number in version.split(".")])


def test_what_was_packed_installs_and_runs(make, tmp_path, monkeypatch):
    packed = pack.pack(make(), tmp_path / "release")
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path / "empty"))
    outcome = bins.install(Origin(None, tmp_path / "release"))
    assert outcome.installed and engines.in_use() == outcome.engine
    assert outcome.engine.tools == PRODUCT_TARGETS and outcome.engine.id == packed.entry.id
    loaded = subprocess.run(["ldd", outcome.engine.tool("llama-cli")], capture_output=True, text=True, check=True).stdout
    for name in ("libx.so.0", "libstdc++.so.6"):
        assert f"{name} => {outcome.engine.bin_dir}/" in loaded
    # and is packed again as it was
    again = pack.pack(outcome.engine, tmp_path / "again")
    assert again.archive.read_bytes() == packed.archive.read_bytes()


def test_packing_twice_gives_the_same_bytes(make, tmp_path):
    engine = make()
    first = pack.pack(engine, tmp_path / "release")
    content, listing = first.archive.read_bytes(), first.manifest.read_bytes()
    for file in engine.bin_dir.iterdir():
        if not file.is_symlink():
            file.touch()
    second = pack.pack(engine, tmp_path / "release")
    assert (second.archive.read_bytes(), second.manifest.read_bytes()) == (content, listing)
    assert second.archive == first.archive and second.engine_count == 1


# ---------------------------------------------------------------- several engines in one release


def test_another_engine_is_added_to_the_manifest(make, tmp_path):
    first, other = make(), make(id="other", extra_cmake_args=("-DX=1",))
    pack.pack(first, tmp_path / "release")
    packed = pack.pack(other, tmp_path / "release")
    assert packed.engine_count == 2
    listing = parse(packed.manifest.read_bytes(), "")
    assert {entry.id for entry in listing.engines} == {first.id, "other"}
    assert {file.name for file in (tmp_path / "release").iterdir()} == {
        "moestream-engines.json", *(entry.file for entry in listing.engines),
    }  # fmt: skip


def test_another_build_of_the_same_engine_is_refused_unless_it_shall_replace_it(make, tmp_path):
    engine = make()
    first = pack.pack(engine, tmp_path / "release")
    (engine.path / "licenses" / "llama.cpp").write_text("MIT, as of today\n")
    before = {file.name: file.read_bytes() for file in (tmp_path / "release").iterdir()}
    error = refused(f"lists another build of {engine.id} already", engine, tmp_path / "release")
    assert "--replace" in error.hint
    assert {file.name: file.read_bytes() for file in (tmp_path / "release").iterdir()} == before
    second = pack.pack(engine, tmp_path / "release", replace_same=True)
    assert second.archive != first.archive and not first.archive.exists() and second.engine_count == 1


@pytest.mark.parametrize("what", ["version", "sources", "pin"])
def test_a_manifest_of_another_release_is_refused(make, tmp_path, what):
    engine = make()
    packed = pack.pack(engine, tmp_path / "release")
    changes = {"sources": {"sources_sha256": "0" * 64}, "pin": {"source": "0.0.1"}}.get(what, {})
    other = Manifest(
        moestream_version="0.0.0" if what == "version" else parse(packed.manifest.read_bytes(), "").moestream_version,
        engines=(packed.entry.model_copy(update=changes),),
    )
    packed.manifest.write_text(render(other))
    before = {file.name: file.read_bytes() for file in (tmp_path / "release").iterdir()}
    refused("is the manifest of another release", engine, tmp_path / "release", replace_same=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "release").iterdir()} == before


@pytest.mark.parametrize("text", ["{", '{"schema": "moestream/engine-release/2"}'])
def test_a_manifest_that_cannot_be_read_stays(make, tmp_path, text):
    (tmp_path / "release").mkdir()
    listing = tmp_path / "release" / "moestream-engines.json"
    listing.write_text(text)
    refused(str(listing), make(), tmp_path / "release")
    assert listing.read_text() == text and [file.name for file in listing.parent.iterdir()] == [listing.name]


# ---------------------------------------------------------------- what is not packed


def test_an_engine_for_one_processor_is_refused(make, tmp_path):
    native = make(id="native", cpu=engines.cpu_kind(), portable=False)
    error = refused("was built for this machine's processor alone and may crash on others", native, tmp_path / "release")
    assert error.hint == "moestream build --portable --backend cpu" and not (tmp_path / "release").exists()
    with pytest.raises(MoestreamError, match="was built for this machine's processor alone"):
        pack.engine_to_pack("cpu")
    portable = make()
    assert pack.engine_to_pack("cpu") == portable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_cmake_args": ("-DGGML_NATIVE=ON",)}, "was built with -DGGML_NATIVE=ON: it may crash on other processors"),
        ({"extra_cmake_args": ("-DCMAKE_C_FLAGS=-march=native",)}, "was built with -DCMAKE_C_FLAGS=-march=native"),
        ({"source": "src.0123456789"}, "was built from src.0123456789, not from the pinned"),
        ({"sources_sha256": "0" * 64}, "sources of another version of moestream"),
    ],
)
def test_an_engine_that_nobody_could_use(make, tmp_path, changes, message):
    refused(message, make(**changes), tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_none_is_built(make):
    with pytest.raises(MoestreamError, match=r"^no portable engine for cuda is built$") as caught:
        pack.engine_to_pack("cuda")
    assert caught.value.hint == "moestream build --portable --backend cuda"
    with pytest.raises(MoestreamError, match="unknown backend 'opencl'"):
        pack.engine_to_pack("opencl")
    make(sources_sha256="0" * 64)
    with pytest.raises(MoestreamError, match=r"^no portable engine for cpu of this version of moestream and its pin is built$"):
        pack.engine_to_pack("cpu")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("bin/llama-bench", "lacks llama-bench"),
        (f"bin/libggml-cpu-{BASE}.so", f"has no CPU kernels that every {platform.machine()} processor runs (found: fast)"),
        ("licenses/llama.cpp", "has no licences beside it"),
    ],
)
def test_an_incomplete_engine(make, tmp_path, left_out, message):
    engine = make()
    (engine.path / left_out).unlink()
    refused(message, engine, tmp_path / "release")
    assert list((tmp_path / "release").iterdir()) == []


def test_a_file_that_looks_for_libraries_in_folders_of_this_machine(make, tmp_path):
    engine = make()
    compile_elf(engine.bin_dir / "libstray.so", "int y;\n", "-shared", "-fPIC", "-Wl,-rpath,$ORIGIN:/usr/local/cuda/lib64")
    refused("libstray.so looks for libraries in /usr/local/cuda/lib64", engine, tmp_path / "release")


def test_a_library_that_this_machine_lacks(make, tmp_path, binaries):
    engine = make()
    gone = compile_elf(tmp_path / "libgone.so", "int y;\n", "-shared", "-fPIC", "-Wl,-soname,libgone.so.1")
    compile_elf(engine.bin_dir / "libstray.so", "int z;\n", "-shared", "-fPIC", "-Wl,--no-as-needed", str(gone))
    refused("libstray.so needs libgone.so.1, which this machine does not have", engine, tmp_path / "release")


def test_a_library_of_unknown_licence(make, tmp_path, monkeypatch):
    engine = make()
    compile_elf(tmp_path / "libthing.so.1", "int y;\n", "-shared", "-fPIC", "-Wl,-soname,libthing.so.1")
    arguments = ("-shared", "-fPIC", "-Wl,--no-as-needed", str(tmp_path / "libthing.so.1"))
    compile_elf(engine.bin_dir / "libstray.so", "int z;\n", *arguments)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    refused("the engine needs libthing.so.1, and under which licence", engine, tmp_path / "release")


@pytest.mark.parametrize(("backend", "left"), [("cuda", "libcuda.so.1"), ("vulkan", "libvulkan.so.1")])
def test_a_drivers_library_is_left_to_the_system(make, tmp_path, monkeypatch, write_program, backend, left):
    engine = make(id="gpu", backend=backend)
    driver = compile_elf(tmp_path / left, "int y;\n", "-shared", "-fPIC", f"-Wl,-soname,{left}")
    module = ("-shared", "-fPIC", "-Wl,--no-as-needed", str(driver))
    compile_elf(engine.bin_dir / f"libggml-{backend}.so", "int z;\n", *module)
    cuobjdump = (
        'case $1 in --list-elf) echo "ELF file    1: libggml-cuda.1.sm_90.cubin"; echo "ELF file    2: libggml-cuda.2.sm_75.cubin";;'
        ' --list-ptx) echo "PTX file    1: libggml-cuda.1.sm_80.ptx";; esac'
    )
    monkeypatch.setenv("PATH", f"{write_program('cuobjdump', cuobjdump).parent}:/usr/bin:/bin")
    packed = pack.pack(engine, tmp_path / "release")
    assert left in packed.entry.system_libraries
    assert f"bin/{left}" not in members(packed.archive)
    if backend == "cuda":
        assert packed.entry.gpu_archs == ("compute_80", "sm_75", "sm_90")
        assert "bin/libstdc++.so.6" in members(packed.archive)
    else:  # Mesa's drivers bring the system's into the process
        assert "libstdc++.so.6" in packed.entry.system_libraries and "bin/libstdc++.so.6" not in members(packed.archive)


@pytest.mark.parametrize(
    ("file", "code", "given", "driver"),
    [
        ("libcudart.so.12.8.57", "x.sm_90.cubin", None, "525.60.13"),  # any driver of the generation runs machine code
        ("libcudart.so.12.8.57", "x.sm_80.ptx", None, "570.26"),  # PTX asks for that of the toolkit
        ("libcudart.so.13.0.96", "x.sm_80.ptx", None, "580.65.06"),
        ("libcudart.so.13.9.1", "x.sm_80.ptx", "599.1", "599.1"),
        ("libcudart.so.13.9.1", "x.sm_80.ptx", None, None),
        ("libcudart.so.14.0.1", "x.sm_90.cubin", None, None),
    ],
)
def test_cuda_brings_its_runtime_and_says_which_driver_that_needs(
    make, tmp_path, monkeypatch, write_program, file, code, given, driver
):
    engine = make(id="gpu", backend="cuda")
    folder = tmp_path / "cuda" / "lib64"
    folder.mkdir(parents=True)
    name = ".".join(file.split(".")[:3])
    compile_elf(folder / file, "int y;\n", "-shared", "-fPIC", f"-Wl,-soname,{name}")
    (folder / name).symlink_to(file)
    compile_elf(engine.bin_dir / "libggml-cuda.so", "int z;\n", "-shared", "-fPIC", "-Wl,--no-as-needed", str(folder / name))
    kind = "elf" if code.endswith("cubin") else "ptx"
    script = f"[ $1 = --list-{kind} ] && echo {code}"
    monkeypatch.setenv("PATH", f"{write_program('cuobjdump', script).parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if driver is None:
        error = refused(f"which driver the code made with {file} needs is not known", engine, tmp_path / "release")
        assert "--min-driver" in error.hint
        return
    packed = pack.pack(engine, tmp_path / "release", min_driver=given)
    assert packed.entry.min_driver == driver and f"bin/{name}" in members(packed.archive)


def test_cuda_without_cuobjdump(make, tmp_path, monkeypatch):
    engine = make(id="gpu", backend="cuda")
    shutil.copy(engine.bin_dir / f"libggml-cpu-{BASE}.so", engine.bin_dir / "libggml-cuda.so")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pack.shutil, "which", lambda name, path=None: None)
    refused("cuobjdump not found", engine, tmp_path / "release")


def test_an_output_that_is_a_file(make, tmp_path):
    (tmp_path / "release").write_text("mine")
    with pytest.raises(MoestreamError, match="release: File exists"):
        pack.pack(make(), tmp_path / "release")
    assert (tmp_path / "release").read_text() == "mine"


def test_a_full_disk(make, tmp_path, monkeypatch):
    """Between the archive and the manifest nothing is listed that is not there."""
    engine, release = make(), tmp_path / "release"
    pack.pack(engine, release)
    before = {file.name: file.read_bytes() for file in release.iterdir()}

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    refused("is full (while packing)", replace(engine, built_at="2026-02-02T00:00:00+00:00"), release, replace_same=True)
    assert {file.name: file.read_bytes() for file in release.iterdir()} == before


def test_the_manifest_is_json_with_its_schema_first(make, tmp_path):
    packed = pack.pack(make(), tmp_path / "release")
    assert next(iter(json.loads(packed.manifest.read_text()).items())) == ("schema", "moestream/engine-release/1")
    assert files_below(tmp_path / "release") == {packed.archive.name, packed.manifest.name}
