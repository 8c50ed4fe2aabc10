"""Building an engine: source, patches, cmake, ninja, and the result put into its own folder.

One build tree a backend is kept, so that a changed patch or engine file compiles only what depends on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import psutil

from moestream import paths
from moestream.errors import MoestreamError
from moestream.upstream import cuda, engines
from moestream.upstream.disk import MIB, disk_full, full_disk_reported, require_free
from moestream.upstream.engines import Engine
from moestream.upstream.fetch import fetch_pinned, resolve_source
from moestream.upstream.patches import read_series, require_only_below, series_hash
from moestream.upstream.pin import load_pin
from moestream.upstream.tree import mirror, prepare_tree

PRODUCT_TARGETS = (
    "llama-server",
    "llama-cli",
    "llama-bench",
    "llama-perplexity",
    "llama-results",
    "llama-quantize",
    "llama-gguf-split",
    "llama-completion",
    "moe-replay-policy",
)
# Upstream's tests of what our patches touch (the first one also makes a tiny model of every architecture), and a program that
# must refuse to stream.
UPSTREAM_TEST_TARGETS = (
    "test-llama-archs",
    "test-backend-ops",
    "test-save-load-state",
    "test-recurrent-state-rollback",
    "test-state-restore-fragmented",
    "test-thread-safety",
    "test-arg-parser",
    "llama-imatrix",
)

_BACKEND_OPTION = {"cuda": "GGML_CUDA", "vulkan": "GGML_VULKAN", "metal": "GGML_METAL", "hip": "GGML_HIP"}
# Of a build that runs on any processor of its architecture. The CPU kernels are modules, one for each family of processors,
# and the best that fits is loaded at run time. Every search path is $ORIGIN and is passed on to what a library loads in turn
# (DT_RPATH): neither this machine's folders nor the user's LD_LIBRARY_PATH decide which libraries are found. OpenSSL has
# no stable interface between distributions, and moestream downloads by itself.
_PORTABLE_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_BACKEND_DL": "ON",
    "GGML_CPU_ALL_VARIANTS": "ON",
    "LLAMA_OPENSSL": "OFF",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_INSTALL_RPATH_USE_LINK_PATH": "OFF",
}
_BUILD_ESTIMATE_BYTES = {"cpu": 300 * MIB, "vulkan": 900 * MIB, "metal": 600 * MIB, "cuda": 3000 * MIB, "hip": 3000 * MIB}
# What compiling one of upstream's larger files takes; more jobs than memory for them ends in the OOM killer.
_JOB_MEMORY_BYTES = 1000 * MIB
_SHOWN_LOG_LINES = 15
_FOR_A_PROCESSOR = re.compile(r"-m(?:arch|cpu)=")


class Reporter(Protocol):
    """Who is told how a build goes."""

    def step(self, text: str) -> None:
        """A step begins."""

    def progress(self, done: int, total: int) -> None:
        """Of the step that compiles: ``done`` of ``total`` commands have run."""

    def note(self, text: str) -> None:
        """Something to know that is not an error."""


class SilentReporter:
    def step(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class BuildResult:
    """An engine, and whether it was built just now."""

    engine: Engine
    built: bool


def build(
    *,
    backend: str = "cpu",
    source: Path | None = None,
    targets: Sequence[str] = (),
    jobs: int | None = None,
    clean: bool = False,
    web_ui: bool | None = None,
    cmake_args: Sequence[str] = (),
    portable: bool = False,
    cuda_archs: Sequence[str] = (),
    test_series: bool = False,
    reporter: Reporter | None = None,
) -> BuildResult:
    """Build an engine, unless the same one is there already.

    Args:
        backend: cpu, cuda, vulkan, metal or hip.
        source: a llama.cpp folder or archive instead of the pin.
        targets: cmake targets besides PRODUCT_TARGETS.
        jobs: parallel compiler runs; by default one a processor, fewer when memory is short.
        clean: throw the source tree and the build tree away first.
        web_ui: whether llama-server gets its web page; None builds it where npm is present.
        cmake_args: further ``-D…`` arguments; they make another engine.
        portable: for any processor of this architecture, with the CPU kernels of every family as modules, instead of for
            this one alone; another engine, and the only one that :mod:`moestream.upstream.pack` takes.
        cuda_archs: cards that a cuda engine is to have code for, as cmake writes them (``90``, ``86-real``); by default
            those in this machine.
        test_series: apply ``patches/test/series`` too, which touches only upstream's tests, and build the test programs.
            The product's programs are the same with and without it.

    Raises:
        MoestreamError: a tool or a card is missing, the source cannot be had, a patch does not apply, compiling fails, the
            disk is full.
    """
    reporter = reporter or SilentReporter()
    if backend not in engines.BACKENDS:
        raise MoestreamError(f"unknown backend {backend!r}", hint=f"one of: {', '.join(engines.BACKENDS)}")
    if jobs is not None and jobs < 1:
        raise MoestreamError(f"--jobs is {jobs}", hint="give at least 1, or leave it out")
    for argument in cmake_args:
        if not argument.startswith("-D"):
            raise MoestreamError(f"--cmake-arg {argument} is not of the form -DNAME=VALUE", hint="write it with its -D")
    if portable:
        _require_portable(cmake_args)
    archs = cuda.architectures(cuda_archs) if backend == "cuda" else ()
    if cuda_archs and backend != "cuda":
        raise MoestreamError(
            f"--cuda-archs {','.join(cuda_archs)} does nothing with --backend {backend}",
            hint="add --backend cuda, or leave it out",
        )
    pin = load_pin()
    origin = resolve_source(source, pin, paths.downloads_dir())
    patches = read_series(paths.patches_dir() / "series")
    test_patches = read_series(paths.patches_dir() / "test" / "series") if test_series else []
    require_only_below(test_patches, "tests")

    wanted = Engine(
        id="", path=Path(), source=origin.label, sources_sha256=engines.sources_hash(), backend=backend,
        cpu=engines.portable_cpu() if portable else engines.cpu_kind(), portable=portable, built_at="", tools=(), cmake_args=(), extra_cmake_args=tuple(cmake_args), web_ui=False,
        targets=tuple(dict.fromkeys([*PRODUCT_TARGETS, *targets, *(test_targets() if test_series else ())])),
        test_series_sha256=_test_sources_hash(test_patches) if test_series else "", cuda_archs=archs,
    )  # fmt: skip
    name = engines.engine_id(wanted.source, wanted.sources_sha256, backend, wanted.cpu, wanted.extra_cmake_args, archs)
    wanted = replace(wanted, id=name, path=paths.engines_dir() / name)

    def there() -> Engine | None:
        present = engines.read_engine(wanted.path)
        return present if present and not clean and _covers(present, wanted, web_ui) else None

    if present := there():
        return BuildResult(present, built=False)
    workspace = paths.workspace_dir()
    with _one_build_at_a_time(workspace / "build", reporter):
        if present := there():  # built by the run that held the lock
            return BuildResult(present, built=False)
        tools = find_tools(backend)
        variant = hashlib.sha256("\0".join(cmake_args).encode()).hexdigest()[:6] if cmake_args else ""
        build_tree = workspace / "build" / "-".join(filter(None, (backend, "portable" if portable else "", variant)))
        tree = workspace / "vendor" / "llama.cpp"
        if clean:
            reporter.step("removing the old source and build trees")
            for folder in (build_tree, tree):
                shutil.rmtree(folder, ignore_errors=True)
        if origin.pinned and source is None:
            reporter.step(f"fetching {pin.package} {pin.version}")
            fetch_pinned(pin, paths.downloads_dir())
        reporter.step("unpacking and patching llama.cpp")
        prepare_tree(origin, [*patches, *test_patches], tree, workspace / "build")
        require_free(workspace, _BUILD_ESTIMATE_BYTES[backend] if not build_tree.exists() else 100 * MIB, "compiling")
        engine_sources = _engine_sources(workspace)
        arguments = _cmake_arguments(
            backend, tools, engine_sources,
            commit=pin.llama_cpp_commit if origin.pinned else origin.label,
            tests=test_series or any(target.startswith("test-") for target in targets),
            web_ui=_decide_web_ui(web_ui, reporter), portable=portable, cuda_archs=archs, extra=cmake_args,
        )  # fmt: skip
        if web_ui is False:
            # Upstream embeds a page that an earlier build left, asked for or not.
            shutil.rmtree(build_tree / "tools" / "ui" / "dist", ignore_errors=True)
        compiler = _Compiler(workspace, build_tree, tools, reporter)
        compiler.configure(tree, arguments)
        compiler.compile(wanted.targets, jobs or _default_jobs())
        has_ui = compiler.web_ui_built()
        if web_ui is not False and tools.npm and not has_ui:
            reporter.note(f"npm could not build the web page; llama-server works without it (log: {compiler.log})")
        if web_ui and not has_ui:
            raise MoestreamError("the web page could not be built", hint=f"see {compiler.log}, or build with --no-ui")
        reporter.step("installing")
        engine = replace(
            wanted, cmake_args=tuple(arguments), web_ui=has_ui, built_at=datetime.now(UTC).isoformat(timespec="seconds")
        )
        return BuildResult(_install(engine, build_tree / "bin", tree), built=True)


def _identity_sources() -> list[Path]:
    folder = paths.engine_source_dir().parent / "tests" / "identity"
    return sorted(file for file in folder.glob("*") if file.suffix in (".cpp", ".h", ".txt"))


def test_targets() -> tuple[str, ...]:
    """The test programs that can be built here: upstream's, and in a checkout those of ``tests/identity``, which
    ``engine/moestream.cmake`` joins where that folder exists."""
    lists = [file.read_text(encoding="utf-8") for file in _identity_sources() if file.name == "CMakeLists.txt"]
    return (*UPSTREAM_TEST_TARGETS, *re.findall(r"^add_executable\(([\w-]+)", "".join(lists), re.MULTILINE))


def _test_sources_hash(test_patches: list[Path]) -> str:
    digest = hashlib.sha256(series_hash(test_patches).encode())
    for file in _identity_sources():
        digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _covers(present: Engine, wanted: Engine, web_ui: bool | None) -> bool:
    """Whether the engine that is there has all that is asked for. Its id says that the sources are the same."""
    return (
        set(wanted.targets) <= set(present.targets)
        and all((present.bin_dir / tool).is_file() for tool in present.tools)
        and (not wanted.test_series_sha256 or wanted.test_series_sha256 == present.test_series_sha256)
        and (not web_ui or present.web_ui)
    )


@contextlib.contextmanager
def _one_build_at_a_time(folder: Path, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of the build trees; the kernel drops it when this process dies."""
    with full_disk_reported(folder, "preparing the build"):
        folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note("another build is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Tools:
    """Programs that a build runs. ``ccache``, ``npm`` and ``cuda_compiler`` may be "" when not there or not needed."""

    cmake: str
    ninja: str
    ccache: str
    npm: str
    cuda_compiler: str


def _find(*names: str) -> str:
    """The first of the programs that exists, on PATH or beside this Python, where wheels put theirs; else ""."""
    scripts = sysconfig.get_path("scripts")
    for name in names:
        if path := shutil.which(name) or shutil.which(name, path=scripts):
            return path
    return ""


def find_compilers() -> tuple[str, str]:
    """The C and the C++ compiler that cmake will take.

    Raises:
        MoestreamError: one is missing.
    """
    found = []
    for language, variable, names in (("C", "CC", ("cc", "gcc", "clang")), ("C++", "CXX", ("c++", "g++", "clang++"))):
        named = os.environ.get(variable, "").split()
        compiler = _find(*(named[:1] or names))
        if not compiler:
            looked = f"{variable}={named[0]}" if named else ", ".join(names)
            raise MoestreamError(f"no {language} compiler found (looked for {looked})", hint="sudo apt-get install gcc g++")
        found.append(compiler)
    return found[0], found[1]


def find_build_tools() -> tuple[str, str]:
    """cmake and ninja.

    Raises:
        MoestreamError: one is missing, or both.
    """
    found = {name: _find(name) for name in ("cmake", "ninja")}
    if missing := [name for name, path in found.items() if not path]:
        raise MoestreamError(f"{' and '.join(missing)} not found", hint=f"{sys.executable} -m pip install {' '.join(missing)}")
    return found["cmake"], found["ninja"]


def find_cuda_compiler() -> tuple[str, str]:
    """nvcc, "" where there is none, and where it was looked for: where CUDACXX, CUDA_HOME or CUDA_PATH name it and nowhere else; without them on
    PATH and in /usr/local/cuda."""
    if program := os.environ.get("CUDACXX"):
        return _find(program), f"at {program}, which CUDACXX names"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            return _find(f"{home}/bin/nvcc"), f"in {home}/bin, which {name} names"
    return _find("nvcc") or _find("/usr/local/cuda/bin/nvcc"), "on PATH and in /usr/local/cuda/bin"


def find_tools(backend: str) -> Tools:
    """Find what a build of ``backend`` needs.

    Raises:
        MoestreamError: a program that is needed is missing; the hint says how to get it.
    """
    if sys.platform != "darwin" and backend == "metal":
        raise MoestreamError("the metal backend exists on macOS only", hint="moestream build --backend cpu")
    find_compilers()
    cmake, ninja = find_build_tools()
    cuda_compiler = ""
    if backend == "cuda":
        cuda_compiler, looked = find_cuda_compiler()
        if not cuda_compiler:
            raise MoestreamError(
                f"nvcc not found (looked {looked}); the cuda backend needs the CUDA toolkit",
                hint="install the CUDA toolkit and set CUDA_HOME, or: moestream build --backend cpu",
            )
    if backend == "vulkan" and not _find("glslc"):
        raise MoestreamError("glslc not found; the vulkan backend needs it", hint="sudo apt-get install glslc libvulkan-dev")
    if backend == "hip" and not (_find("hipconfig") or _find("/opt/rocm/bin/hipconfig")):
        raise MoestreamError(
            "hipconfig not found (looked on PATH and in /opt/rocm/bin); the hip backend needs ROCm",
            hint="install ROCm's HIP development files, or: moestream build --backend cpu",
        )
    return Tools(cmake, ninja, _find("ccache"), _find("npm"), cuda_compiler)


def _decide_web_ui(wanted: bool | None, reporter: Reporter) -> bool:
    if wanted is None and not _find("npm"):
        reporter.note("npm is not installed: llama-server is built without its web page")
        return False
    if wanted and not _find("npm"):
        raise MoestreamError("npm not found; it builds the web page", hint="sudo apt-get install npm, or build with --no-ui")
    return wanted is not False


def _engine_sources(workspace: Path) -> Path:
    """The folder of the engine's sources. A wheel's are copied: beside upstream they have the same place relative to
    it as in a checkout, which a compiler cache needs, and they do not move with the virtual environment."""
    if paths.checkout_root():
        return paths.engine_source_dir()
    mirror(paths.engine_source_dir(), workspace / "engine")
    return workspace / "engine"


def native_flag(cmake_args: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """What among cmake's arguments and the compilers' variables makes code for one processor only; None when nothing does."""
    for argument in cmake_args:
        name, _, value = argument.removeprefix("-D").partition("=")
        name = name.split(":")[0]
        # Without a type for cmake, what is set last wins.
        if name in _PORTABLE_OPTIONS and value.upper() != _PORTABLE_OPTIONS[name]:
            return argument
        if re.fullmatch(r"CMAKE_(C|CXX)_FLAGS(_RELEASE)?", name) and _FOR_A_PROCESSOR.search(value):
            return argument
    for variable in ("CFLAGS", "CXXFLAGS"):
        if _FOR_A_PROCESSOR.search(environment.get(variable, "")):
            return f"{variable}={environment[variable]}"
    return None


def _require_portable(cmake_args: Sequence[str]) -> None:
    if flag := native_flag(cmake_args, os.environ):
        raise MoestreamError(
            f"--portable and {flag} contradict each other: such code may crash on other processors",
            hint="leave one of them out",
        )


def _cmake_arguments(
    backend: str,
    tools: Tools,
    engine_sources: Path,
    *,
    commit: str,
    tests: bool,
    web_ui: bool,
    portable: bool,
    cuda_archs: Sequence[str],
    extra: Sequence[str],
) -> list[str]:
    def flag(value: bool) -> str:
        return "ON" if value else "OFF"

    arguments = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": tools.ninja,
        # The programs find the libraries beside them, wherever the engine's folder is.
        "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
        "MOESTREAM_ENGINE_DIR": str(engine_sources),
        "LLAMA_BUILD_COMMIT": commit,
        "LLAMA_BUILD_NUMBER": "0",
        "LLAMA_BUILD_TESTS": flag(tests),
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_BUILD_UI": flag(web_ui),
        "GGML_CCACHE": "OFF",  # ours is set below, for every language
        **{option: flag(name == backend) for name, option in _BACKEND_OPTION.items()},
        **(_PORTABLE_OPTIONS if portable else {}),
    }
    if portable and sys.platform == "linux":
        arguments |= {f"CMAKE_{kind}_LINKER_FLAGS": "-Wl,--disable-new-dtags" for kind in ("EXE", "SHARED", "MODULE")}
    for language in ("C", "CXX", *(("CUDA",) if backend == "cuda" else ())):
        arguments[f"CMAKE_{language}_COMPILER_LAUNCHER"] = tools.ccache
    if tools.cuda_compiler:
        arguments["CMAKE_CUDA_COMPILER"] = tools.cuda_compiler
        arguments["CMAKE_CUDA_ARCHITECTURES"] = ";".join(cuda_archs)
    return [*(f"-D{name}={value}" for name, value in arguments.items()), *extra]


def _default_jobs() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, psutil.virtual_memory().available // _JOB_MEMORY_BYTES))


class _Compiler:
    """cmake and ninja in one build tree, with all they say in one log."""

    def __init__(self, workspace: Path, build_tree: Path, tools: Tools, reporter: Reporter) -> None:
        self.build_tree = build_tree
        self.log = build_tree / "moestream-build.log"
        self._tools = tools
        self._reporter = reporter
        self._environment = {
            **os.environ,
            "NINJA_STATUS": "[%f/%t] ",
            # Upstream asks git for a commit while configuring, and would find that of a repository around the tree.
            "GIT_CEILING_DIRECTORIES": str((workspace / "vendor").resolve()),
            # Paths relative to the workspace, so that the cache serves every workspace.
            "CCACHE_BASEDIR": str(workspace.resolve()),
            "CCACHE_NOHASHDIR": "1",
            # Without a network npm would try for minutes.
            "npm_config_fetch_retries": "1",
        }

    def configure(self, tree: Path, arguments: Sequence[str]) -> None:
        self._reporter.step("configuring")
        with full_disk_reported(self.build_tree, "configuring"):
            self.build_tree.mkdir(parents=True, exist_ok=True)
            self.log.write_text("", encoding="utf-8")
        cache = self.build_tree / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={tree}\n" not in cache.read_text(encoding="utf-8"):
            cache.unlink()  # the workspace was moved; cmake refuses such a cache
        command = [self._tools.cmake, "-S", str(tree), "-B", str(self.build_tree), "-G", "Ninja", *arguments]
        self._run(command, "cmake could not configure llama.cpp")

    def compile(self, targets: Sequence[str], jobs: int) -> None:
        self._reporter.step(f"compiling with {jobs} job{'s' if jobs > 1 else ''}")
        command = [self._tools.ninja, "-C", str(self.build_tree), "-j", str(jobs), *targets]
        self._run(command, "compiling llama.cpp failed")

    def web_ui_built(self) -> bool:
        header = self.build_tree / "tools" / "ui" / "ui.h"
        try:
            return bool(re.search(r"LLAMA_UI_HAS_ASSETS\s+1\b", header.read_text(encoding="utf-8")))
        except OSError:
            return False

    def _run(self, command: Sequence[str], failure: str) -> None:
        last: deque[str] = deque(maxlen=_SHOWN_LOG_LINES)
        no_space = unknown_target = unsupported = ""
        with (
            full_disk_reported(self.build_tree, "compiling"),
            self.log.open("a", buffering=1, encoding="utf-8") as log,
            subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.write(line)
                    if match := re.match(r"\[(\d+)/(\d+)\] ", line):
                        self._reporter.progress(int(match[1]), int(match[2]))
                    elif line.strip():
                        last.append(line.rstrip())
                    if "No space left on device" in line:
                        no_space = line
                    if match := re.match(r"ninja: error: unknown target '([^']+)'", line):
                        unknown_target = match[1]
                    if match := re.search(r"Unsupported gpu architecture '\w+?_(\d+)\w*'", line):
                        unsupported = match[1]
            except BaseException:
                process.terminate()
                raise
        if process.returncode == 0:
            return
        if no_space:
            raise disk_full(self.build_tree, "compiling")
        if unknown_target:
            raise MoestreamError(
                f"llama.cpp has no target {unknown_target!r}",
                hint=f"list them: {self._tools.ninja} -C {self.build_tree} -t targets all",
            )
        hint = f"the whole log: {self.log}"
        if unsupported:
            hint = (
                f"this nvcc ({self._tools.cuda_compiler}) makes no code for architecture {unsupported}: name a toolkit that does with "
                f"CUDA_HOME (before 75: CUDA 12), or other cards with --cuda-archs; {hint}"
            )
        raise MoestreamError(f"{failure}; the last lines were:\n  " + "\n  ".join(last), hint=hint)


def _is_library(file: Path) -> bool:
    return ".so" in file.suffixes or file.suffix in (".dylib", ".metal", ".metallib")


def _copy_licences(tree: Path, folder: Path) -> None:
    """Who hands an engine on has to hand these on with it."""
    folder.mkdir()
    shutil.copyfile(paths.licence_file(), folder / "moestream")
    shutil.copyfile(tree / "LICENSE", folder / "llama.cpp")
    for file in sorted((tree / "licenses").glob("*")):
        shutil.copyfile(file, folder / f"llama.cpp-{file.name}")


def _install(engine: Engine, built: Path, tree: Path) -> Engine:
    """Copy programs and libraries into the engine's folder, replacing it whole."""
    folder = paths.engines_dir()
    tools = tuple(target for target in engine.targets if (built / target).is_file())
    engine = replace(engine, tools=tools)
    with full_disk_reported(folder, "installing the engine"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".install-") as scratch:
            fresh = Path(scratch, "engine")
            (fresh / "bin").mkdir(parents=True)
            for file in sorted(built.iterdir()):
                is_tests = file.name.startswith("libmoe-test-")  # left in the tree by a build with the test series
                if file.name in tools or (_is_library(file) and (engine.test_series_sha256 or not is_tests)):
                    shutil.copy2(file, fresh / "bin" / file.name, follow_symlinks=False)
            if engine.portable:
                _copy_licences(tree, fresh / "licenses")
            engines.write_description(engine, fresh)
            if engine.path.exists():
                engine.path.rename(Path(scratch, "old"))
            fresh.rename(engine.path)
    return engine
