"""Between a server's command line and a plan: what arguments mean to a plan, and what a plan means to arguments. Pure.

``start`` passes on what comes out, ``plan`` says it, ``plan --check`` reads it from a server that runs: one code, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import architectures, state
from moestream.planning.memory import RAM_AUTO, Wishes
from moestream.planning.plan import Budget, Settled
from moestream.planning.state import ContextShape
from moestream.server import report
from moestream.server.arguments import flag_of, value_after
from moestream.sizes import parse_size

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
DEFAULT_PARALLEL = 4  # llama-server's, when nobody says
PROMPT_CACHE_MIB = 8192  # likewise
_OFF = ("0", "false", "off", "disabled")  # as upstream reads switches in the environment

# What takes memory that no plan reckons with: the flags, and llama-server's variables for them.
_BESIDE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("-md", "--model-draft", "--spec-draft-model"), ("LLAMA_ARG_SPEC_DRAFT_MODEL",)),
    (("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), ("LLAMA_ARG_HFD_REPO",)),
    (("-mm", "--mmproj", "-mmu", "--mmproj-url"), ("LLAMA_ARG_MMPROJ", "LLAMA_ARG_MMPROJ_URL")),
    (("--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"), ()),
    (("--swa-full",), ("LLAMA_ARG_SWA_FULL",)),
)
# What says where weights go, as a plan with a GPU does.
ON_GPU = ("-ngl", "--gpu-layers", "--n-gpu-layers")
PLACING = (*ON_GPU, "-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe")


def check_most_slots(slots: str, facts: GgufFacts, name: str) -> None:
    """Args: name: of the model, for the message.

    Raises:
        MoestreamError: more slots are asked for than a layer has experts.
    """
    if slots.isdigit() and int(slots) > facts.n_expert:
        raise MoestreamError(
            f"--slots {slots}: too many, a layer of {name} has {facts.n_expert} experts",
            hint="--slots all keeps every expert in memory",
        )


def check_cache_type(flag: str, value: str) -> str:
    """A ggml type of the KV cache, upper case.

    Raises:
        MoestreamError: llama-server does not take it.
    """
    if value.lower() not in CACHE_TYPES:
        raise MoestreamError(f"{flag} {value}: expected {', '.join(CACHE_TYPES[:-1])} or {CACHE_TYPES[-1]}", hint=f"{flag} f16")
    return value.upper()


def parse_tier(value: str) -> int:
    """``--ram-tier`` as the engine reads it: bytes, ``RAM_AUTO``, or 0 for none.

    Raises:
        MoestreamError: it is no size.
    """
    words = {"none": 0, "auto": RAM_AUTO}
    return words[value.lower()] if value.lower() in words else parse_size("--ram-tier", value)


def slots_wanted(text: str, facts: GgufFacts) -> int | None:
    """``--slots`` as a plan takes it; None: as many as fit."""
    if text == "all":
        return max(facts.n_expert, 1)
    return int(text) if text.isdigit() else None


@dataclass(frozen=True)
class _Said:
    """What llama-server is told, by arguments or its own environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]

    def value(self, variable: str, *flags: str) -> str | None:
        given = value_after(self.argv, *flags)
        return given if given is not None else self.environment.get(variable) or None

    def number(self, variable: str, *flags: str) -> int | None:
        text = self.value(variable, *flags)
        try:
            return None if text is None else int(text)
        except ValueError as error:
            raise MoestreamError(f"{flags[-1]} {text}: expected a number", hint="llama-server would refuse it") from error

    def switch(self, variable: str, on: Sequence[str], off: Sequence[str]) -> bool | None:
        """The last of two flags without value; None: neither."""
        found = [flag_of(a) in on for a in self.argv if flag_of(a) in (*on, *off)]
        if found:
            return found[-1]
        text = self.environment.get(variable)
        return None if not text else text.lower() not in _OFF


def wishes_of(
    argv: Sequence[str], environment: Mapping[str, str], facts: GgufFacts, *, repacked: frozenset[str], slots: str | None = None
) -> Wishes:
    """What a command line of llama-server asks for.

    Args:
        environment: with llama-server's own variables.
        repacked: types whose weights the engine's kernels want repacked here.
        slots: instead of what ``--moe-slots`` says.

    Raises:
        MoestreamError: something is no value.
    """
    said = _Said(argv, environment)
    parallel = said.number("LLAMA_ARG_N_PARALLEL", "-np", "--parallel")
    parallel = None if parallel is None or parallel < 1 else parallel
    unified = said.switch("LLAMA_ARG_KV_UNIFIED", ("-kvu", "--kv-unified"), ("-no-kvu", "--no-kv-unified"))
    batch = said.number("LLAMA_ARG_BATCH", "-b", "--batch-size") or 2048
    ubatch = said.number("LLAMA_ARG_UBATCH", "-ub", "--ubatch-size") or 512
    types = (
        check_cache_type("--cache-type-k", said.value("LLAMA_ARG_CACHE_TYPE_K", "-ctk", "--cache-type-k") or "f16"),
        check_cache_type("--cache-type-v", said.value("LLAMA_ARG_CACHE_TYPE_V", "-ctv", "--cache-type-v") or "f16"),
    )
    shape = ContextShape(
        said.number("LLAMA_ARG_CTX_SIZE", "-c", "--ctx-size") or facts.n_ctx_train, parallel or DEFAULT_PARALLEL,
        parallel is None if unified is None else unified, min(batch, ubatch), *types,
    )  # fmt: skip
    overlap = said.value("LLAMA_ARG_MOE_OVERLAP", "--moe-overlap") != "off"
    staging = said.value("LLAMA_ARG_MOE_STAGING", "--moe-staging") or "auto"
    threads = said.number("LLAMA_ARG_THREADS", "-t", "--threads")
    repacks = said.switch("LLAMA_ARG_REPACK", ("--repack",), ("-nr", "--no-repack"))
    tier = said.value("LLAMA_ARG_MOE_RAM", "--moe-ram")
    return Wishes(
        shape,
        slots=slots_wanted(slots if slots is not None else said.value("LLAMA_ARG_MOE_SLOTS", "--moe-slots") or "auto", facts),
        ram_tier_bytes=None if tier is None else parse_tier(tier),
        # matmuls wait for what passes through the ring, so without overlap there is none
        staging="full" if staging == "auto" and not overlap else staging,
        in_flight=said.number("LLAMA_ARG_MOE_IO_THREADS", "--moe-io-threads"),
        prefetch=overlap and said.value("LLAMA_ARG_MOE_PREFETCH", "--moe-prefetch") != "off",
        io=said.value("LLAMA_ARG_MOE_IO", "--moe-io") or "auto",
        repacked=frozenset() if repacks is False else repacked,
        threads=threads if threads is not None and threads > 0 else None,
        prompt_cache_given=said.value("LLAMA_ARG_CACHE_RAM", "-cram", "--cache-ram") is not None,
    )


def unplanned(argv: Sequence[str], environment: Mapping[str, str], facts: GgufFacts) -> str | None:
    """Why no plan says what a server with this command line takes; None: one does."""
    if facts.architecture not in architectures.KNOWN:
        return f"the architecture {facts.architecture} is not known to the planner"
    if not state.is_known(facts):
        return f"{facts.architecture} has caches beside KV that the planner does not reckon with"
    flags = {flag_of(argument) for argument in argv}
    for spellings, variables in _BESIDE:
        given = next((flag for flag in spellings if flag in flags), None)
        given = given or next((name for name in variables if environment.get(name)), None)
        if given:
            return f"{given} takes memory that the planner does not reckon with"
    return None


@dataclass(frozen=True)
class Chosen:
    """What a plan decides of a server's command line. None and empty: the user or the engine decides.

    Attributes:
        slots: for ``--moe-slots``: a number, or ``all``.
        ram_tier: for ``--moe-ram``.
        staging: for ``--moe-staging``.
        threads: for ``--threads``.
        placement: where weights go, with a GPU.
        prompt_cache_mib: for ``--cache-ram``: what llama-server may keep of old prompts; it would take up to PROMPT_CACHE_MIB.
    """

    slots: str
    ram_tier: str | None = None
    staging: str | None = None
    threads: int | None = None
    placement: tuple[str, ...] = ()
    prompt_cache_mib: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """For llama-server, but for those that ``start`` has flags for."""
        argv = list(self.placement)
        if self.staging is not None:
            argv += ["--moe-staging", self.staging]
        if self.threads is not None:
            argv += ["-t", str(self.threads)]
        if self.prompt_cache_mib is not None:
            argv += ["--cache-ram", str(self.prompt_cache_mib)]
        return tuple(argv)


def choose(wishes: Wishes, settled: Settled, budget: Budget, *, default_threads: int) -> Chosen:
    """What follows from a plan.

    With a number of slots the engine would decide about staging once more, by another rule than when it chooses them itself; so it is
    told. Threads are told where llama.cpp would take more than may compute: it knows no quota.

    Args:
        default_threads: with how many llama.cpp computes when nobody says.
    """
    memory = settled.memory
    is_all = memory.slots >= memory.n_expert
    ram_tier = None
    if wishes.ram_tier_bytes == RAM_AUTO:
        ram_tier = str(memory.tier_bytes) if memory.sizes.ram_bytes else "none"
    staging = None
    if wishes.slots is None and wishes.staging == "auto" and not is_all:
        staging = "full" if memory.staging == "full width" else "ring"
    placement: tuple[str, ...] = ()
    if budget.vram_bytes is not None:
        placement = ("--cpu-moe", "-ngl", "99") if settled.on_gpu else ("-ngl", "0")
    return Chosen(
        "all" if is_all else str(memory.slots),
        ram_tier,
        staging,
        budget.cores if wishes.threads is None and budget.cores < default_threads else None,
        placement,
        prompt_cache_mib(wishes, settled),
    )


def prompt_cache_mib(wishes: Wishes, settled: Settled) -> int | None:
    """What is left for llama-server's cache of old prompts, in MiB; None where that is no less than it would take, or the user has said."""
    left = max(0, settled.memory.usable_bytes - settled.memory.budgeted_bytes) >> 20
    return None if wishes.prompt_cache_given or left >= PROMPT_CACHE_MIB else left


def threads(wishes: Wishes, budget: Budget) -> int:
    """That compute."""
    return wishes.threads or budget.cores


def as_json(wishes: Wishes, settled: Settled, budget: Budget, *, binding: bool) -> dict[str, Any]:
    """What was planned, for the report of a start.

    Args:
        binding: the server is to keep to it.
    """
    memory = settled.memory
    return {
        "slots": memory.slots, "staging": memory.staging, "ram_tier_bytes": memory.sizes.ram_bytes,
        "ubatch": min(wishes.context.n_ubatch, wishes.context.n_ctx), "threads": threads(wishes, budget),
        "available_bytes": budget.available_bytes, "limited_by": budget.limited_by, "usable_bytes": memory.usable_bytes,
        "budgeted_bytes": memory.budgeted_bytes, "expected": memory.sizes.as_json(), "vram_bytes": budget.vram_bytes,
        "dense_on_gpu": settled.on_gpu, "binding": binding,
    }  # fmt: skip


def line(wishes: Wishes, settled: Settled, budget: Budget) -> str:
    """The same for a person, and why so."""
    memory = settled.memory
    n = threads(wishes, budget)
    cache = prompt_cache_mib(wishes, settled)
    parts = [
        f"{memory.slots} of {memory.n_expert} experts a layer in slots",
        f"staging {memory.staging}" if memory.staging != "none" else "",
        f"{report.size(memory.sizes.ram_bytes)} of RAM tier" if memory.sizes.ram_bytes else "",
        "the rest on the GPU" if settled.on_gpu else "",
        f"{n} thread{'' if n == 1 else 's'}",
        "" if cache is None else f"{cache} MiB for old prompts",
    ]
    return (
        f"planned: {', '.join(filter(None, parts))}; needs {report.size(memory.budgeted_bytes)} of the "
        f"{report.size(memory.usable_bytes)} that may be used ({report.size(budget.available_bytes)} by {budget.limited_by}, less a margin)"
    )
