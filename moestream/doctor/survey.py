"""All checks in order, each with what it depends on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moestream import paths
from moestream.doctor import drives, engine, files, gpu, host, memory, toolchain
from moestream.doctor.checks import Check, Finding, Status
from moestream.models.store import ModelStore
from moestream.server.arguments import DEFAULT_HOST, DEFAULT_PORT
from moestream.upstream.disk import nearest_existing

# In the order in which they are shown.
CHECKS: tuple[Check, ...] = (
    files.CONFIG,
    engine.ENGINE,
    toolchain.COMPILER,
    toolchain.BUILD_TOOLS,
    toolchain.GIT,
    host.SYSTEM,
    memory.MEMORY,
    memory.CGROUP,
    memory.MEMLOCK,
    memory.HUGE_PAGES,
    memory.NUMA,
    gpu.DRIVER,
    gpu.CUDA,
    gpu.GPU,
    gpu.VRAM,
    host.IO_URING,
    host.PORT,
    drives.HOME_SPACE,
    drives.MODELS_SPACE,
    files.MODEL,
    files.LENGTH,
    files.CONTENT,
    drives.DRIVE,
    drives.READ_AHEAD,
    drives.DIRECT_IO,
    drives.READ_SPEED,
)
_GPU_BACKENDS = ("cuda", "hip", "vulkan", "metal")


@dataclass(frozen=True)
class Survey:
    """What was found, one finding for each of CHECKS, in their order; and which model that was about."""

    findings: tuple[Finding, ...]
    model: str | None

    def count(self, status: Status) -> int:
        return sum(finding.status is status for finding in self.findings)


def examine(
    model: str | None,
    *,
    hashed: bool = False,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Run every check. One that cannot be carried out is skipped, and says why; none keeps others from running.

    Args:
        model: a name or a path, as for ``moestream start``.
        hashed: compare all of the model's content with the record of its pull.
        root: for /proc, /sys and /dev.
        progress: of reading the content: bytes done, all bytes.
    """
    found: dict[str, Finding] = {}

    def run(check: Check, look: Callable[[], Finding]) -> Finding:
        try:
            finding = look()
        except OSError as error:
            finding = check.skipped(f"cannot be found out: {error.filename or ''} {error.strerror or error}")
        found[check.name] = finding
        return finding

    setting, merged = files.settings({"model": model}, environment)
    found[files.CONFIG.name] = setting
    backend = merged["backend"] if merged else None
    state, used = engine.engine(backend)
    found[engine.ENGINE.name] = state
    # Without one in use, the one that is asked for counts.
    on_gpu = (used.backend if used else backend) in _GPU_BACKENDS
    on_cuda = (used.backend if used else backend) == "cuda"

    facts = None
    if model is None:
        for check in (files.MODEL, files.LENGTH, files.CONTENT, drives.READ_SPEED):
            found[check.name] = check.skipped("no MODEL is given")
    elif merged is None:
        found[files.MODEL.name] = files.MODEL.skipped("not before the configuration is right")
    else:
        found[files.MODEL.name], facts = files.model(merged)
    for check in (files.LENGTH, files.CONTENT, drives.READ_SPEED) if model and not facts else ():
        found[check.name] = check.skipped("not without a model that can be read")

    for check, look in (
        (toolchain.COMPILER, toolchain.compiler),
        (toolchain.BUILD_TOOLS, toolchain.build_tools),
        (toolchain.GIT, toolchain.git),
    ):
        run(check, lambda look=look: look(needed=used is None))
    need_bytes = memory.smallest_bytes(facts) if facts else None
    run(host.SYSTEM, lambda: host.system(root))
    run(memory.MEMORY, lambda: memory.memory(root, need_bytes=need_bytes))
    run(memory.CGROUP, lambda: memory.cgroup(root, need_bytes=need_bytes))
    run(memory.MEMLOCK, lambda: memory.memlock(memory.memlock_limit(), gpu=on_gpu, root=root))
    run(memory.HUGE_PAGES, lambda: memory.huge_pages(root))
    run(memory.NUMA, lambda: memory.numa(root))

    nvidia = gpu.look(root)
    run(gpu.DRIVER, lambda: gpu.driver(nvidia, needed=on_cuda))
    run(gpu.CUDA, lambda: gpu.cuda(nvidia, engine=bool(used) and on_cuda))
    run(gpu.GPU, lambda: gpu.gpu(nvidia, environment, backend=used.backend if used else None))
    run(gpu.VRAM, lambda: gpu.vram(nvidia, environment))

    run(host.IO_URING, lambda: host.io_uring(root))
    address = (merged["host"], merged["port"]) if merged else (DEFAULT_HOST, DEFAULT_PORT)
    run(host.PORT, lambda: host.port(*address))
    run(drives.HOME_SPACE, lambda: drives.home_space(paths.data_dir()))
    run(drives.MODELS_SPACE, lambda: drives.models_space(paths.models_dir()))

    def place() -> Path:
        return Path(os.path.realpath(facts.files[0] if facts else nearest_existing(paths.models_dir())))

    if facts:
        run(files.LENGTH, lambda: files.length(facts))
        run(files.CONTENT, lambda: files.content(facts, ModelStore(), hashed=hashed, progress=progress))
    on = run(drives.DRIVE, lambda: drives.drive(place(), root))
    run(drives.READ_AHEAD, lambda: drives.read_ahead(place(), root))
    direct = run(drives.DIRECT_IO, lambda: drives.direct_io(place()))
    if facts and on.case == "memory":
        found[drives.READ_SPEED.name] = drives.READ_SPEED.skipped("the model is in memory")
    elif facts:
        run(drives.READ_SPEED, lambda: drives.read_speed(facts, direct))
    return Survey(tuple(found[check.name] for check in CHECKS), str(facts.files[0]) if facts else model)
