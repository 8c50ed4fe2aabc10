"""What ``moestream start`` plans before it starts a server: slots and what goes with them, by the code of ``moestream plan``.

Memory is measured here, the decisions are those of ``planning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moestream import proc
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import card, check, fit, hardware, hits
from moestream.planning.card_rates import CardRates
from moestream.planning.memory import RAM_AUTO
from moestream.planning.plan import Budget, settle
from moestream.server import report
from moestream.server.arguments import ServerSettings, build_argv, first_of
from moestream.sizes import parse_size
from moestream.upstream.engines import Engine


@dataclass(frozen=True)
class Planned:
    """Settings with the decisions of a plan.

    Attributes:
        settings: as asked for, where nothing was planned.
        facts: see ``fit.as_json``; None where nothing was planned.
        said: lines to be told.
    """

    settings: ServerSettings
    facts: dict[str, Any] | None = None
    said: tuple[str, ...] = ()


def budget_of(memory: proc.Memory | None, cores: int, vram_bytes: int | None, ram: int | None) -> Budget:
    """What may be planned with.

    Args:
        memory: that there is; None: the system does not say.
        vram_bytes: of GPUs that are used; None: none are.
        ram: to plan with instead, bytes.

    Raises:
        MoestreamError: nobody says how much memory there is.
    """
    if ram is not None:
        return Budget(ram, "--ram", cores, vram_bytes)
    if memory is None:
        raise MoestreamError("this system does not say how much memory is available", hint="--ram SIZE")
    return Budget(memory.available_bytes, memory.limited_by, cores, vram_bytes)


def _vram(settings: ServerSettings, engine: Engine) -> int | None:
    """Of GPUs that an engine uses; None: it uses none.

    Raises:
        MoestreamError: it uses none, and a budget for them is given; or something else says where weights go.
    """
    if engine.backend == "cpu":
        if settings.vram is not None:
            raise MoestreamError(
                f"--vram {settings.vram}: the engine in use ({engine.id}) computes on the CPU alone",
                hint="leave out --vram; or an engine for the GPU: moestream build --backend cuda",
            )
        return None
    placing = first_of(settings.extra, fit.PLACING)
    if placing is None and settings.pool not in (None, "auto"):
        placing = f"--pool {settings.pool}"
    if placing is not None:
        flag = "--vram" if settings.vram is not None else "--ram"
        raise MoestreamError(
            f"{flag} cannot be combined with {placing}: with a GPU a plan says where everything goes",
            hint=f"leave out {placing}, or {flag}",
        )
    if settings.vram is not None:
        return parse_size("--vram", settings.vram)
    return sum(gpu.free_bytes for gpu in hardware.gpus())


def _budget_flags(settings: ServerSettings) -> str:
    given = (("--ram", settings.ram), ("--vram", settings.vram))
    return ", ".join(f"{flag} {size}" for flag, size in given if size is not None)


def plan_for(settings: ServerSettings, facts: GgufFacts, engine: Engine, environment: Mapping[str, str]) -> Planned:
    """Plan a server.

    With ``--slots auto`` the plan's slots are taken, or nothing starts; what no plan can judge is left to the engine's own ``auto``. A number
    of slots is taken as it is: that it does not fit is told, and refused where it was said how much memory there is. Slots of a router
    map are not planned.

    Args:
        settings: with ``ctx``, as the server gets it.
        environment: with llama-server's own variables.

    Raises:
        MoestreamError: not even the slots of a token fit, or a budget cannot be kept.
    """
    if not settings.streaming or settings.slots == "map":
        return Planned(settings)
    if engine.backend == "cuda" and settings.pool == "device" and settings.vram is not None:
        return _on_card(settings, facts, environment)
    argv = build_argv(Path("llama-server"), settings)
    why = fit.unplanned(argv, environment, facts)
    if why is None and engine.backend != "cpu" and not settings.has_budget:
        why = f"slots in the memory of a card are not planned ({engine.id}); --vram SIZE plans slots in RAM beside it"
    if why is not None:
        if settings.has_budget:
            raise MoestreamError(
                f"{_budget_flags(settings)} cannot be kept: {why}",
                hint="leave it out: --slots auto is the engine's own then; or give --slots N",
            )
        return Planned(
            settings, said=(f"notice: --slots auto is left to the engine: {why}",) if settings.slots == "auto" else ()
        )
    memory = proc.available_memory()
    if memory is None and settings.slots != "auto" and not settings.has_budget:
        return Planned(settings)
    ram = None if settings.ram is None else parse_size("--ram", settings.ram)
    budget = budget_of(memory, hardware.cores(), _vram(settings, engine), ram)
    wishes = fit.wishes_of(argv, environment, facts, repacked=hardware.repacked_types())
    settled = settle(facts, budget, wishes, by_start=True)
    said = [f"notice: {text}" for text in settled.notices]
    if settled.misfit is not None:
        if settings.has_budget:
            raise MoestreamError(settled.misfit, hint=f"--slots auto takes what fits, or more than {_budget_flags(settings)}")
        said.append(f"warning: {settled.misfit}")
    default = hardware.default_threads()
    chosen = fit.choose(wishes, settled, budget, default_threads=default)
    if settings.slots != "auto" and not settings.has_budget:
        if chosen.threads is not None:
            n = f"{chosen.threads} thread{'' if chosen.threads == 1 else 's'} compute{'s' if chosen.threads == 1 else ''}"
            said.append(f"notice: {n}: no more cores may be used, and llama.cpp would take {default}")
        # the engine decides the rest of a number of slots by itself, at the memory there is when it loads
        made = replace(settings, planned=chosen.arguments)
        return Planned(made, fit.as_json(wishes, settled, budget, binding=False), tuple(said))
    ram_tier = chosen.ram_tier if chosen.ram_tier is not None else settings.ram_tier
    made = replace(settings, slots=chosen.slots, ram_tier=ram_tier, planned=chosen.arguments)
    facts_made = fit.as_json(wishes, settled, budget, binding=True)
    return Planned(made, facts_made, (*said, f"notice: {fit.line(wishes, settled, budget)}"))


def _on_card(settings: ServerSettings, facts: GgufFacts, environment: Mapping[str, str]) -> Planned:
    """All layers and their slots in the memory of a card, within ``--vram``; the RAM tier below them within ``--ram``, where that is given.

    Raises:
        MoestreamError: not even the slots of a token fit, those that were asked for do not, or something else says where weights go.
    """
    if placing := first_of(settings.extra, fit.PLACING):
        raise MoestreamError(
            f"--vram and --pool device cannot be combined with {placing}: all layers and their slots go to the card",
            hint=f"leave out {placing}, or --vram",
        )
    argv = build_argv(Path("llama-server"), settings)
    if why := fit.unplanned(argv, environment, facts):
        raise MoestreamError(f"{_budget_flags(settings)} cannot be kept: {why}", hint="leave it out, and give --slots N")
    ram = None if settings.ram is None else parse_size("--ram", settings.ram)
    budget = budget_of(proc.available_memory(), hardware.cores(), parse_size("--vram", settings.vram or ""), ram)
    wishes = fit.wishes_of(argv, environment, facts, repacked=hardware.repacked_types())
    if ram is not None and settings.ram_tier is None:  # the tier is what memory of the machine is for
        wishes = replace(wishes, ram_tier_bytes=RAM_AUTO)
    made = card.decide(
        facts, wishes, hits.assumed(facts), free_bytes=budget.vram_bytes or 0, available_bytes=budget.available_bytes,
        rates=CardRates(), disk_bytes_s=None,
    )  # fmt: skip
    can = f"{report.size(made.usable_bytes)} of {report.size(made.free_bytes)} (--vram, less a margin)"
    if made.slots < made.least_slots or not made.fits:
        slots = max(made.slots, made.least_slots)
        need = made.budgeted_bytes + (slots - made.slots) * sum(t.bytes_per_expert for t in facts.expert_tensors)
        raise MoestreamError(
            f"{slots} slots a layer on the card need {report.size(need)}, and {can} may be used",
            hint="fewer --slots, a smaller --ctx, or a larger --vram"
            if made.slots > made.least_slots
            else "a smaller --ctx, or a larger --vram",
        )
    tier = settings.ram_tier if ram is None or made.slots >= made.n_expert else str(made.ram_tier_bytes)
    slots_said = "all" if made.slots >= made.n_expert else str(made.slots)
    below = f", {report.size(made.ram_tier_bytes)} of locked RAM below them" if made.ram_tier_bytes else ""
    said = f"notice: planned: {made.slots} of {made.n_expert} experts a layer in slots on the card{below}; needs {report.size(made.budgeted_bytes)}, and {can} may be used"
    return Planned(replace(settings, slots=slots_said, ram_tier=tier, planned=("-ngl", "99")), None, (said,))


def check_held(made: Mapping[str, Any] | None, memory: Mapping[str, int], slots: int) -> None:
    """Hold what a server says it takes, now that it has loaded its model, against what was planned with.

    The engine does so itself with slots that it chose, before the kernel ends it in the middle of an answer.

    Args:
        made: see ``Planned.facts``.
        memory: ``memory`` of docs/stats.md, empty where the server does not say.
        slots: that it has in a layer.

    Raises:
        MoestreamError: it takes more than there is.
    """
    if not made or not made["binding"] or "total_bytes" not in memory or "pool_bytes" not in memory:
        return
    needed, available = check.needed_bytes(memory), made["available_bytes"]
    if needed <= available:
        return
    fit_too = check.slots_within(memory, slots, available)
    raise MoestreamError(
        f"the plan does not hold: {slots} slots a layer take {report.size(needed)} in all, and {report.size(available)} are "
        f"available ({made['limited_by']})",
        hint=f"--slots {fit_too}" if 0 < fit_too < slots else "a smaller --ctx, or smaller batches: -- -ub 128",
    )
