"""What a server reports, as lines for a person. Pure."""

from __future__ import annotations

from moestream.server.client import Stats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n_bytes: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    value, index = float(n_bytes), 0
    while abs(value) >= 1024 and index < len(_UNITS) - 1:
        value, index = value / 1024, index + 1
    unit = _UNITS[index]
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """``3725`` → ``1 h 2 min``."""
    s = max(0, int(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def slots_line(stats: Stats, *, requested: str = "", sleeping: bool = False) -> str:
    """The slots in force, or why there are none.

    Args:
        stats: what the server says of streaming.
        requested: the slots it was started with: a number, ``auto``, ``all``, ``off``.
        sleeping: whether it has freed its model; it says then that nothing streams, which is not for good.
    """
    if not stats.available:
        return f"unknown: {stats.reason}"
    if sleeping and requested != "off":
        return f"none while the server sleeps; streaming resumes with the next request (--slots {requested})"
    if not stats.streaming:
        return "off: expert streaming is off, all weights are loaded as llama.cpp does"
    raw = stats.raw or {}
    io = raw.get("io") or {}
    counts = [layer["slots"] for layer in raw.get("layers") or [] if "slots" in layer]
    slots = f"{min(counts)} to {max(counts)}" if counts and min(counts) != max(counts) else raw.get("slots")
    text = f"{slots} of {raw.get('n_expert')} experts in each of {raw.get('n_layer_moe')} MoE layers"
    text += f" ({raw.get('n_expert_used')} used per token), policy {raw.get('policy')}"
    text += f", {io.get('mode')} reads, {io.get('in_flight')} in flight by {io.get('threads')} {'thread' if io.get('threads') == 1 else 'threads'}"
    text += " with io_uring" if io.get("backend") == "uring" else ""
    text += f", overlap {'on' if raw.get('overlap') else 'off'}"
    if (placement := raw.get("placement", "cpu")) != "cpu":
        text += f", experts on {placement}"
    if gpu := raw.get("gpu_path"):
        path, reason = gpu.get("in_force"), gpu.get("reason")
        text += {"mailbox": ", the card looks after its slots", "copy": ", the host looks after the card's slots"}.get(path, "")
        text += f" ({reason})" if reason and path == "copy" else ""
    if ram := (raw.get("memory") or {}).get("ram_bytes"):
        text += f", {size(ram)} of RAM for experts without a slot"
    if (prefetch := raw.get("prefetch") or {}) and not prefetch.get("reason"):
        text += f", prefetch {prefetch.get('requested')}"
    if pin := (raw.get("map") or {}).get("pin"):
        text += f", {pin} experts of {raw['map'].get('name')} pinned in each"
    if (warm := raw.get("warm", "off")) != "off":
        text += ", filled beforehand in the background" if warm == "background" else f", filled beforehand for at most {warm}"
    return text


def kernels_line(stats: Stats) -> str | None:
    """Which kernels are used, and of which stock llama.cpp the bits are."""
    kernels = (stats.raw or {}).get("kernels") or {}
    if not kernels:
        return None
    text = f"experts {kernels.get('experts')}, dense weights {kernels.get('dense')}"
    if same_as := kernels.get("same_bits_as"):
        text += f"; the same bits as {same_as}"
    return text


_MEMORY = (
    ("pool_bytes", "expert slots"),
    ("staging_bytes", "staging"),
    ("ram_bytes", "RAM tier"),
    ("guess_bytes", "guesses"),
    ("bounce_bytes", "bounce buffers"),
    ("dense_bytes", "dense weights"),
    ("kv_bytes", "KV cache"),
    ("compute_bytes", "compute"),
)


def memory_line(stats: Stats) -> str | None:
    """The memory the server accounts for, None when it does not say."""
    memory = stats.memory
    if not memory:
        return None
    parts = [f"{label} {size(memory[key])}" for key, label in _MEMORY if memory.get(key)]
    total = memory.get("total_bytes")
    on_devices = f", {size(memory['device_bytes'])} of it on devices" if memory.get("device_bytes") else ""
    head = [f"{size(total)} in all{on_devices}"] if total is not None else []
    return ": ".join(filter(None, [*head, ", ".join(parts)]))


def traffic_line(stats: Stats) -> str | None:
    """Totals of all layers since the start; None when streaming is off or unknown."""
    if not stats.streaming:
        return None
    rate = stats.hit_rate
    if rate is None:
        return "no expert was looked up yet"
    text = (
        f"hit rate {rate:.1%}, {stats.total('hits')} hits, {stats.total('misses')} misses, "
        f"{stats.total('bytes_read') / 2**20:.1f} MiB read, {stats.total('stall_us') / 1000:.0f} ms stalled"
    )
    if ram_hits := stats.total("ram_hits"):
        text += f", {ram_hits} misses in the RAM tier"
    if guesses := stats.total("guesses"):
        text += f", {stats.total('guess_hits')} of {guesses} guesses right"
    errors = stats.total("read_errors")
    return text + (f", {errors} READ ERRORS" if errors else "")


def table(rows: list[tuple[str, str | None]]) -> str:
    """``label  value`` lines, aligned; rows without a value are left out."""
    kept = [(label, value) for label, value in rows if value is not None]
    width = max((len(label) for label, _ in kept), default=0)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in kept)
