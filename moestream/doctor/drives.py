"""The drive that a model is on, and room on the drives that moestream writes to."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moestream.doctor.checks import Check, Finding, Remedy
from moestream.gguf_facts import GgufFacts
from moestream.server.report import size
from moestream.upstream.disk import FULL, nearest_existing

DRIVE = Check(
    "drive",
    "what MODEL lies on, or else the folder of pulled models",
    {
        "memory": Remedy("it is a file system in memory (tmpfs)", "move the model to a drive: there it takes memory that its experts then lack"),
        "network": Remedy("it is a network or shared file system", "copy the model to a local drive, at best NVMe; read-speed shows what this one gives"),
        "overlay": Remedy("it is a container's own file system", "put the model on a volume: docker run -v /models:/models …"),
        "hard-disk": Remedy("it is a hard disk", "move the model to an SSD: a hard disk moves its head for every expert; read-speed shows what that gives"),
        "fuse": Remedy("it is a file system in user space (FUSE)", "copy the model to a local drive with a file system of the kernel"),
    },
)  # fmt: skip
READ_AHEAD = Check(
    "read-ahead",
    "how much the kernel reads ahead on that drive; reads of experts ask for none, the rest of the model is read with it",
    {
        "large": Remedy(
            "it is more than 4 MiB: loading reads experts along that lie beside dense weights",
            "echo 128 | sudo tee /sys/block/{device}/queue/read_ahead_kb",
        ),
        "small": Remedy(
            "it is less than 32 KiB: loading is slow", "echo 128 | sudo tee /sys/block/{device}/queue/read_ahead_kb"
        ),
    },
)
DIRECT_IO = Check(
    "direct-io",
    "whether experts can be read past the page cache (O_DIRECT)",
    {
        "refused": Remedy(
            "the file system refuses it", "move the model to a file system with direct reads (ext4, xfs, btrfs); reads go through the page cache here"
        ),
        "unreadable": Remedy("the read fails in another way", "check the permissions and the drive: sudo dmesg | tail"),
    },
)  # fmt: skip
READ_SPEED = Check(
    "read-speed",
    "with MODEL: how fast its experts are read, at random, past the page cache, four requests at a time, for half a second",
    {
        "slow": Remedy(
            "it is less than 200 MB/s", "move the model to a faster drive, or keep more experts in memory: more slots, or a smaller quant"
        ),
        "unreadable": Remedy("a read fails", "check the drive: sudo dmesg | tail; and the file: moestream doctor MODEL --hash"),
    },
)  # fmt: skip


def _space(name: str, what: str, low: str, elsewhere: str) -> Check:
    return Check(
        name,
        what,
        {
            "full": Remedy("less than 100 MiB is free", f"free some space: df -h {{path}}; {elsewhere}"),
            "low": Remedy(f"less than {low} is free", f"free some space: df -h {{path}}; {elsewhere}"),
            "read-only": Remedy("it cannot be written", f"make {{path}} writable for this user; {elsewhere}"),
        },
    )


HOME_SPACE = _space(
    "home-space",
    "room for engines, downloads and logs in moestream's own folder",
    "2 GiB",
    "or set MOESTREAM_HOME to another disk",
)
MODELS_SPACE = _space(
    "models-space",
    "room for models in the folder that `moestream pull` puts them into",
    "20 GiB",
    "moestream rm removes models; moestream pull --to puts them elsewhere",
)

_NETWORK = re.compile(
    r"nfs4?|cifs|smb3?|smbfs|9p|virtiofs|vboxsf|vmhgfs|ceph|glusterfs|fuse\.(sshfs|glusterfs|ceph\S*|s3fs|gcsfuse|rclone|juicefs)"
    r"|lustre|beegfs|gpfs|afs|drvfs|fuse\.vmhgfs-fuse|ocfs2|gfs2"
)
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_VIRTUAL_VENDORS = ("qemu", "vmware", "msft", "google", "vbox", "virtual")
_LARGE_KIB, _SMALL_KIB = 4096, 32
ALIGNMENT = 4096  # as engine/reader.cpp
REQUEST_BYTES = 1 << 20  # likewise
N_IN_FLIGHT = 4  # likewise
_LEAST_MEASURED_BYTES = 4 << 20
ENOUGH_BYTES_PER_S = 200_000_000
MIB, GIB = 1 << 20, 1 << 30


# --- what it is ---


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo; ``device`` is ``MAJOR:MINOR``."""

    point: str
    device: str
    fs: str
    source: str


@dataclass(frozen=True)
class Disk:
    """A whole block device, or what several are joined to.

    Attributes:
        name: as in /sys/block.
        rotational: whether one of the disks below says that it turns; None where that cannot be relied on.
        kind: ``NVMe``, ``SSD``, ``hard disk`` or ``virtual drive``.
    """

    name: str
    rotational: bool | None
    kind: str
    read_ahead_kib: int | None


def mount_of(path: Path, root: Path = Path("/")) -> Mount | None:
    """The mount that a path, absolute and without links, is on; None where the system does not tell."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    best: Mount | None = None
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if len(fields) < 5 or len(kind) < 2:
            continue
        point, source = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text) for text in (fields[4], kind[1]))
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and (best is None or len(point) >= len(best.point)):  # the last of several in one place is on top
            best = Mount(point, fields[2], kind[0], source)
    return best


def disk_of(mount: Mount, root: Path = Path("/")) -> Disk | None:
    """The block device below a mount; None where there is none, or the system does not tell."""
    folder = root / "sys/dev/block" / mount.device
    if not folder.exists() and mount.source.startswith("/dev/"):  # btrfs has numbers of its own
        folder = root / "sys/class/block" / os.path.basename(os.path.realpath(mount.source))
    if not folder.exists():
        return None
    return _disk(folder.resolve(), root)


def _disk(folder: Path, root: Path) -> Disk:
    if (folder / "partition").exists():
        folder = folder.parent
    read_ahead = _text(folder / "queue/read_ahead_kb")
    below = [_disk(link.resolve(), root) for link in sorted(folder.glob("slaves/*"))]
    if below:  # LVM, RAID, encryption
        slowest = max(below, key=lambda d: (bool(d.rotational), d.kind == "virtual drive"))
        rotational, kind = slowest.rotational, slowest.kind
    else:
        rotational, kind = _kind(folder)
    return Disk(folder.name, rotational, kind, int(read_ahead) if read_ahead.isdecimal() else None)


def _kind(folder: Path) -> tuple[bool | None, str]:
    name = folder.name
    vendor = _text(folder / "device/vendor").lower()
    # What a virtual machine says of turning is a default that nobody has set.
    if re.match(r"(vd|xvd)[a-z]", name) or any(word in vendor for word in _VIRTUAL_VENDORS):
        return None, "virtual drive"
    rotational = _text(folder / "queue/rotational")
    if rotational == "1":
        return True, "hard disk"
    return False, "NVMe" if name.startswith("nvme") else "SSD" if rotational == "0" else "drive"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def drive(path: Path, root: Path = Path("/")) -> Finding:
    """Args: path: absolute and without links."""
    mount = mount_of(path, root)
    if mount is None:
        return DRIVE.skipped("this system does not tell")
    disk = disk_of(mount, root)
    data = {
        "path": str(path), "file_system": mount.fs, "mount_point": mount.point, "device": disk and disk.name,
        "kind": disk and disk.kind, "rotational": disk and disk.rotational,
    }  # fmt: skip
    text = f"{mount.fs} at {mount.point}"
    if mount.fs in _MEMORY:
        return DRIVE.warn("memory", f"{text}, in memory", **data)
    if _NETWORK.fullmatch(mount.fs):
        return DRIVE.warn("network", f"{text}, not a local drive ({mount.source})", **data)
    if mount.fs == "overlay":
        return DRIVE.warn("overlay", f"{text}, a container's layers", **data)
    if mount.fs.startswith("fuse") and mount.fs != "fuseblk":
        return DRIVE.warn("fuse", f"{text}, in user space", **data)
    if disk is None:
        return DRIVE.ok(f"{text}; which drive is below is not known", **data)
    text = f"{disk.kind} {disk.name}, {text}"
    return DRIVE.warn("hard-disk", text, **data) if disk.rotational else DRIVE.ok(text, **data)


def read_ahead(path: Path, root: Path = Path("/")) -> Finding:
    """Args: path: as for :func:`drive`."""
    mount = mount_of(path, root)
    disk = mount and disk_of(mount, root)
    if disk is None or disk.read_ahead_kib is None:
        return READ_AHEAD.skipped("no block device is known")
    text = f"{disk.read_ahead_kib} KiB on {disk.name}"
    data = {"read_ahead_bytes": disk.read_ahead_kib * 1024, "device": disk.name}
    if disk.read_ahead_kib > _LARGE_KIB:
        return READ_AHEAD.warn("large", text, {"device": disk.name}, **data)
    if disk.read_ahead_kib < _SMALL_KIB:
        return READ_AHEAD.warn("small", text, {"device": disk.name}, **data)
    return READ_AHEAD.ok(text, **data)


# --- how it reads ---


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_once(path: str | Path) -> None:
    with _opened(path) as fd, mmap.mmap(-1, ALIGNMENT) as room:
        if not os.preadv(fd, [room], 0):
            raise OSError(errno.ENODATA, "the file is empty")


def direct_io(path: Path) -> Finding:
    """Args: path: a model's file, or a folder; in one that can be written a file without a name is read."""
    if not hasattr(os, "O_DIRECT"):
        return DIRECT_IO.skipped("not on this system")
    try:
        if path.is_dir():
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(bytes(ALIGNMENT))
                file.flush()
                _read_once(f"/proc/self/fd/{file.fileno()}")
        else:
            _read_once(path)
    except OSError as error:
        text = f"{path}: {error.strerror}"
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return DIRECT_IO.warn("refused", text)
        if path.is_dir():
            return DIRECT_IO.skipped(f"cannot be tried in {text}")
        return DIRECT_IO.fail("unreadable", text)
    return DIRECT_IO.ok("works")


@dataclass(frozen=True)
class Rate:
    """What was read. ``request_bytes``: the most that was asked for at once."""

    n_bytes: int
    elapsed_s: float
    request_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / self.elapsed_s


def requests_of(facts: GgufFacts, seed: int = 0) -> Iterator[tuple[Path, int, int]]:
    """Aligned reads (file, offset, bytes) that cover experts in random order, each expert's part once, as the engine cuts them."""
    tensors = facts.expert_tensors
    chosen = [(t, e) for t in range(len(tensors)) for e in range(tensors[t].n_expert)]
    random.Random(seed).shuffle(chosen)
    for number, expert in chosen:
        t = tensors[number]
        start = t.offset + expert * t.bytes_per_expert
        at, end = start // ALIGNMENT * ALIGNMENT, start + t.bytes_per_expert
        while at < end:
            n = min(REQUEST_BYTES, -(-(end - at) // ALIGNMENT) * ALIGNMENT)
            yield facts.files[t.file_index], at, n
            at += n


def measure(facts: GgufFacts, limit_s: float = 0.5, seed: int | None = None) -> Rate:
    """Read experts of a model past the page cache, N_IN_FLIGHT requests at a time.

    Raises:
        OSError: a read fails, or the file ends too early.
    """
    waiting = requests_of(facts, random.SystemRandom().randrange(1 << 30) if seed is None else seed)
    lock = threading.Lock()
    sizes = dict(zip(facts.files, facts.file_bytes, strict=True))
    begin_s = time.monotonic()
    largest = 0

    def work() -> int:
        nonlocal largest
        n_read = 0
        with contextlib.ExitStack() as stack:
            room = memoryview(stack.enter_context(mmap.mmap(-1, REQUEST_BYTES)))
            stack.callback(room.release)
            files: dict[Path, int] = {}
            while time.monotonic() - begin_s < limit_s:
                with lock:
                    wanted = next(waiting, None)
                    if wanted is None:
                        break
                    path, at, n = wanted
                    largest = max(largest, n)
                if path not in files:
                    files[path] = stack.enter_context(_opened(path))
                with room[:n] as part:
                    got = os.preadv(files[path], [part], at)
                if got < min(n, sizes[path] - at):
                    raise OSError(errno.EIO, f"{path} at byte {at}: {got} of {n} bytes")
                n_read += got
        return n_read

    with ThreadPoolExecutor(N_IN_FLIGHT) as pool:
        total = sum(done.result() for done in [pool.submit(work) for _ in range(N_IN_FLIGHT)])
    return Rate(total, time.monotonic() - begin_s, largest)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def read_speed(
    facts: GgufFacts, direct: Finding, *, limit_s: float = 0.5, enough_bytes_per_s: float = ENOUGH_BYTES_PER_S
) -> Finding:
    """Args: direct: what :func:`direct_io` found: without direct reads memory would be measured.   limit_s: of all reads."""
    if not facts.is_moe:
        return READ_SPEED.skipped("the model has no experts")
    if direct.status != "ok":
        return READ_SPEED.skipped("not without direct reads: memory would be measured")
    if facts.expert_bytes < _LEAST_MEASURED_BYTES:
        return READ_SPEED.skipped(f"{size(facts.expert_bytes)} of experts are too little to measure with")
    try:
        rate = measure(facts, limit_s)
    except OSError as error:
        return READ_SPEED.fail("unreadable", f"{error.filename or ''} {error.strerror}")
    token_bytes = sum(facts.n_expert_used * facts.bytes_per_slot(layer) for layer in facts.moe_layers)
    token_s = token_bytes / rate.bytes_per_s
    text = (
        f"{rate.bytes_per_s / 1e6:.0f} MB/s in requests of up to {size(rate.request_bytes)}; "
        f"a token whose experts are all missing waits {_duration(token_s)} for {size(token_bytes)}"
    )
    data = {
        "bytes_per_s": round(rate.bytes_per_s), "read_bytes": rate.n_bytes, "elapsed_s": round(rate.elapsed_s, 3),
        "request_bytes": rate.request_bytes, "in_flight": N_IN_FLIGHT, "token_bytes": token_bytes,
    }  # fmt: skip
    return READ_SPEED.warn("slow", text, **data) if rate.bytes_per_s < enough_bytes_per_s else READ_SPEED.ok(text, **data)


# --- room ---


def _room(check: Check, folder: Path, least_bytes: int, low_bytes: int) -> Finding:
    there = nearest_existing(folder)
    free = shutil.disk_usage(there).free
    text = f"{size(free)} free at {folder}"
    values = {"path": shlex.quote(str(there))}
    data = {"path": str(folder), "free_bytes": free}
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return check.fail("full" if error.errno in FULL else "read-only", f"{there}: {error.strerror}", values, **data)
    if free < least_bytes:
        return check.fail("full", text, values, **data)
    return check.warn("low", text, values, **data) if free < low_bytes else check.ok(text, **data)


def home_space(folder: Path, *, least_bytes: int = 100 * MIB, low_bytes: int = 2 * GIB) -> Finding:
    """Args: folder: need not be there yet."""
    return _room(HOME_SPACE, folder, least_bytes, low_bytes)


def models_space(folder: Path, *, least_bytes: int = 100 * MIB, low_bytes: int = 20 * GIB) -> Finding:
    """Args: folder: need not be there yet."""
    return _room(MODELS_SPACE, folder, least_bytes, low_bytes)
