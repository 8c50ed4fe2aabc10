"""The system: what it is, its containers, io_uring, and the port to listen on."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from moestream import proc
from moestream.doctor.checks import Check, Finding, Remedy
from moestream.errors import MoestreamError
from moestream.server import address
from moestream.server.records import RecordStore, ServerRecord

SYSTEM = Check(
    "system",
    "operating system, container, WSL",
    {
        "untested": Remedy("it is another system than Linux", "moestream is tested on Linux on x86-64 only; see the limits in README.md"),
        "wsl1": Remedy("it is WSL 1, which has no direct reads and no memory limits", "wsl --set-version DISTRIBUTION 2 (in Windows)"),
        "wsl2": Remedy(
            "it is WSL 2",
            "keep models in the Linux file system, not below /mnt/c; memory= in .wslconfig says how much of the machine it gets (half of it "
            "by default), and as much at most can be pinned for a GPU",
        ),
    },
)  # fmt: skip
IO_URING = Check(
    "io-uring",
    "whether experts can be read through io_uring; threads are used otherwise, which is the default anyway",
    {
        "missing": Remedy("the kernel has none", "nothing needs to be done: reads go by threads; Linux 5.6 or later has io_uring"),
        "disabled": Remedy("kernel.io_uring_disabled is set", "nothing needs to be done: reads go by threads; or: sudo sysctl kernel.io_uring_disabled=0"),
        "refused": Remedy(
            "it is refused",
            "nothing needs to be done: reads go by threads; Docker refuses it unless its seccomp profile allows io_uring_setup, io_uring_enter "
            "and io_uring_register",
        ),
        "memory": Remedy(
            "there is no memory for its rings, which counts as locked memory before Linux 5.12", "ulimit -l unlimited; reads go by threads otherwise"
        ),
        "old": Remedy("it is too old to read", "nothing needs to be done: reads go by threads; Linux 5.6 or later can"),
    },
)  # fmt: skip
PORT = Check(
    "port",
    "whether the address that a server would listen on (--host, --port of the configuration; else 127.0.0.1:8080) is free",
    {
        "own": Remedy("a server of moestream has it", "moestream stop --port {port}, or start another on a free port: --port {free}"),
        "taken": Remedy("another program has it, or the address cannot be used", "{hint}"),
    },
)  # fmt: skip

_SYS_IO_URING_SETUP, _SYS_IO_URING_REGISTER = 425, 427  # the same on every architecture
_FEAT_SINGLE_MMAP = 1  # Linux 5.4
_REGISTER_PROBE, _OP_READ = 8, 22  # Linux 5.6


def container(root: Path = Path("/")) -> str | None:
    """The kind of container that this is; None when it is none that is known."""
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = proc.text(root / "proc/1/cgroup")
    for kind, word in (("kubernetes", "kubepods"), ("docker", "docker"), ("lxc", "lxc")):
        if re.search(rf"[/:]{word}\b", groups):
            return kind
    if (root / ".dockerenv").exists():
        return "docker"
    named = re.search(r"(?:^|\0)container=([^\0]+)", proc.text(root / "proc/1/environ"))
    return named[1] if named else None


def system(root: Path = Path("/"), *, name: str = sys.platform) -> Finding:
    """Args: name: as of ``sys.platform``."""
    if name != "linux":
        return SYSTEM.warn("untested", f"{platform.platform()}")
    release = proc.text(root / "proc/sys/kernel/osrelease").strip() or platform.release()
    inside = container(root)
    text = f"Linux {release} on {platform.machine()}"
    data = {"kernel": release, "container": inside}
    if "microsoft" in release.lower():
        case = "wsl2" if "WSL2" in release or "microsoft-standard" in release else "wsl1"
        return SYSTEM.problem(case == "wsl1", case, f"{text}, {case.upper()}", **data)
    return SYSTEM.ok(f"{text}, in a container ({inside})" if inside else f"{text}, no container", **data)


class _RingParameters(ctypes.Structure):
    _fields_ = (("before", ctypes.c_uint32 * 5), ("features", ctypes.c_uint32), ("after", ctypes.c_uint32 * 24))


def ask_io_uring() -> tuple[int, str]:
    """Make a ring and ask whether it can read.

    Returns:
        0, or the kernel's error number, and what failed; ``ENOTSUP`` for a ring that cannot read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    parameters = _RingParameters()
    ring = libc.syscall(ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_uint(2), ctypes.byref(parameters))
    if ring < 0:
        return ctypes.get_errno(), "io_uring_setup"
    try:
        if not parameters.features & _FEAT_SINGLE_MMAP:
            return errno.ENOTSUP, "io_uring is older than Linux 5.4"
        room = (ctypes.c_uint8 * (16 + 256 * 8))()  # struct io_uring_probe
        done = libc.syscall(
            ctypes.c_long(_SYS_IO_URING_REGISTER), ctypes.c_uint(ring), ctypes.c_uint(_REGISTER_PROBE), room, ctypes.c_uint(256)
        )
        if done < 0:
            return ctypes.get_errno(), "io_uring_register"
        supported = room[0] >= _OP_READ and room[16 + _OP_READ * 8 + 2] & 1
        return (0, "") if supported else (errno.ENOTSUP, "io_uring is older than Linux 5.6")
    finally:
        os.close(ring)


def io_uring(root: Path = Path("/"), ask: Callable[[], tuple[int, str]] = ask_io_uring) -> Finding:
    """Args: ask: as :func:`ask_io_uring`."""
    if sys.platform != "linux":
        return IO_URING.skipped("on Linux only")
    number, what = ask()
    if number == 0:
        return IO_URING.ok("works")
    disabled = proc.text(root / "proc/sys/kernel/io_uring_disabled").strip() or "0"
    if number == errno.ENOTSUP:
        return IO_URING.warn("old", what)
    text = f"{what}: {os.strerror(number)}"
    if number == errno.ENOMEM:
        return IO_URING.warn("memory", text)
    if number == errno.ENOSYS:
        return IO_URING.warn("missing", text)
    if disabled != "0":
        return IO_URING.warn("disabled", f"{text}; kernel.io_uring_disabled={disabled}")
    return IO_URING.warn("refused", text)


def port(host: str, number: int) -> Finding:
    """Args: number: 0 for any free one."""
    if number == 0:
        return PORT.ok("any free one is taken (--port 0)")
    try:
        address.check_free(host, number)
    except MoestreamError as error:
        record = RecordStore().read(number)
        if isinstance(record, ServerRecord) and record.alive:
            text = f"{host} port {number} is in use by a server of moestream (model {record.model})"
            return PORT.warn("own", text, {"port": number, "free": address.free_port(host, number)}, port=number)
        return PORT.fail("taken", error.message, {"hint": error.hint or "choose another with --host and --port"}, port=number)
    return PORT.ok(f"{host} port {number} is free", port=number)
