"""Every check of ``moestream doctor``, well and in each case that it has a remedy for.

A test's name is ``test_CHECK__CASE`` or ``test_CHECK__ok``, and perhaps ``__`` and more; the last test here compares the names with
the code, so that no check is without one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from malformed import tiny, write_shards

from moestream import config, gguf_facts, paths
from moestream.doctor import drives, engine, files, gpu, host, memory, toolchain
from moestream.doctor.checks import Finding
from moestream.doctor.gpu import Gpu, Nvidia
from moestream.doctor.survey import CHECKS
from moestream.gguf_facts import GgufFacts
from moestream.models.store import ModelFile, ModelStore, PulledModel
from moestream.server.address import free_port
from moestream.server.records import ProcessMark, RecordStore, ServerRecord
from moestream.upstream import engines
from moestream.upstream.pin import load_pin

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "demo" / "moestream-demo-q4_0.gguf"
GIB = 1 << 30


def is_ok(finding: Finding, found: str = "") -> None:
    assert (finding.status, finding.case, finding.hint) == ("ok", "", None), finding
    assert found in finding.found


def is_skipped(finding: Finding, found: str) -> None:
    assert (finding.status, finding.hint) == ("skipped", None), finding
    assert found in finding.found


def is_bad(finding: Finding, status: str, found: str, hint: str = "") -> None:
    """The case is that of the test's name."""
    _, _, case = (os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0].split("[")[0]).partition("__")
    assert finding.case == case.split("__")[0].replace("_", "-"), finding
    assert finding.status == status and found in finding.found, finding
    assert finding.hint and hint in finding.hint and "{" not in finding.hint, finding
    assert "\n" not in finding.found + finding.hint


def program(path: Path, text: str) -> Path:
    """A shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return path


# --- config ---


def settings(environment: Mapping[str, str] | None = None) -> Finding:
    return files.settings({"model": None}, environment or {})[0]


def test_config__ok(home: Path) -> None:
    is_ok(settings(), "no moestream.yaml")
    path = config.user_path()
    path.parent.mkdir(parents=True)
    path.write_text("defaults: {port: 9000}\n")
    is_ok(settings(), str(path))


def test_config__wrong(home: Path) -> None:
    path = config.user_path()
    path.parent.mkdir(parents=True)
    path.write_text("defaults: {prot: 9000}\n")
    finding, merged = files.settings({"model": None}, {})
    is_bad(finding, "fail", f"{path}:1:12: unknown key 'prot'")
    assert merged is None


def test_config__unread() -> None:
    is_bad(settings({"MOESTREAM_PROT": "1"}), "warn", "MOESTREAM_PROT is read by nothing: did you mean MOESTREAM_PORT?")


# --- engine ---


def install(server: str, *, portable: bool = False, tools: tuple[str, ...] = ("llama-server",)) -> engines.Engine:
    """An engine of this version whose server is a shell script."""
    cpu = engines.portable_cpu() if portable else engines.cpu_kind()
    sources = engines.sources_hash()
    name = engines.engine_id(load_pin().version, sources, "cpu", cpu)
    made = engines.Engine(
        id=name, path=paths.engines_dir() / name, source=load_pin().version, sources_sha256=sources, backend="cpu", cpu=cpu,
        built_at="", targets=tools, tools=tools, cmake_args=(), extra_cmake_args=(), web_ui=False, test_series_sha256="",
        portable=portable,
    )  # fmt: skip
    program(made.bin_dir / "llama-server", server)
    engines.write_description(made, made.path)
    return made


def test_engine__ok() -> None:
    made = install("exit 0")
    finding, used = engine.engine(None)
    is_ok(finding, f"{made.id}: cpu, for this processor; matches moestream ")
    assert used == made and finding.data["portable"] is False


def test_engine__ok__portable() -> None:
    install("exit 0", portable=True)
    is_ok(engine.engine("cpu")[0], ": cpu, for any x86_64 processor;" if os.uname().machine == "x86_64" else ": cpu, for any")


def test_engine__none() -> None:
    finding, used = engine.engine(None)
    is_bad(finding, "fail", "no engine is built", "moestream build")
    assert used is None


def test_engine__none__stale() -> None:
    made = install("exit 0")
    engines.write_description(replace(made, sources_sha256="0" * 64), made.path)
    is_bad(
        engine.engine(None)[0],
        "fail",
        f"no engine is built that matches this version of moestream and this processor (1 others are there: {made.id})",
    )


def test_engine__unreadable(home: Path) -> None:
    paths.engines_dir().parent.mkdir(parents=True)
    paths.engines_dir().symlink_to(home / ("n" * 300))
    is_bad(engine.engine(None)[0], "fail", "File name too long", "check the permissions of")


def test_engine__incomplete() -> None:
    made = install("exit 0", tools=("llama-server", "llama-cli"))
    finding, used = engine.engine(None)
    is_bad(finding, "fail", "llama-cli is missing in ", f"rm -r {made.path}; moestream build --backend cpu")
    assert used is None


def test_engine__broken() -> None:
    install("echo libggml.so: cannot open shared object file >&2; exit 127")
    finding, used = engine.engine(None)
    is_bad(finding, "fail", "llama-server --version: exit code 127: libggml.so: cannot open", "moestream build --backend cpu")
    assert used is None


def test_engine__broken__by_a_signal() -> None:
    install("kill -ILL $$")
    is_bad(engine.engine(None)[0], "fail", "ended by signal 4")


# --- toolchain ---


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing in it but what the test writes, and a shell for that."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    return folder


def test_compiler__ok() -> None:
    is_ok(toolchain.compiler(needed=True))


def test_compiler__missing(path: Path) -> None:
    is_bad(toolchain.compiler(needed=True), "fail", "no C compiler found", "sudo apt-get install gcc g++")
    is_bad(toolchain.compiler(needed=False), "warn", "no C compiler found")
    program(path / "cc", "exit 0")
    is_bad(toolchain.compiler(needed=True), "fail", "no C++ compiler found")


def test_compiler__broken(path: Path) -> None:
    program(path / "cc", "exit 0")
    program(path / "c++", "echo 'fatal error: atomic: No such file' >&2; exit 1")
    is_bad(toolchain.compiler(needed=True), "fail", "fatal error: atomic: No such file", "CC and CXX")


def test_compiler__broken__with_a_wrong_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real compiler, of which an older standard is asked for: the sample is none of that."""
    monkeypatch.setattr(toolchain, "_SAMPLE", "#if __cplusplus < 202002L\n#error old\n#endif\n")
    is_bad(toolchain.compiler(needed=True), "fail", "error")


def tools(path: Path, cmake: str = "cmake version 3.25.1", ninja: str = "1.11.1") -> Finding:
    program(path / "cmake", f"echo '{cmake}'")
    program(path / "ninja", f"echo '{ninja}'")
    return toolchain.build_tools(needed=True)


def test_build_tools__ok(path: Path) -> None:
    is_ok(tools(path), "cmake 3.25.1, ninja 1.11.1")


def test_build_tools__missing(path: Path) -> None:
    is_bad(toolchain.build_tools(needed=True), "fail", "cmake and ninja not found", "-m pip install cmake ninja")
    program(path / "cmake", "exit 0")
    is_bad(toolchain.build_tools(needed=False), "warn", "ninja not found", "-m pip install ninja")


def test_build_tools__broken(path: Path) -> None:
    is_bad(tools(path, ninja="what?"), "fail", "/ninja --version: what?")
    program(path / "cmake", "echo no module named cmake >&2; exit 1")
    is_bad(toolchain.build_tools(needed=False), "warn", "/cmake --version: no module named cmake")


def test_build_tools__old(path: Path) -> None:
    is_bad(tools(path, "cmake version 3.9.6"), "fail", "cmake 3.9.6, ninja 1.11.1: cmake 3.18 is needed", "--upgrade cmake")


def test_git__ok() -> None:
    is_ok(toolchain.git(needed=True), "git version ")


def test_git__missing(path: Path) -> None:
    is_bad(toolchain.git(needed=True), "fail", "git is missing", "sudo apt-get install git")
    is_bad(toolchain.git(needed=False), "warn", "git is missing")


def test_git__broken(path: Path) -> None:
    program(path / "git", "exit 3")
    is_bad(toolchain.git(needed=True), "fail", "/git --version: exit code 3")


# --- system ---


def release(root, text: str) -> Path:
    root.write("proc/sys/kernel/osrelease", text + "\n")
    return root.path


def test_system__ok(root) -> None:
    is_ok(host.system(release(root, "6.1.0-13-amd64"), name="linux"), "Linux 6.1.0-13-amd64 on ")
    assert host.system(root.path, name="linux").found.endswith(", no container")


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope", "kubernetes"),
        ("proc/1/cgroup", "4:memory:/docker/0123\n", "docker"),
        ("proc/1/environ", "A=b\0container=systemd-nspawn\0C=d\0", "systemd-nspawn"),
    ],
)
def test_system__ok__in_a_container(root, file: str, text: str, kind: str) -> None:
    root.write(file, text)
    finding = host.system(release(root, "6.1.0"), name="linux")
    is_ok(finding, f", in a container ({kind})")
    assert finding.data["container"] == kind


def test_system__untested() -> None:
    is_bad(host.system(name="darwin"), "warn", "", "Linux on x86-64")


def test_system__wsl1(root) -> None:
    is_bad(host.system(release(root, "4.4.0-19041-Microsoft"), name="linux"), "fail", "WSL1", "--set-version")


def test_system__wsl2(root) -> None:
    finding = host.system(release(root, "5.15.153.1-microsoft-standard-WSL2"), name="linux")
    is_bad(finding, "warn", "WSL2", ".wslconfig")


# --- memory ---


def test_memory__ok(root, facts: GgufFacts) -> None:
    finding = memory.memory(root.memory(4096))
    is_ok(finding, "4.0 GiB of 8.0 GiB available")
    assert finding.data["available_bytes"] == 4 * GIB
    is_ok(memory.memory(root.path, need_bytes=memory.smallest_bytes(facts)), "; the model takes ")
    is_skipped(memory.memory(root.path / "nothing"), "does not tell")


def test_the_least_that_a_model_takes(facts: GgufFacts) -> None:
    layers = [facts.layer_tensors(layer) for layer in facts.moe_layers]
    used = sum(2 * t.size_bytes // 8 for tensors in layers for t in tensors)  # 2 of 8 experts
    assert memory.smallest_bytes(facts) == facts.dense_bytes + used < facts.tensor_bytes


def test_memory__little(root) -> None:
    is_bad(memory.memory(root.memory(1023)), "warn", "1023.0 MiB of 8.0 GiB available")


def test_memory__too_little(root) -> None:
    finding = memory.memory(root.memory(4096), need_bytes=4 * GIB + 1)
    is_bad(finding, "fail", "the model takes 4.0 GiB at least", "moestream needs 4.0 GiB")
    assert memory.memory(root.path, need_bytes=4 * GIB).status == "ok"


def test_memory__swapping(root) -> None:
    finding = memory.memory(root.memory(2048, swap_mib=8192, swap_free_mib=4000))
    is_bad(finding, "warn", "4.1 GiB of 8.0 GiB swap in use")
    assert memory.memory(root.memory(5000, swap_mib=8192, swap_free_mib=4000)).status == "ok"


def limited(root, left_mib: int, version: int = 2) -> Path:
    """A group of 4 GiB, of which so much is left when its file cache is counted as free; its parent has a wider limit."""
    root.memory(6144)
    folder, limit, usage, cache = {
        1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    }[version]
    root.write("proc/self/cgroup", "9:cpu:/other\n" + ("4:cpuset,memory:/a/b\n0::/\n" if version == 1 else "0::/a/b\n"))
    root.write(f"{folder}/a/{limit}", str(5 * GIB))
    root.write(f"{folder}/a/{usage}", "0")
    root.write(f"{folder}/a/b/{limit}", f"{4 * GIB}\n")
    root.write(f"{folder}/a/b/{usage}", f"{4 * GIB - (100 << 20)}\n")
    root.write(f"{folder}/a/b/memory.stat", f"anon 1\n{cache} {(left_mib - 100) << 20}\n")
    return root.path


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup__ok(root, version: int) -> None:
    is_ok(memory.cgroup(root.memory(6144)), "no limit")
    finding = memory.cgroup(limited(root, 3500, version))
    is_ok(finding, "limit 4.0 GiB, 3.4 GiB left")
    assert finding.data["group"] == "/a/b" and finding.data["left_bytes"] == 3500 << 20


@pytest.mark.parametrize("text", ["max\n", f"{2**63 - 4096}\n"])
def test_cgroup__ok__without_a_number(root, text: str) -> None:
    root.write("proc/self/cgroup", "0::/\n")
    root.write("sys/fs/cgroup/memory.max", text)
    root.write("sys/fs/cgroup/memory.current", "1\n")
    is_ok(memory.cgroup(root.memory(6144)), "no limit")


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup__tight(root, version: int) -> None:
    is_bad(memory.cgroup(limited(root, 3000, version)), "warn", "limit 4.0 GiB, 2.9 GiB left", "it limits /a/b")


def test_cgroup__too_little(root) -> None:
    finding = memory.cgroup(limited(root, 3500), need_bytes=4 * GIB)
    is_bad(finding, "fail", "3.4 GiB left; the model takes 4.0 GiB at least", "raise it to 4.0 GiB and more")
    is_bad(memory.cgroup(limited(root, 200)), "fail", "limit 4.0 GiB, 200.0 MiB left", "256.0 MiB and more")


def test_memlock__ok(root) -> None:
    is_ok(memory.memlock(None, gpu=True), "unlimited")
    is_ok(memory.memlock(8 << 20, gpu=False, root=root.memory(8192)), "at most 8.0 MiB")
    is_ok(memory.memlock(4 * GIB, gpu=True, root=root.path))


def test_memlock__small(root) -> None:
    is_bad(memory.memlock(8 << 20, gpu=True, root=root.memory(8192)), "warn", "at most 8.0 MiB", "ulimit -l unlimited")
    script = "import json; from moestream.doctor import memory; f = memory.memlock(memory.memlock_limit(), gpu=False)\n"
    script += "print(json.dumps([f.status, f.case, f.found]))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)),
    )  # fmt: skip
    assert json.loads(done.stdout) == ["warn", "small", "at most 64.0 KiB may be locked or pinned"]


def thp(root, text: str) -> Finding:
    root.write("sys/kernel/mm/transparent_hugepage/enabled", text + "\n")
    return memory.huge_pages(root.path)


def test_huge_pages__ok(root) -> None:
    is_skipped(memory.huge_pages(root.path), "this kernel has none")
    is_ok(thp(root, "always [madvise] never"), "madvise")
    is_ok(thp(root, "[always] madvise never"), "always")


def test_huge_pages__never(root) -> None:
    is_bad(thp(root, "always madvise [never]"), "warn", "never", "echo madvise")


def nodes(root, *mib: int) -> Finding:
    for i, n in enumerate(mib):
        root.write(f"sys/devices/system/node/node{i}/meminfo", f"Node {i} MemTotal:  {n * 1024} kB\nNode {i} MemFree: 1 kB\n")
    return memory.numa(root.path)


def test_numa__ok(root) -> None:
    is_skipped(memory.numa(root.path), "does not tell")
    is_ok(nodes(root, 4096, 0), "one node")


def test_numa__several(root) -> None:
    is_bad(nodes(root, 4096, 2048), "warn", "2 nodes: node0 4.0 GiB, node1 2.0 GiB", "--numa distribute")


# --- GPUs ---

ONE = Nvidia(True, "", "580.65.06", "13.0", (Gpu("NVIDIA H200", "9.0", 140 * GIB, 139 * GIB),))
TWO = replace(ONE, gpus=(Gpu("X", "8.6", 8 * GIB, GIB - 1, "0", "GPU-a"), Gpu("Y", "8.6", 8 * GIB, 7 * GIB, "1", "GPU-b")))
NOTHING = Nvidia(False, "nvidia-smi is not installed")


def smi(path: Path, text: str) -> None:
    program(path / "nvidia-smi", text)


def test_gpu_driver__ok(path: Path, root) -> None:
    smi(
        path,
        "echo 'NVIDIA H200, 580.65.06, 9.0, 143771, 143159, 0, GPU-aa'; echo 'NVIDIA \"X\", 580.65.06, 12.1, [N/A], [N/A], 1, GPU-bb'",
    )
    seen = gpu.look(root.path)
    assert seen.driver == "580.65.06" and seen.problem == ""
    assert seen.gpus == (
        Gpu("NVIDIA H200", "9.0", 143771 << 20, 143159 << 20, "0", "GPU-aa"),
        Gpu('NVIDIA "X"', "12.1", None, None, "1", "GPU-bb"),
    )
    is_ok(gpu.driver(replace(seen, cuda="13.0"), needed=True), "580.65.06, CUDA up to 13.0")
    is_skipped(gpu.driver(NOTHING, needed=False), "no GPU of NVIDIA")


def test_gpu_driver__absent(path: Path, root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_library_cuda", lambda: "")
    assert gpu.look(root.path) == NOTHING
    is_bad(gpu.driver(NOTHING, needed=True), "fail", "nvidia-smi is not installed", "--gpus all")
    root.write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    root.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    seen = gpu.look(root.path)
    assert seen.present
    is_bad(gpu.driver(seen, needed=False), "warn", "nvidia-smi is not installed")


def test_a_sound_card_of_nvidia_is_no_gpu(path: Path, root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_library_cuda", lambda: "")
    root.write("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")
    root.write("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")
    assert not gpu.look(root.path).present


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Driver/library version mismatch"),
        ("echo 'No devices were found'", "No devices were found"),
        ("exit 0", "finds no GPU"),
    ],
)
def test_gpu_driver__broken(path: Path, root, script: str, found: str) -> None:
    smi(path, script)
    seen = gpu.look(root.path)
    is_bad(gpu.driver(seen, needed=True), "fail", f"nvidia-smi: {found}" if "finds" in found else found, "restart")
    is_bad(gpu.driver(seen, needed=False), "warn", found)
    is_skipped(gpu.gpu(seen, {}, backend="cpu"), found)
    is_skipped(gpu.vram(seen, {}), found)


def test_gpu_driver__library() -> None:
    is_bad(gpu.driver(replace(ONE, cuda=""), needed=True), "fail", "no library libcuda.so.1", "compute,utility")


def test_versions_of_cuda() -> None:
    assert [gpu.cuda_version(n) for n in (11080, 12000, 12080, 13010)] == ["11.8", "12.0", "12.8", "13.1"]


def toolkit(path: Path, text: str) -> Finding:
    program(path / "nvcc", text)
    return gpu.cuda(ONE, engine=False)


def test_cuda__ok(path: Path) -> None:
    is_ok(toolkit(path, "echo 'Cuda compilation tools, release 12.8, V12.8.93'"), "CUDA 12.8 (")
    is_skipped(gpu.cuda(ONE, engine=True), "not needed")
    is_skipped(gpu.cuda(NOTHING, engine=False), "no GPU of NVIDIA")


def test_cuda__missing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    is_bad(gpu.cuda(ONE, engine=False), "warn", f"no nvcc in {tmp_path}/cuda/bin, which CUDA_HOME names", "CUDA_HOME")


def test_cuda__broken(path: Path) -> None:
    is_bad(toolkit(path, "echo hello"), "warn", "/nvcc --version: it says 'hello'")
    (path / "nvcc").write_bytes(b"\x7fELF, or not")
    is_bad(gpu.cuda(ONE, engine=False), "warn", "Exec format error")


def test_cuda__newer(path: Path) -> None:
    is_bad(toolkit(path, "echo release 14.0,"), "warn", "CUDA 14.0 (", "build with CUDA 13")
    assert toolkit(path, "echo release 13.2,").status == "ok"


def test_gpu__ok() -> None:
    is_ok(
        gpu.gpu(ONE, {"CUDA_VISIBLE_DEVICES": "0"}, backend="cuda"),
        "NVIDIA H200 (compute capability 9.0); CUDA_VISIBLE_DEVICES=0",
    )
    part = gpu.gpu(ONE, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, backend="cuda")
    is_ok(part, "NVIDIA H200 (compute capability 9.0); CUDA_VISIBLE_DEVICES=MIG-1")
    is_skipped(gpu.gpu(NOTHING, {}, backend="cpu"), "no GPU of NVIDIA")


@pytest.mark.parametrize("value", ["", "-1", "7", "nonsense", "0,0"])
def test_gpu__hidden(value: str) -> None:
    finding = gpu.gpu(ONE, {"CUDA_VISIBLE_DEVICES": value}, backend="cuda")
    is_bad(finding, "fail", f"CUDA_VISIBLE_DEVICES={value} hides all", "unset CUDA_VISIBLE_DEVICES")
    is_bad(gpu.gpu(ONE, {"CUDA_VISIBLE_DEVICES": value}, backend="cpu"), "warn", "hides all")


def test_gpu__unused() -> None:
    is_bad(gpu.gpu(ONE, {}, backend="cpu"), "warn", "computes on the CPU alone", "moestream build --backend cuda")


def test_vram__ok() -> None:
    is_ok(gpu.vram(ONE, {}), "139.0 GiB of 140.0 GiB free")
    is_ok(gpu.vram(replace(ONE, gpus=(Gpu("Thor", "11.0", None, None),)), {}), "shares the machine's memory")
    is_ok(gpu.vram(TWO, {}), "1024.0 MiB of 8.0 GiB free, 7.0 GiB of 8.0 GiB free")
    is_ok(gpu.vram(TWO, {"CUDA_VISIBLE_DEVICES": "GPU-b"}), "7.0 GiB of 8.0 GiB free")
    is_skipped(gpu.vram(TWO, {"CUDA_VISIBLE_DEVICES": "9"}), "CUDA_VISIBLE_DEVICES hides all GPUs")
    is_skipped(gpu.vram(NOTHING, {}), "no GPU of NVIDIA")


def test_vram__little() -> None:
    is_bad(gpu.vram(replace(ONE, gpus=(Gpu("X", "8.6", 8 * GIB, GIB - 1),)), {}), "warn", "of 8.0 GiB free", "nvidia-smi")
    is_bad(gpu.vram(TWO, {"CUDA_VISIBLE_DEVICES": "0"}), "warn", "of 8.0 GiB free", "nvidia-smi")


# --- io_uring ---


def test_io_uring__ok(root) -> None:
    is_ok(host.io_uring(root.path, lambda: (0, "")), "works")
    assert host.io_uring().status in ("ok", "warn")  # asks the kernel here, whatever that says


# Makes a system call fail with EPERM, as Docker's profile does.
FORBIDDEN = """
import ctypes, json, struct
from moestream.doctor import host
code = b"".join(struct.pack("HBBI", *i) for i in [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (6, 0, 0, 0x50000 | 1), (6, 0, 0, 0x7FFF0000)])
program = ctypes.create_string_buffer(code, len(code))
class Filter(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.addressof(program))), 0, 0) == 0
finding = host.io_uring(__import__("pathlib").Path("/nothing"))
print(json.dumps([finding.status, finding.case, finding.found]))
"""


def test_io_uring__refused(root) -> None:
    is_bad(host.io_uring(root.path, lambda: (errno.EPERM, "io_uring_setup")), "warn", "io_uring_setup: Operation not permitted")
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["warn", "refused", "io_uring_setup: Operation not permitted"]


def test_io_uring__disabled(root) -> None:
    root.write("proc/sys/kernel/io_uring_disabled", "2\n")
    finding = host.io_uring(root.path, lambda: (errno.EPERM, "io_uring_setup"))
    is_bad(finding, "warn", "kernel.io_uring_disabled=2", "sysctl kernel.io_uring_disabled=0")


def test_io_uring__missing(root) -> None:
    is_bad(host.io_uring(root.path, lambda: (errno.ENOSYS, "io_uring_setup")), "warn", "Function not implemented")


def test_io_uring__memory(root) -> None:
    finding = host.io_uring(root.path, lambda: (errno.ENOMEM, "io_uring_setup"))
    is_bad(finding, "warn", "io_uring_setup: Cannot allocate memory", "ulimit -l")


def test_io_uring__old(root) -> None:
    is_bad(
        host.io_uring(root.path, lambda: (errno.ENOTSUP, "io_uring is older than Linux 5.6")), "warn", "older than Linux 5.6"
    )


# --- the port ---


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        yield mine.getsockname()[1]


def test_port__ok() -> None:
    number = free_port("127.0.0.1")
    is_ok(host.port("127.0.0.1", number), f"127.0.0.1 port {number} is free")
    is_ok(host.port("127.0.0.1", 0), "any free one")


def test_port__taken(listening: int) -> None:
    is_bad(host.port("127.0.0.1", listening), "fail", f"port {listening} on 127.0.0.1 is in use by pid {os.getpid()}", "--port")
    is_bad(host.port("192.0.2.1", 8080), "fail", "not an address of this machine", "--host 127.0.0.1")


def test_port__own(listening: int) -> None:
    mark = ProcessMark.of(os.getpid())
    record = ServerRecord(
        port=listening, host="127.0.0.1", url=f"http://127.0.0.1:{listening}", state="ready", supervisor=mark, server=mark,
        detached=True, engine_id="e", backend="cpu", model="m.gguf", slots="8", argv=("llama-server",), log_path="x.log",
        started_s=1.5, api_key=None,
    )  # fmt: skip
    RecordStore().claim(record)
    finding = host.port("127.0.0.1", listening)
    is_bad(finding, "warn", "in use by a server of moestream (model m.gguf)", f"moestream stop --port {listening}")


# --- room ---


def test_home_space__ok(home: Path) -> None:
    finding = drives.home_space(home / "data", least_bytes=0, low_bytes=1)
    is_ok(finding, f"free at {home}/data")
    assert not home.exists()  # nothing is made


def test_home_space__full(home: Path) -> None:
    is_bad(drives.home_space(home, least_bytes=1 << 60), "fail", "free at", f"df -h {home.parent}; or set MOESTREAM_HOME")


def test_home_space__low(home: Path) -> None:
    is_bad(drives.home_space(home, least_bytes=0, low_bytes=1 << 60), "warn", "free at", "MOESTREAM_HOME")


def test_home_space__read_only() -> None:
    is_bad(drives.home_space(Path("/sys/kernel/moestream")), "fail", "/sys/kernel: ", "make /sys/kernel writable")


def test_models_space__ok(home: Path) -> None:
    is_ok(drives.models_space(home, least_bytes=0, low_bytes=1))


def test_models_space__full(home: Path) -> None:
    is_bad(drives.models_space(home, least_bytes=1 << 60), "fail", "free at", "moestream rm")


def test_models_space__low(home: Path) -> None:
    is_bad(drives.models_space(home, least_bytes=0, low_bytes=1 << 60), "warn", "free at", "moestream pull --to")


def test_models_space__read_only() -> None:
    is_bad(drives.models_space(Path("/sys/kernel/moestream")), "fail", "/sys/kernel: ")


# --- the model ---


def read_model(model: str) -> tuple[Finding, GgufFacts | None]:
    return files.model(config.merge({"model": model}, {}, []))


def test_model__ok(model_file: Path) -> None:
    finding, facts = read_model(str(model_file))
    is_ok(finding, f"{model_file}: qwen3moe, ")
    assert "in 1 file, 2 of 8 experts used" in finding.found
    assert facts and facts.files == (model_file,)


def test_model__ok__in_shards(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, "split", 3)
    is_ok(read_model(str(shards[1]))[0], "in 3 shards")


def test_model__wrong(tmp_path: Path, model_file: Path) -> None:
    assert read_model("nothing.gguf")[1] is None
    is_bad(read_model("nothing.gguf")[0], "fail", "no such model file: nothing.gguf", "that directory holds m.gguf")
    whole = model_file.read_bytes()
    model_file.write_bytes(whole[:-1000])
    is_bad(read_model(str(model_file))[0], "fail", "is truncated: tensor ", "download the file again")
    model_file.write_bytes(b"GGML" + whole[4:])
    is_bad(read_model(str(model_file))[0], "fail", str(model_file))
    shards = write_shards(tmp_path, "split", 3)
    shards[1].unlink()
    is_bad(read_model(str(shards[0]))[0], "fail", f"shard {shards[1].name} of 3 is missing", "the rest of the split set")
    is_bad(read_model("hf:some/where")[0], "fail", "not pulled", "moestream pull hf:some/where")


def test_model__dense(tmp_path: Path) -> None:
    made = tiny()
    made.tensors = [t for t in made.tensors if "_exps" not in str(t.name)]
    path = tmp_path / "dense.gguf"
    path.write_bytes(made.write())
    finding, facts = read_model(str(path))
    is_bad(finding, "warn", "no experts", "--slots off")
    assert facts is not None
    is_skipped(drives.read_speed(facts, drives.DIRECT_IO.ok("works")), "no experts")


def test_model_length__ok(tmp_path: Path, facts: GgufFacts) -> None:
    is_ok(files.length(facts))
    is_ok(files.length(gguf_facts.read(write_shards(tmp_path, "split", 3)[0])))
    is_ok(files.length(gguf_facts.read(DEMO)))


def test_model_length__longer(model_file: Path) -> None:
    with model_file.open("ab") as file:
        file.write(bytes(33))
    n = model_file.stat().st_size
    finding = files.length(gguf_facts.read(model_file))
    is_bad(finding, "warn", f"has {n} bytes, and its header accounts for {n - 33}", "download it again")
    assert finding.data == {"excess_bytes": 33}


@pytest.fixture
def pulled(home: Path, facts: GgufFacts) -> PulledModel:
    """The record of a pull of the model, and a link to it."""
    data = facts.files[0].read_bytes()
    file = ModelFile(facts.files[0].name, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    made = PulledModel("org/m", "Q4_0", "Q4_0", "0123456789abcdef", str(facts.files[0].parent), (file,), 1.0)
    ModelStore().write(made, pending=False)
    return made


def compared(facts: GgufFacts, *, hashed: bool = True) -> Finding:
    return files.content(facts, ModelStore(), hashed=hashed)


def test_model_content__ok(facts: GgufFacts) -> None:
    is_skipped(compared(facts), "no record of moestream pull")


def test_model_content__ok__hashed(facts: GgufFacts, pulled: PulledModel) -> None:
    is_skipped(compared(facts, hashed=False), "--hash compares all ")
    told: list[tuple[int, int]] = []
    finding = files.content(facts, ModelStore(), hashed=True, progress=lambda *now: told.append(now))
    is_ok(finding, "1 of 1 files are what the hub said at commit 0123456789")
    assert told[-1] == (pulled.size_bytes, pulled.size_bytes)


def test_model_content__size(facts: GgufFacts, pulled: PulledModel) -> None:
    with facts.files[0].open("ab") as file:
        file.write(b"x")
    for hashed in (True, False):
        finding = compared(facts, hashed=hashed)
        is_bad(
            finding, "fail", f"has {pulled.size_bytes + 1} bytes, and the hub's has {pulled.size_bytes}", "pull hf:org/m:Q4_0"
        )


def test_model_content__different(facts: GgufFacts, pulled: PulledModel) -> None:
    with facts.files[0].open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    assert gguf_facts.read(facts.files[0]) == facts  # nothing else sees it
    is_bad(compared(facts), "fail", "m.gguf is not what the hub said: sha256", "moestream rm org/m:Q4_0")


def test_model_content__unreadable(facts: GgufFacts, pulled: PulledModel) -> None:
    class ReadBefore(ModelStore):
        def all(self):
            return known

    known = ModelStore().all()
    with no_more_files():
        finding = files.content(facts, ReadBefore(), hashed=True)
    is_bad(finding, "fail", "Too many open files", "dmesg")


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- the drive ---

MODEL = Path("/data/m.gguf")


def test_drive__ok(root) -> None:
    root.disk("nvme0n1", "259:1")
    root.mounts(
        ("/", "8:1", "overlay", "overlay"), ("/data", "259:1", "ext4", "/dev/nvme0n1p1"), ("/data/m", "0:9", "nfs", "x:/y")
    )
    finding = drives.drive(MODEL, root.path)
    is_ok(finding, "NVMe nvme0n1, ext4 at /data")
    assert finding.data["rotational"] is False
    is_skipped(drives.drive(MODEL, root.path / "nothing"), "does not tell")
    root.mounts(("/", "0:99", "zfs", "tank/data"))
    is_ok(drives.drive(MODEL, root.path), "zfs at /; which drive is below is not known")


def test_drive__ok__with_spaces_and_later_mounts(root) -> None:
    root.disk("sda", "8:1")
    root.mounts(("/my\\040data", "0:9", "tmpfs", "tmpfs"), ("/my\\040data", "8:1", "xfs", "/dev/sda1"))
    is_ok(drives.drive(Path("/my data/m.gguf"), root.path), "SSD sda, xfs at /my data")


def test_drive__ok__virtual(root) -> None:
    """A virtual machine's drive that is said to turn, which nobody has set."""
    root.disk("vda", "254:1", rotational=1)
    root.disk("sdb", "8:17", rotational=1, vendor="QEMU")
    for device in ("254:1", "8:17"):
        is_ok(drives.drive(MODEL, root.mounts(("/", device, "ext4", "/dev/x"))), "virtual drive ")


def test_drive__memory(root) -> None:
    is_bad(drives.drive(MODEL, root.mounts(("/data", "0:25", "tmpfs", "tmpfs"))), "warn", "tmpfs at /data, in memory")


@pytest.mark.parametrize("fs", ["nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "ceph"])
def test_drive__network(root, fs: str) -> None:
    is_bad(
        drives.drive(MODEL, root.mounts(("/data", "0:25", fs, "srv:/x"))), "warn", f"{fs} at /data, not a local drive (srv:/x)"
    )


def test_drive__overlay(root) -> None:
    is_bad(drives.drive(MODEL, root.mounts(("/", "0:25", "overlay", "overlay"))), "warn", "overlay at /", "docker run -v")


def test_drive__hard_disk(root) -> None:
    root.disk("sda", "8:1", rotational=1)
    is_bad(drives.drive(MODEL, root.mounts(("/", "8:1", "ext4", "/dev/sda1"))), "warn", "hard disk sda, ext4 at /", "SSD")


def test_drive__hard_disk__below_lvm_and_btrfs(root) -> None:
    """One of the disks that are joined turns; and btrfs, which has device numbers of its own."""
    slow, fast = root.disk("sda", "8:1", rotational=1), root.disk("nvme0n1", "259:1")
    for below in (slow, fast):
        link = root.path / "sys/devices/virtual/block/dm-0/slaves" / below.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(below / f"{below.name}1")
    place = root.path / "sys/class/block/dm-0"
    place.parent.mkdir(parents=True)
    place.symlink_to(root.path / "sys/devices/virtual/block/dm-0")
    is_bad(drives.drive(MODEL, root.mounts(("/", "0:31", "btrfs", "/dev/dm-0"))), "warn", "hard disk dm-0, btrfs at /")


def test_drive__fuse(root) -> None:
    is_bad(drives.drive(MODEL, root.mounts(("/data", "0:25", "fuse.mergerfs", "a:b"))), "warn", "fuse.mergerfs at /data")


def ahead(root, kib: int) -> Finding:
    root.disk("sda", "8:1", read_ahead_kib=kib)
    return drives.read_ahead(MODEL, root.mounts(("/", "8:1", "ext4", "/dev/sda1")))


def test_read_ahead__ok(root) -> None:
    is_ok(ahead(root, 4096), "4096 KiB on sda")
    is_skipped(drives.read_ahead(MODEL, root.mounts(("/", "0:25", "nfs", "x:/y"))), "no block device")


def test_read_ahead__large(root) -> None:
    is_bad(ahead(root, 8192), "warn", "8192 KiB on sda", "/sys/block/sda/queue/read_ahead_kb")


def test_read_ahead__small(root) -> None:
    is_bad(ahead(root, 0), "warn", "0 KiB on sda", "/sys/block/sda/queue/read_ahead_kb")


def test_direct_io__ok(tmp_path: Path, model_file: Path) -> None:
    is_ok(drives.direct_io(model_file))
    before = sorted(tmp_path.iterdir())
    is_ok(drives.direct_io(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    is_skipped(drives.direct_io(Path("/sys/kernel")), "cannot be tried in /sys/kernel")


def test_direct_io__refused() -> None:
    is_bad(drives.direct_io(Path("/proc/version")), "warn", "/proc/version: Invalid argument", "ext4, xfs, btrfs")


def test_direct_io__unreadable(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    is_bad(drives.direct_io(tmp_path / "empty"), "fail", "empty: the file is empty")
    is_bad(drives.direct_io(tmp_path / "gone"), "fail", "gone: No such file or directory")


WORKS = drives.DIRECT_IO.ok("works")


def test_read_speed__ok(facts: GgufFacts) -> None:
    demo = gguf_facts.read(DEMO)
    finding = drives.read_speed(demo, WORKS, limit_s=0.05, enough_bytes_per_s=0)
    is_ok(finding, " MB/s in requests of up to ")
    assert finding.data["read_bytes"] > 0 and finding.data["in_flight"] == 4
    assert finding.data["token_bytes"] == sum(6 * demo.bytes_per_slot(layer) for layer in demo.moe_layers)
    is_skipped(drives.read_speed(facts, WORKS), "too little to measure with")
    is_skipped(drives.read_speed(demo, drives.DIRECT_IO.warn("refused", "x")), "not without direct reads")


def test_requests_cover_every_expert_once() -> None:
    demo = gguf_facts.read(DEMO)
    requests = list(drives.requests_of(demo, seed=3))
    assert all(at % 4096 == 0 and n % 4096 == 0 and 0 < n <= 1 << 20 for _, at, n in requests)
    covered = set()
    for _, at, n in requests:
        covered.update(range(at // 4096, (at + n) // 4096))
    wanted = {
        page for t in demo.expert_tensors for page in range(t.offset // 4096, -(-(t.offset + t.size_bytes) // 4096))
    }  # fmt: skip
    assert covered == wanted
    assert requests != list(drives.requests_of(demo, seed=4))


def test_large_experts_are_read_in_pieces(tmp_path: Path, facts: GgufFacts) -> None:
    one = replace(facts.expert_tensors[0], offset=100, bytes_per_expert=(2 << 20) + 1, shape=(1, 1, 1))
    sizes = [(at, n) for _, at, n in drives.requests_of(replace(facts, expert_tensors=(one,)))]
    assert sizes == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 4096)]


def test_read_speed__slow() -> None:
    finding = drives.read_speed(gguf_facts.read(DEMO), WORKS, limit_s=0.05, enough_bytes_per_s=1e15)
    is_bad(finding, "warn", " MB/s in requests of up to ", "more slots")


def test_read_speed__unreadable(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DEMO.read_bytes())
    facts = gguf_facts.read(copy)
    os.truncate(copy, facts.expert_tensors[0].offset // 2)
    is_bad(drives.read_speed(facts, WORKS), "fail", "copy.gguf at byte ", "dmesg")
    copy.unlink()
    is_bad(drives.read_speed(facts, WORKS), "fail", "No such file or directory")


def test_every_case_has_a_test() -> None:
    wanted = {f"{check.name}__{case}" for check in CHECKS for case in (*check.remedies, "ok")}
    tested = {"__".join(name.removeprefix("test_").split("__")[:2]) for name in globals() if "__" in name.strip("_")}
    assert {name.replace("-", "_") for name in wanted} == {name for name in tested if not name.startswith("_")}
