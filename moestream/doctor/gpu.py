"""NVIDIA's GPUs: driver, toolkit, what is visible, free memory. Others are not looked at."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moestream import nvidia_smi, proc
from moestream.doctor.checks import Check, Finding, Remedy
from moestream.server.report import size
from moestream.upstream import build

_TIMEOUT_S = 30
_LITTLE_BYTES = 1 << 30

DRIVER = Check(
    "gpu-driver",
    "NVIDIA's driver, where there is a GPU of NVIDIA or an engine for one",
    {
        "absent": Remedy(
            "there is none",
            "install NVIDIA's driver; in a container: start it with --gpus all (NVIDIA Container Toolkit); or use another engine: "
            "moestream build --backend cpu",
        ),
        "broken": Remedy(
            "nvidia-smi fails",
            "after an update of the driver restart the machine; in a container the driver's files must be those of the host: start it anew",
        ),
        "library": Remedy(
            "libcuda.so.1 is missing",
            "install the driver's CUDA library; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
    },
)
CUDA = Check(
    "cuda",
    "the CUDA toolkit, which `moestream build --backend cuda` needs",
    {
        "missing": Remedy("nvcc is missing", "to build an engine for the GPU: install the CUDA toolkit and set CUDA_HOME"),
        "broken": Remedy("nvcc does not run", "install the CUDA toolkit anew, or name another one with CUDA_HOME"),
        "newer": Remedy(
            "it is of a later generation than the driver",
            "update the driver, or build with CUDA {version} (CUDA_HOME names it)",
        ),
    },
)
GPU = Check(
    "gpu",
    "which GPUs a server would see, and whether the engine in use computes on one",
    {
        "hidden": Remedy("CUDA_VISIBLE_DEVICES hides all", "unset CUDA_VISIBLE_DEVICES, or name one: CUDA_VISIBLE_DEVICES=0"),
        "unused": Remedy("the engine in use has no code for it", "moestream build --backend cuda"),
    },
)
VRAM = Check(
    "vram",
    "free memory of the GPUs",
    {"little": Remedy("less than 1 GiB is free on each", "nvidia-smi shows which processes use it; end those that are not needed")},
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """One GPU; the memory is None where it has none of its own."""

    name: str
    capability: str
    total_bytes: int | None
    free_bytes: int | None
    index: str = "0"
    uuid: str = ""


@dataclass(frozen=True)
class Nvidia:
    """What is known of NVIDIA's side of a machine.

    Attributes:
        present: whether there is a GPU of NVIDIA, or a part of its driver.
        problem: why nvidia-smi does not say more; "" when it does. "nvidia-smi is not installed" where it is missing.
        driver: its version; "" when not known.
        cuda: the newest CUDA that the driver's library knows, "13.0"; "" without that library.
    """

    present: bool
    problem: str
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


def _has_hardware(root: Path) -> bool:
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        if proc.text(vendor).strip() == "0x10de" and proc.text(vendor.parent / "class").startswith("0x03"):
            return True
    return any((root / place).exists() for place in ("proc/driver/nvidia/version", "dev/nvidiactl"))


def _bytes(mib: str) -> int | None:
    return int(mib) << 20 if mib.isdecimal() else None


def _library_cuda() -> str:
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return ""
    except (OSError, AttributeError):
        return ""
    return cuda_version(version.value)


def cuda_version(number: int) -> str:
    """As the driver counts: 12080 is "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def look(root: Path = Path("/")) -> Nvidia:
    """Ask nvidia-smi, the driver's library and the PCI bus."""
    present = _has_hardware(root)
    cuda = _library_cuda()
    answer = nvidia_smi.ask("name", "driver_version", "compute_cap", "memory.total", "memory.free", "index", "uuid")
    if answer.problem:
        return Nvidia(present or bool(cuda) or answer.problem != nvidia_smi.NOT_INSTALLED, answer.problem, cuda=cuda)
    gpus = tuple(
        Gpu(name, capability, _bytes(total), _bytes(free), index, uuid)
        for name, _, capability, total, free, index, uuid in answer.rows
    )
    return Nvidia(True, "", answer.rows[0][1], cuda, gpus)


def _shown(nvidia: Nvidia, environment: Mapping[str, str]) -> Sequence[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES does not hide; all where it names parts of cards."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or "MIG-" in wanted:
        return nvidia.gpus
    return [nvidia.gpus[i] for i in nvidia_smi.visible([(g.index, g.uuid) for g in nvidia.gpus], wanted)]


def driver(nvidia: Nvidia, *, needed: bool) -> Finding:
    """Args: needed: the engine in use is for CUDA."""
    if not nvidia.present and not needed:
        return DRIVER.skipped("no GPU of NVIDIA")
    if nvidia.problem:
        case = "absent" if nvidia.problem == nvidia_smi.NOT_INSTALLED else "broken"
        return DRIVER.problem(needed, case, nvidia.problem)
    if not nvidia.cuda:
        return DRIVER.problem(needed, "library", f"driver {nvidia.driver}, and no library libcuda.so.1 that works")
    return DRIVER.ok(f"{nvidia.driver}, CUDA up to {nvidia.cuda}", driver=nvidia.driver, cuda=nvidia.cuda)


def cuda(nvidia: Nvidia, *, engine: bool) -> Finding:
    """Args: engine: an engine for CUDA is in use already."""
    if not nvidia.present:
        return CUDA.skipped("no GPU of NVIDIA")
    if engine:
        return CUDA.skipped("not needed: the engine is built")
    program, looked = build.find_cuda_compiler()
    if not program:
        return CUDA.warn("missing", f"no nvcc {looked}")
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        release = re.search(r"release ([0-9]+)\.([0-9]+)", done.stdout)
        problem = "" if release else f"it says {done.stdout.strip()[:80]!r}"
    except OSError as error:
        release, problem = None, error.strerror or str(error)
    except subprocess.TimeoutExpired:
        release, problem = None, f"nothing for {_TIMEOUT_S} s"
    if not release:
        return CUDA.warn("broken", f"{program} --version: {problem}")
    text = f"CUDA {release[1]}.{release[2]} ({program})"
    known = nvidia.cuda.partition(".")[0]
    if known and int(release[1]) > int(known):
        return CUDA.warn("newer", f"{text}, and the driver knows CUDA up to {nvidia.cuda}", {"version": known})
    return CUDA.ok(text)


def gpu(nvidia: Nvidia, environment: Mapping[str, str], *, backend: str | None) -> Finding:
    """Args: backend: of the engine in use; None without one."""
    if not nvidia.gpus:
        return GPU.skipped(nvidia.problem if nvidia.present else "no GPU of NVIDIA")
    names = ", ".join(f"{g.name} (compute capability {g.capability})" for g in nvidia.gpus)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    shown = _shown(nvidia, environment)
    if not shown:
        return GPU.problem(backend == "cuda", "hidden", f"{names}; CUDA_VISIBLE_DEVICES={wanted} hides all of them")
    if backend == "cpu":
        return GPU.warn("unused", f"{names}; the engine in use computes on the CPU alone")
    return GPU.ok(names + (f"; CUDA_VISIBLE_DEVICES={wanted}" if wanted else ""), count=len(shown))


def vram(nvidia: Nvidia, environment: Mapping[str, str]) -> Finding:
    if not nvidia.gpus:
        return VRAM.skipped(nvidia.problem if nvidia.present else "no GPU of NVIDIA")
    shown = _shown(nvidia, environment)
    if not shown:
        return VRAM.skipped("CUDA_VISIBLE_DEVICES hides all GPUs")
    own = [g for g in shown if g.free_bytes is not None and g.total_bytes is not None]
    if not own:
        return VRAM.ok("shares the machine's memory")
    text = ", ".join(f"{size(g.free_bytes or 0)} of {size(g.total_bytes or 0)} free" for g in own)
    free = [g.free_bytes for g in own]
    if max(g.free_bytes or 0 for g in own) < _LITTLE_BYTES:
        return VRAM.warn("little", text, free_bytes=free)
    return VRAM.ok(text, free_bytes=free)
