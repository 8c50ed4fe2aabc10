"""What this machine is, as far as an engine that was built elsewhere depends on it."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moestream import nvidia_smi, proc


@dataclass(frozen=True)
class Machine:
    """Facts of a machine.

    Attributes:
        os, arch: ``linux``, ``x86_64``.
        cpu_features: the instruction sets, in the words of /proc/cpuinfo.
        glibc: "2.36"; "" with another C library.
        nvidia_driver: "580.65.06"; "" without one.
        gpu_capabilities: of NVIDIA's GPUs: "9.0", …
        has_library: whether the system's loader finds a library by its name.
    """

    os: str
    arch: str
    cpu_features: frozenset[str]
    glibc: str
    nvidia_driver: str
    gpu_capabilities: tuple[str, ...]
    has_library: Callable[[str], bool]


def version_numbers(version: str) -> tuple[int, ...]:
    """ "2.36" as (2, 36), to compare with; "" is less than any."""
    return tuple(int(number) for number in version.split(".")) if version else ()


def _cpu_features() -> frozenset[str]:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", proc.text(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _glibc() -> str:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return ""
    return version if name == "glibc" and re.fullmatch(r"[0-9]+(\.[0-9]+)*", version) else ""


def _nvidia() -> tuple[str, tuple[str, ...]]:
    """The driver's version and the GPUs' compute capabilities; "" and none without a driver that works."""
    rows = [
        (driver, capability)
        for driver, capability in nvidia_smi.ask("driver_version", "compute_cap").rows
        if re.fullmatch(r"[0-9]+(?:\.[0-9]+)*", driver) and re.fullmatch(r"[0-9]+\.[0-9]+", capability)
    ]
    return (rows[0][0] if rows else ""), tuple(capability for _, capability in rows)


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def this_machine() -> Machine:
    """Look at this machine; takes as long as nvidia-smi does, where that is installed."""
    driver, capabilities = _nvidia()
    return Machine(
        os=sys.platform,
        arch=platform.machine(),
        cpu_features=_cpu_features(),
        glibc=_glibc(),
        nvidia_driver=driver,
        gpu_capabilities=capabilities,
        has_library=_has_library,
    )
