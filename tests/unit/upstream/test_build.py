"""The build's own logic, with stand-ins for cmake and ninja that obey switches in the environment."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading

import pytest

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import build as building
from moestream.upstream.build import PRODUCT_TARGETS, SilentReporter, build, find_tools
from moestream.upstream.engines import in_use, read_engine

CMAKE = """
echo "cmake $*" >> "$CALLS"
while [ $# -gt 0 ]; do [ "$1" = -B ] && tree=$2; shift; done
[ -n "$CMAKE_FAILS" ] && { echo "CMake Error: $CMAKE_FAILS"; exit 1; }
mkdir -p "$tree/bin"
"""
NINJA = """
echo "ninja $*" >> "$CALLS"
[ -n "$NINJA_SAYS" ] && { printf "$NINJA_SAYS"; exit 1; }
tree=$2; shift 4
n=0
for target; do n=$((n+1)); echo "[$n/$#] Linking $target"; echo "program" > "$tree/bin/$target"; done
echo library > "$tree/bin/libllama.so.0.5"; ln -sf libllama.so.0.5 "$tree/bin/libllama.so"
echo stale > "$tree/bin/test-of-another-build"
"""


@pytest.fixture
def shipped(tmp_path, monkeypatch, pin):
    """What ships: one patch, one engine file, the pin of the tiny archive; and a workspace in the test's folder."""
    root = tmp_path / "shipped"
    for name in ("patches/test", "engine", "vendor"):
        (root / name).mkdir(parents=True)
    (root / "patches/series").write_text("")
    (root / "patches/test/series").write_text("")
    (root / "engine/pool.cpp").write_text("// 1\n")
    lines = [f'{name} = "{getattr(pin, name)}"' for name in ("package", "version", "sha256", "directory", "llama_cpp_commit")]
    (root / "vendor/pin.toml").write_text("\n".join(lines))
    (root / "LICENSE").write_text("ours\n")
    monkeypatch.setattr(paths, "shipped_root", lambda: root)
    monkeypatch.setattr(paths, "checkout_root", lambda: None)
    return root


@pytest.fixture
def machine(tmp_path, monkeypatch, write_program, shipped):
    """Only our stand-ins, git and the tools of a shell are on PATH; returns the list of calls."""
    for name in ("cc", "c++"):
        write_program(name, "exit 0\n")
    write_program("cmake", CMAKE)
    write_program("ninja", NINJA)
    for name in ("git", "sh", "mkdir", "ln"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(building.sysconfig, "get_path", lambda name: str(tmp_path / "bin"))
    for name in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("CALLS", str(calls))
    return lambda: calls.read_text().splitlines()


class Recorder(SilentReporter):
    def __init__(self):
        self.steps, self.seen, self.notes = [], [], []

    def step(self, text):
        self.steps.append(text)

    def progress(self, done, total):
        self.seen.append((done, total))

    def note(self, text):
        self.notes.append(text)


PORTABLE = [
    "-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags",
]  # fmt: skip


def test_a_portable_engine_is_another_one_in_a_tree_of_its_own(machine, archive, monkeypatch):
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    native = build(source=archive).engine
    portable = build(source=archive, portable=True).engine
    assert portable.portable and not native.portable and portable.id.endswith("-portable") and portable.id != native.id
    assert set(PORTABLE) <= set(portable.cmake_args) and not set(PORTABLE) & set(native.cmake_args)
    assert in_use() == native  # for this processor alone
    assert [call.split()[4] for call in machine() if call.startswith("cmake")] == [
        str(paths.workspace_dir() / "build" / name) for name in ("cpu", "cpu-portable")
    ]
    assert read_engine(portable.path) == portable and not build(source=archive, portable=True).built
    assert {file.name for file in (portable.path / "licenses").iterdir()} == {"moestream", "llama.cpp", "llama.cpp-other"}
    shutil.rmtree(native.path)
    assert in_use() == portable


@pytest.mark.parametrize(
    ("cmake_args", "environment", "flag"),
    [
        (["-DGGML_NATIVE=ON"], {}, "-DGGML_NATIVE=ON"),
        (["-DGGML_NATIVE:BOOL=on"], {}, "-DGGML_NATIVE:BOOL=on"),
        (["-DX=1", "-DGGML_CPU_ALL_VARIANTS=OFF"], {}, "-DGGML_CPU_ALL_VARIANTS=OFF"),
        (["-DCMAKE_CXX_FLAGS=-O2 -march=native"], {}, "-DCMAKE_CXX_FLAGS=-O2 -march=native"),
        ([], {"CXXFLAGS": "-g -march=znver4"}, "CXXFLAGS=-g -march=znver4"),
        ([], {"CFLAGS": "-mcpu=native"}, "CFLAGS=-mcpu=native"),
    ],
)
def test_code_for_one_processor_is_not_called_portable(machine, archive, monkeypatch, cmake_args, environment, flag):
    for name in ("CFLAGS", "CXXFLAGS"):
        monkeypatch.setenv(name, environment.get(name, ""))
    with pytest.raises(MoestreamError) as caught:
        build(source=archive, portable=True, cmake_args=cmake_args)
    assert caught.value.message.startswith(f"--portable and {flag} contradict each other")
    assert machine() == []


def test_built_installed_and_not_built_again(machine, archive):
    recorder = Recorder()
    first = build(source=archive, jobs=3, reporter=recorder)
    assert first.built
    assert [call.split()[0] for call in machine()] == ["cmake", "ninja"]
    assert machine()[1].split()[3:] == ["-j", "3", *PRODUCT_TARGETS]
    assert recorder.seen == [(n, len(PRODUCT_TARGETS)) for n in range(1, len(PRODUCT_TARGETS) + 1)]
    engine = first.engine
    assert engine.source == "9.9.9"
    assert set(engine.tools) == set(PRODUCT_TARGETS)
    assert {file.name for file in engine.bin_dir.iterdir()} == {*PRODUCT_TARGETS, "libllama.so", "libllama.so.0.5"}
    assert os.readlink(engine.bin_dir / "libllama.so") == "libllama.so.0.5"
    assert in_use() == engine == read_engine(engine.path)

    second = build(source=archive)
    assert not second.built and second.engine == engine
    assert len(machine()) == 2
    assert [path.name for path in paths.engines_dir().iterdir()] == [engine.id]


def test_a_changed_engine_file_or_patch_is_another_engine(machine, archive, shipped):
    ids = [build(source=archive).engine.id]
    (shipped / "engine/pool.cpp").write_text("// 2\n")
    ids.append(build(source=archive).engine.id)
    assert (paths.workspace_dir() / "engine/pool.cpp").read_text() == "// 2\n"
    (shipped / "patches/a.patch").write_text("--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,2 +1,2 @@\n-one\n+uno\n two\n")
    (shipped / "patches/series").write_text("a.patch\n")
    ids.append(build(source=archive).engine.id)
    assert (paths.workspace_dir() / "vendor/llama.cpp/src/llama.cpp").read_text().startswith("uno\n")
    assert len(set(ids)) == 3
    assert {path.name for path in paths.engines_dir().iterdir()} == set(ids)
    assert in_use().id == ids[-1]


def test_what_cmake_is_told(machine, archive, shipped):
    engine = build(source=archive, cmake_args=["-DGGML_NATIVE=OFF"]).engine
    told = machine()[0].split()
    for expected in (
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_COMMIT=abcdef0",
        "-DGGML_CUDA=OFF",
        "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
        f"-DMOESTREAM_ENGINE_DIR={paths.workspace_dir() / 'engine'}",
        "-DCMAKE_CXX_COMPILER_LAUNCHER=",
    ):
        assert expected in told
    assert told[-1] == "-DGGML_NATIVE=OFF" and engine.extra_cmake_args == ("-DGGML_NATIVE=OFF",)
    assert build(source=archive).engine.id != engine.id


def test_ccache_is_used_where_present(machine, archive, write_program):
    ccache = write_program("ccache", "exit 0\n")
    build(source=archive)
    assert f"-DCMAKE_C_COMPILER_LAUNCHER={ccache} -DCMAKE_CXX_COMPILER_LAUNCHER={ccache}" in machine()[0]


def test_a_further_target_is_added_to_the_same_engine(machine, archive):
    first = build(source=archive).engine
    second = build(source=archive, targets=["llama-imatrix"])
    assert second.built and second.engine.id == first.id
    assert "llama-imatrix" in second.engine.tools
    assert not build(source=archive).built


def test_the_test_series_adds_programs_to_the_same_engine(machine, archive, shipped):
    plain = build(source=archive).engine
    patch = "--- a/tests/test-llama-archs.cpp\n+++ b/tests/test-llama-archs.cpp\n@@ -1,2 +1,2 @@\n-alpha\n+beta\n beta\n"
    (shipped / "patches/test/t.patch").write_text(patch)
    (shipped / "patches/test/series").write_text("t.patch\n")
    tested = build(source=archive, test_series=True)
    assert tested.built and tested.engine.id == plain.id
    assert "test-llama-archs" in tested.engine.tools
    assert "-DLLAMA_BUILD_TESTS=ON" in machine()[2]
    assert (paths.workspace_dir() / "vendor/llama.cpp/tests/test-llama-archs.cpp").read_text().startswith("beta")
    assert not build(source=archive, test_series=True).built
    assert not build(source=archive).built
    (shipped / "patches/test/t.patch").write_text(patch.replace("+beta", "+delta"))
    assert build(source=archive, test_series=True).built

    (shipped / "tests/identity").mkdir(parents=True)
    (shipped / "tests/identity/CMakeLists.txt").write_text("add_executable(moe-identity moe-identity.cpp)\n")
    (shipped / "tests/identity/moe-identity.cpp").write_text("// 1\n")
    assert "moe-identity" in build(source=archive, test_series=True).engine.tools
    assert not build(source=archive, test_series=True).built
    (shipped / "tests/identity/moe-identity.cpp").write_text("// 2\n")
    assert build(source=archive, test_series=True).built


def test_a_test_patch_that_touches_the_product_is_refused(machine, archive, shipped):
    (shipped / "patches/test/t.patch").write_text(
        "--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,2 +1,2 @@\n-one\n+uno\n two\n"
    )
    (shipped / "patches/test/series").write_text("t.patch\n")
    with pytest.raises(MoestreamError, match="may only touch tests/"):
        build(source=archive, test_series=True)
    assert machine() == []


def test_clean_builds_again_and_drops_edits(machine, archive):
    build(source=archive)
    edited = paths.workspace_dir() / "vendor/llama.cpp/src/llama.cpp"
    edited.write_text("edited\n")
    (paths.workspace_dir() / "build/cpu/old.o").touch()
    assert build(source=archive, clean=True).built
    assert edited.read_text().startswith("one\n")
    assert not (paths.workspace_dir() / "build/cpu/old.o").exists()


def test_a_program_that_was_deleted_is_built_again(machine, archive):
    engine = build(source=archive).engine
    (engine.bin_dir / "llama-cli").unlink()
    assert build(source=archive).built
    assert (engine.bin_dir / "llama-cli").is_file()


def test_a_second_build_waits_and_takes_what_the_first_one_built(machine, archive):
    waiting = threading.Event()

    class Second(Recorder):
        def note(self, text):
            super().note(text)
            waiting.set()

    results, second = [], Second()
    other = threading.Thread(target=lambda: results.append(build(source=archive, reporter=second)))

    class First(Recorder):
        def step(self, text):
            if text.startswith("compiling"):
                other.start()
                assert waiting.wait(30)

    first = build(source=archive, reporter=First())
    other.join(30)
    assert "another build is running here; waiting for it" in second.notes
    assert [(result.built, result.engine) for result in results] == [(False, first.engine)]


# ------------------------------------------------------------------ errors


def test_a_failed_build_shows_the_end_and_where_the_log_is(machine, archive, monkeypatch):
    monkeypatch.setenv("NINJA_SAYS", "".join(f"line {n}\\n" for n in range(99)) + "a.cpp:1: error: no\\n")
    with pytest.raises(MoestreamError) as caught:
        build(source=archive)
    log = paths.workspace_dir() / "build/cpu/moestream-build.log"
    assert caught.value.hint == f"the whole log: {log}"
    assert "a.cpp:1: error: no" in caught.value.message and "line 98" in caught.value.message
    assert "line 50" not in caught.value.message and "line 50" in log.read_text()
    assert not paths.engines_dir().exists()


def test_a_failed_build_leaves_the_earlier_engine(machine, archive, monkeypatch, shipped):
    engine = build(source=archive).engine
    monkeypatch.setenv("NINJA_SAYS", "no")
    with pytest.raises(MoestreamError):
        build(source=archive, clean=True)
    assert in_use() == engine and engine.tool("llama-server").is_file()


def test_a_failed_configure(machine, archive, monkeypatch):
    monkeypatch.setenv("CMAKE_FAILS", "no such thing")
    with pytest.raises(MoestreamError, match=r"cmake could not configure(.|\n)*no such thing"):
        build(source=archive)


def test_an_unknown_target(machine, archive, monkeypatch):
    monkeypatch.setenv("NINJA_SAYS", "ninja: error: unknown target 'llama-nope'\\n")
    with pytest.raises(MoestreamError, match=r"^llama\.cpp has no target 'llama-nope'$"):
        build(source=archive, targets=["llama-nope"])


def test_a_disk_that_fills_up_while_compiling(machine, archive, monkeypatch):
    monkeypatch.setenv("NINJA_SAYS", "as: can not write a.o: No space left on device\\nninja: build stopped\\n")
    with pytest.raises(MoestreamError, match=r"is full \(while compiling\)"):
        build(source=archive)


def test_too_little_space_is_said_before_compiling(machine, archive, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 250 << 20))
    with pytest.raises(MoestreamError, match=r"compiling needs about 300 MiB at .*, and 250 MiB are free"):
        build(source=archive)
    assert machine() == []


@pytest.mark.parametrize(
    ("missing", "message", "hint"),
    [
        (["c++"], "no C++ compiler found (looked for c++, g++, clang++)", "sudo apt-get install gcc g++"),
        (["cc"], "no C compiler found (looked for cc, gcc, clang)", "sudo apt-get install gcc g++"),
        (["ninja"], "ninja not found", "-m pip install ninja"),
        (["cmake", "ninja"], "cmake and ninja not found", "-m pip install cmake ninja"),
    ],
)
def test_a_missing_tool(machine, archive, tmp_path, missing, message, hint):
    for name in missing:
        (tmp_path / "bin" / name).unlink()
    with pytest.raises(MoestreamError) as caught:
        build(source=archive)
    assert caught.value.message == message
    assert caught.value.hint.endswith(hint)


def test_a_compiler_named_in_the_environment_that_is_not_there(machine, monkeypatch):
    monkeypatch.setenv("CXX", "clang++-99 -stdlib=libc++")
    with pytest.raises(MoestreamError, match=r"looked for CXX=clang\+\+-99"):
        find_tools("cpu")


@pytest.mark.parametrize(("backend", "needs"), [("cuda", "nvcc"), ("vulkan", "glslc"), ("hip", "hipconfig")])
def test_what_a_backend_needs(machine, monkeypatch, write_program, tmp_path, backend, needs):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    if backend == "hip" and os.path.exists("/opt/rocm/bin/hipconfig"):
        pytest.fail("this machine has ROCm; the test needs one without")
    with pytest.raises(MoestreamError, match=f"^{needs} not found"):
        find_tools(backend)
    monkeypatch.delenv("CUDA_HOME")
    write_program(needs, "exit 0\n")
    find_tools(backend)


@pytest.mark.parametrize("name", ["CUDACXX", "CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_is_not_taken_elsewhere(machine, monkeypatch, tmp_path, write_program, name):
    write_program("nvcc", "exit 0\n")
    monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    with pytest.raises(MoestreamError, match=rf"nvcc not found \(looked (at|in) {tmp_path}/nowhere.*, which {name} names\)"):
        find_tools("cuda")


def test_nvcc_is_found_in_cuda_home(machine, monkeypatch, tmp_path, archive, write_program):
    (tmp_path / "cuda/bin").mkdir(parents=True)
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    write_program("nvidia-smi", "echo 9.0; echo 8.6\n")
    engine = build(source=archive, backend="cuda").engine
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in machine()[0] and "-DGGML_CUDA=ON" in machine()[0]
    assert "-DCMAKE_CUDA_ARCHITECTURES=86-real;90-real" in engine.cmake_args
    assert (engine.backend, engine.cuda_archs, engine.backend_text) == (
        "cuda",
        ("86-real", "90-real"),
        "cuda for 86-real, 90-real",
    )
    assert read_engine(engine.path) == engine == in_use("cuda")

    assert not build(source=archive, backend="cuda").built
    assert not build(source=archive, backend="cuda", cuda_archs=["86-real,90-real"]).built
    other = build(source=archive, backend="cuda", cuda_archs=["90-real"])
    assert other.built and other.engine.id != engine.id and read_engine(engine.path) == engine


def test_a_cuda_engine_needs_a_card_or_its_name(machine, archive, write_program):
    write_program("nvcc", "exit 0\n")
    with pytest.raises(MoestreamError, match=r"^no NVIDIA card can be seen"):
        build(source=archive, backend="cuda")
    assert machine() == []
    assert build(source=archive, backend="cuda", cuda_archs=["90"]).engine.cuda_archs == ("90",)


def test_an_engine_of_an_earlier_version_is_still_read(machine, archive):
    engine = build(source=archive).engine
    description = json.loads((engine.path / "engine.json").read_text())
    assert description.pop("cuda_archs") == []
    (engine.path / "engine.json").write_text(json.dumps(description))
    assert read_engine(engine.path) == engine and not build(source=archive).built


@pytest.mark.skipif(sys.platform == "darwin", reason="metal exists there")
def test_metal_elsewhere():
    with pytest.raises(MoestreamError, match="on macOS only"):
        find_tools("metal")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "opencl"}, "unknown backend 'opencl'"),
        ({"jobs": 0}, "--jobs is 0"),
        ({"cmake_args": ["GGML_NATIVE=OFF"]}, "is not of the form -DNAME=VALUE"),
        ({"web_ui": True}, "npm not found"),
        ({"cuda_archs": ["90"]}, "--cuda-archs 90 does nothing with --backend cpu"),
        ({"backend": "cuda", "cuda_archs": ["9.0"]}, "'9.0' is no CUDA architecture"),
    ],
)
def test_bad_input(machine, archive, arguments, expected):
    with pytest.raises(MoestreamError, match=expected) as caught:
        build(source=archive, **arguments)
    assert caught.value.hint
    assert machine() == []


# ------------------------------------------------------------------ the web page


def test_without_npm_there_is_no_web_page_and_that_is_said(machine, archive):
    recorder = Recorder()
    engine = build(source=archive, reporter=recorder).engine
    assert not engine.web_ui
    assert recorder.notes == ["npm is not installed: llama-server is built without its web page"]


def test_an_npm_that_fails_is_a_note(machine, archive, write_program):
    write_program("npm", "exit 1\n")
    recorder = Recorder()
    assert build(source=archive, reporter=recorder).built
    assert "-DLLAMA_BUILD_UI=ON" in machine()[0]
    assert len(recorder.notes) == 1 and "npm could not build the web page" in recorder.notes[0]


def test_the_web_page_as_built(machine, archive, write_program):
    write_program("npm", "exit 0\n")
    write_program("ninja", NINJA + 'mkdir -p "$tree/tools/ui"; echo "#define LLAMA_UI_HAS_ASSETS 1" > "$tree/tools/ui/ui.h"\n')
    without = build(source=archive, web_ui=False)
    assert "-DLLAMA_BUILD_UI=OFF" in machine()[0]
    recorder = Recorder()
    assert build(source=archive, clean=True, reporter=recorder).engine.web_ui
    assert recorder.notes == []
    assert without.engine.id == in_use().id


def test_without_the_web_page_an_earlier_one_is_removed(machine, archive):
    page = paths.workspace_dir() / "build/cpu/tools/ui/dist/index.html"
    page.parent.mkdir(parents=True)
    page.touch()
    build(source=archive)
    assert page.exists()
    build(source=archive, clean=False, web_ui=False, targets=["llama-imatrix"])
    assert not page.exists()
