"""Options that several commands have: what they are called, take, and say in --help. ``start`` has all of them."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Annotated, Any

import typer

from moestream.server.arguments import DEFAULT_READY_TIMEOUT_S, MAX_IO_THREADS
from moestream.upstream.engines import BACKENDS


class Io(StrEnum):
    auto = "auto"
    direct = "direct"
    buffered = "buffered"


class Policy(StrEnum):
    lru = "lru"
    lfu = "lfu"
    heat = "heat"


class Prefetch(StrEnum):
    auto = "auto"
    on = "on"
    off = "off"


class Switch(StrEnum):
    on = "on"
    off = "off"


class Pool(StrEnum):
    auto = "auto"
    device = "device"
    host = "host"


class GpuPath(StrEnum):
    auto = "auto"
    copy = "copy"
    mailbox = "mailbox"


Ram = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Plan with so much memory, margin included.", show_default="what is free now"),
]
Vram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Plan with so much GPU memory; slots are in RAM, unless they are asked for on the card.",
        show_default="what the engine uses",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="Context in tokens; 0: as the model was trained. Default: 8192, or the model's if less."
    ),
]
# Checked by hand: Typer's message for a range leaves out the value.
IoThreads = Annotated[int | None, typer.Option(metavar="N", help=f"Reads of experts at a time, 1 to {MAX_IO_THREADS}.")]
IoMode = Annotated[Io | None, typer.Option(help="How experts are read.")]
PolicyName = Annotated[Policy | None, typer.Option(help="Which expert leaves its slot.")]
Overlap = Annotated[Switch | None, typer.Option(help="Compute with what is there while experts are read.")]
RamTier = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|auto|none",
        help="Memory below the slots, for experts that lost theirs, as 4GiB; auto: what is left. Default: none; for slots on a card, half of what is available.",
    ),
]
PrefetchMode = Annotated[
    Prefetch | None,
    typer.Option(help="Read ahead what the next layer will probably choose. Default: auto, while it measures faster."),
]
PoolPlace = Annotated[
    Pool | None, typer.Option(help="Where a GPU's slots lie: in its memory, or in the machine's.", show_default="auto")
]
GpuPathName = Annotated[
    GpuPath | None, typer.Option(help="Who looks after slots on a GPU: the host, or the GPU.", show_default="auto")
]
RequireGpu = Annotated[
    bool | None,
    typer.Option(
        "--require-gpu/--no-require-gpu", help="Refuse to start where no GPU would compute with experts.", show_default="no"
    ),
]
RouterTopK = Annotated[
    int | None, typer.Option(metavar="K", help="Pin the K most used experts of --map in each layer to their slots.")
]
Backend = Annotated[
    str | None, typer.Option(help="Which engine, where several are built.", autocompletion=lambda: list(BACKENDS))
]
OneBackend = Annotated[str, typer.Option(help="cpu, cuda, vulkan, metal or hip.", autocompletion=lambda: list(BACKENDS))]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Give up when it is not ready by then; 0: never.",
        show_default=f"{DEFAULT_READY_TIMEOUT_S:g}",
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """Options of a command line by the names that files have for them, choices by their value; None: not given."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in options.items()}
