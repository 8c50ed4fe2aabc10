"""From settings to the command line of llama-server. Pure: nothing is read, probed or started."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moestream.errors import MoestreamError
from moestream.sizes import parse_size

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
MAX_IO_THREADS = 256  # the engine takes no more

# Arguments of llama-server that moestream sets itself: the spellings upstream takes, and the flag to use instead
# (None: there is nothing to choose).
_OWNED: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("-m", "--model"), "--model"),
    (("-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), "--model"),
    (("--models-dir", "--models-preset"), "--model"),
    (("--host",), "--host"),
    (("--port",), "--port"),
    (("--reuse-port",), None),
    (("--metrics",), None),
    (("-c", "--ctx-size"), "--ctx"),
    (("-np", "--parallel"), "--parallel"),
    (("--moe-slots",), "--slots"),
    (("--moe-io-threads",), "--io-threads"),
    (("--moe-io",), "--io"),
    (("--moe-policy",), "--policy"),
    (("--moe-overlap",), "--overlap"),
    (("--moe-ram",), "--ram-tier"),
    (("--moe-prefetch",), "--prefetch"),
    (("--moe-pool",), "--pool"),
    (("--moe-gpu-path",), "--gpu-path"),
    (("--moe-require-gpu",), "--require-gpu"),
    (("--moe-map",), "--map"),
    (("--moe-map-pin",), "--router-top-k"),
    (("--moe-warm",), "--warm"),
)

# The engine's flags that are start's own, by their names there.
ENGINE_FLAGS = {
    spelling: ours for spellings, ours in _OWNED for spelling in spellings if ours and spelling.startswith("--moe-")
}

# Fill empty slots in the background, delay nothing for it. The engine's own default is not to: tools that end soon gain nothing.
DEFAULT_WARM = "0"
MAX_WARM_S = 86400
DEFAULT_READY_TIMEOUT_S = 900.0
MAX_DIGITS = 1000  # Python refuses to read numbers with more than 4300


@dataclass(frozen=True)
class ServerSettings:
    """What ``moestream start`` was asked for. None means: leave it to llama-server.

    Attributes:
        model: the file given to ``-m``; of a split model the first shard.
        slots: expert slots in each MoE layer: a number, ``auto``, ``all``, ``map`` for what the router map says of each layer, or
            ``off`` for no streaming at all.
        ram: memory to plan with, a size; None: what is free.
        vram: memory of GPUs to plan with for all but experts, a size; None: what the engine uses.
        ctx: context length in tokens, 0 for what the model was trained with.
        parallel: requests served at a time.
        io_threads: reads of experts at a time.
        io: ``auto``, ``direct`` or ``buffered`` reads.
        policy: who is evicted: ``lru``, ``lfu`` or ``heat``.
        overlap: ``on`` or ``off``: whether a layer computes with what is there while experts are read.
        ram_tier: memory below the slots, for experts that lost theirs: a size, ``auto`` for what is left, or ``none``.
        prefetch: ``auto``, ``on`` or ``off``: whether experts are read ahead that the next layer will probably choose.
        pool: ``auto``, ``device`` or ``host``: in whose memory slots lie.
        gpu_path: ``auto``, ``copy`` or ``mailbox``: who looks after slots on a GPU, the host or the GPU.
        require_gpu: whether the engine refuses to start where no GPU would compute with experts.
        map: the model's router map.
        kept_map: whether to start with the router map that is kept of the model; None: unless another one is given. False: nothing is
            recorded for it either.
        learn: ``on`` or ``off``: whether what is chosen goes into the kept map; None: where that is the one to start with.
        router_top_k: experts of each layer, the most used of the map, that never leave their slot.
        warm: seconds that start-up may wait for slots to be filled beforehand (0: they are filled in the background), or ``off``; None:
            ``DEFAULT_WARM`` where experts are streamed.
        planned: further arguments for llama-server that a plan has chosen.
        extra: further arguments for llama-server, passed on as they are; they follow ``planned``, and the last of two counts.
    """

    model: Path
    slots: str = "auto"
    ram: str | None = None
    vram: str | None = None
    ctx: int | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    parallel: int | None = None
    io_threads: int | None = None
    io: str | None = None
    policy: str | None = None
    overlap: str | None = None
    ram_tier: str | None = None
    prefetch: str | None = None
    pool: str | None = None
    gpu_path: str | None = None
    require_gpu: bool | None = None
    map: Path | None = None
    kept_map: bool | None = None
    learn: str | None = None
    router_top_k: int | None = None
    warm: str | None = None
    planned: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def streaming(self) -> bool:
        return self.slots != "off"

    @property
    def has_budget(self) -> bool:
        """Whether it was said how much memory there is to plan with."""
        return self.ram is not None or self.vram is not None

    def without_streaming(self) -> ServerSettings:
        """The same, with nothing that means something to streaming alone."""
        return replace(self, slots="off", learn=None, kept_map=False, planned=(), **dict.fromkeys(STREAMING_OPTIONS))


# Options that mean something to streaming alone, beside ``slots``, ``learn`` and ``kept_map``.
STREAMING_OPTIONS = (
    "ram", "vram", "io_threads", "io", "policy", "overlap", "ram_tier", "prefetch", "pool", "gpu_path", "require_gpu", "map",
    "router_top_k", "warm",
)  # fmt: skip


def parse_slots(value: str, words: Sequence[str] = ("auto", "all", "map", "off")) -> str:
    """Check ``--slots``; returns it normalised.

    Args:
        words: what it may be, beside a number.

    Raises:
        MoestreamError: it is neither a positive number nor one of the words.
    """
    text = value.strip().lower()
    if text in words:
        return text
    if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS and int(text) > 0:
        return str(int(text))
    raise MoestreamError(
        f"--slots {value}: expected a number of expert slots per layer, {', '.join(words[:-1])} or {words[-1]}",
        hint="--slots auto sizes them from the memory that is free",
    )


def check_io_threads(value: int) -> int:
    """Refuse what the engine would refuse later.

    Raises:
        MoestreamError: out of range.
    """
    if not 1 <= value <= MAX_IO_THREADS:
        raise MoestreamError(
            f"--io-threads {value}: expected a number from 1 to {MAX_IO_THREADS}",
            hint="leave it out for 4, or what the drive measures better with",
        )
    return value


def check_warm(value: str) -> str:
    """Refuse what the engine would refuse later.

    Raises:
        MoestreamError: neither ``off`` nor a number of seconds.
    """
    if value != "off" and not (value.isascii() and value.isdigit() and len(value) < MAX_DIGITS and int(value) <= MAX_WARM_S):
        raise MoestreamError(
            f"--warm {value}: expected off, or a number of seconds up to {MAX_WARM_S}",
            hint="--warm 0 fills slots in the background and delays nothing",
        )
    return value


def check_ram_tier(value: str) -> str:
    """Refuse what the engine would refuse later.

    Raises:
        MoestreamError: neither ``auto`` nor ``none`` nor a size.
    """
    if value not in ("auto", "none"):
        parse_size("--ram-tier", value)
    return value


def check_budget(flag: str, value: str) -> str:
    """Refuse what is no size.

    Raises:
        MoestreamError: names the flag and the value.
    """
    parse_size(flag, value)
    return value


def check_top_k(value: int) -> int:
    """Refuse what is no number of experts.

    Raises:
        MoestreamError: it is negative.
    """
    if value < 0:
        raise MoestreamError(f"--router-top-k {value}: expected a number of experts", hint="leave it out to pin none")
    return value


def flag_of(argument: str) -> str:
    """The flag as upstream reads it: long ones may be spelt with underscores."""
    flag = argument.split("=", 1)[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag


def check_extra(extra: Sequence[str]) -> None:
    """Refuse arguments after ``--`` that moestream sets itself.

    Raises:
        MoestreamError: names the argument and the flag to use instead.
    """
    if extra and not extra[0].startswith("-"):
        raise MoestreamError(
            f"unexpected argument '{extra[0]}'",
            hint=f"a model is given with --model {extra[0]}; arguments for llama-server follow after --",
        )
    for argument in extra:
        flag = flag_of(argument)
        for spellings, ours in _OWNED:
            if flag not in spellings:
                continue
            if ours is None:
                raise MoestreamError(
                    f"{argument} after -- collides with moestream start, which decides about {spellings[-1]} itself",
                    hint=f"leave out {argument}",
                )
            raise MoestreamError(
                f"{argument} after -- collides with moestream's own {ours}",
                hint=f"use moestream start {ours} … and leave out {argument}",
            )


def _streaming_flags(settings: ServerSettings) -> list[tuple[str, str, int | str]]:
    """The engine's flags that are given: ours, the engine's, the value."""
    flags = (
        ("--io-threads", "--moe-io-threads", settings.io_threads),
        ("--io", "--moe-io", settings.io),
        ("--policy", "--moe-policy", settings.policy),
        ("--overlap", "--moe-overlap", settings.overlap),
        ("--ram-tier", "--moe-ram", settings.ram_tier),
        ("--prefetch", "--moe-prefetch", settings.prefetch),
        ("--pool", "--moe-pool", settings.pool),
        ("--gpu-path", "--moe-gpu-path", settings.gpu_path),
        ("--require-gpu", "--moe-require-gpu", "on" if settings.require_gpu else None),
        ("--map", "--moe-map", settings.map and str(settings.map)),
        ("--router-top-k", "--moe-map-pin", settings.router_top_k),
        ("--warm", "--moe-warm", settings.warm),
    )
    return [(ours, engines, value) for ours, engines, value in flags if value is not None]


def check_streaming_flags(settings: ServerSettings) -> None:
    """Refuse flags that cannot be honoured, and values the engine would refuse later.

    Raises:
        MoestreamError: names the flags and the values.
    """
    top_k = settings.router_top_k
    if settings.io_threads is not None:
        check_io_threads(settings.io_threads)
    if settings.warm is not None:
        check_warm(settings.warm)
    if settings.ram_tier is not None:
        check_ram_tier(settings.ram_tier)
    for flag, size in (("--ram", settings.ram), ("--vram", settings.vram)):
        if size is not None:
            check_budget(flag, size)
    if top_k is not None:
        check_top_k(top_k)
    if settings.map is not None and settings.kept_map is not None:
        other = "--kept-map" if settings.kept_map else "--no-map"
        raise MoestreamError(f"--map {settings.map} cannot be combined with {other}", hint="leave out one of them")
    if settings.map is None and (top_k or settings.slots == "map"):
        what = f"--router-top-k {top_k}" if top_k else "--slots map"
        raise MoestreamError(f"{what} needs a router map", hint="add --map FILE; moestream map make writes one")
    budgets = [(flag, size) for flag, size in (("--ram", settings.ram), ("--vram", settings.vram)) if size is not None]
    if budgets and settings.slots == "map":
        raise MoestreamError(
            f"{_said(budgets)} cannot be combined with --slots map: the map says how many slots there are",
            hint=f"leave out {budgets[0][0]}, or --slots auto",
        )
    given = budgets + [(flag, value) for flag, _, value in _streaming_flags(settings)]
    if settings.learn == "on":
        given.append(("--learn", "on"))
    if given and not settings.streaming:
        flags = _said(given)
        raise MoestreamError(
            f"{flags} cannot be combined with --slots off: without streaming no experts are read",
            hint=f"leave out {', '.join(flag for flag, _ in given)}, or stream: --slots auto",
        )


def _said(given: Sequence[tuple[str, int | str]]) -> str:
    return ", ".join(flag if flag == "--require-gpu" else f"{flag} {value}" for flag, value in given)


def build_argv(server: Path, settings: ServerSettings) -> list[str]:
    """The command line that starts llama-server with these settings.

    Args:
        server: path of the llama-server program.
        settings: see :class:`ServerSettings`.

    Raises:
        MoestreamError: the settings contradict each other.
    """
    check_extra(settings.extra)
    check_streaming_flags(settings)
    argv = [str(server), "-m", str(settings.model)]
    if settings.streaming:
        argv += ["--moe-slots", settings.slots]
        for _, engines, value in _streaming_flags(replace(settings, warm=settings.warm or DEFAULT_WARM)):
            argv += [engines, str(value)]
        argv += settings.planned
    argv += ["--metrics", "--host", settings.host, "--port", str(settings.port)]
    if settings.ctx is not None:
        argv += ["-c", str(settings.ctx)]
    if settings.parallel is not None:
        argv += ["-np", str(settings.parallel)]
    return [*argv, *settings.extra]


def first_of(extra: Sequence[str], flags: Collection[str]) -> str | None:
    """The first of these flags among extra arguments, as it is spelt there; None where none is given."""
    return next((a for a in extra if flag_of(a) in flags), None)


def value_after(extra: Sequence[str], *flags: str) -> str | None:
    """The value of the last of these flags among extra arguments, None where it is not given."""
    found = None
    for i, argument in enumerate(extra[:-1]):
        if flag_of(argument) in flags:
            found = extra[i + 1]
    return found
