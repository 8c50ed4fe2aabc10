"""``moestream start``: serve a model through llama-server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moestream import config, gguf_facts, model_names, paths
from moestream.commands import options
from moestream.config import BUILT_IN
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import fit
from moestream.result import Result
from moestream.server import address, learning, report
from moestream.server.arguments import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_READY_TIMEOUT_S,
    ServerSettings,
    build_argv,
    check_extra,
    check_streaming_flags,
    first_of,
    parse_slots,
    value_after,
)
from moestream.server.client import base_url
from moestream.server.planned import check_held, plan_for
from moestream.server.process import Cause
from moestream.server.progress import progress
from moestream.server.records import RecordStore, ServerRecord
from moestream.server.supervise import (
    Detached,
    ReadyFacts,
    ServerPlan,
    Supervisor,
    ask_ready_facts,
    end_error,
    notice,
    stop_notice,
    stop_on_signals,
    stopped_early,
)
from moestream.upstream import engines

# llama-server's own default is what the model was trained with: often 256 Ki tokens, a KV cache of many GiB, on
# machines that were too small for the model in the first place.
DEFAULT_CTX_TOKENS = 8192
EXIT_CODES = {
    0: "served until it was stopped; with --detach: it serves",
    1: "no server runs, or it ended by itself",
    130: "Ctrl-C, another signal or moestream stop before it was ready",
}


def check_map(path: Path) -> Path:
    """The path of a router map as a process in another folder finds it; the engine looks at what is in it.

    Raises:
        MoestreamError: there is no such file.
    """
    paths.check_file("--map", path, hint="moestream map make writes a router map")
    return paths.absolute(path)


def check_model(facts: GgufFacts, slots: str) -> None:
    """Refuse what the server would refuse later: a model without experts, too few or too many slots.

    Raises:
        MoestreamError: names the number and the one that would do.
    """
    model = facts.files[0]
    if slots == "off":
        return
    if not facts.is_moe:
        raise MoestreamError(
            f"{model.name} ({facts.architecture}) is not a mixture-of-experts model: it has no experts to stream",
            hint="serve it without streaming: --slots off",
        )
    if not slots.isdigit():
        return
    if int(slots) < facts.n_expert_used:
        raise MoestreamError(
            f"--slots {slots}: too few, a token of {model.name} uses {facts.n_expert_used} experts in a layer",
            hint=f"the smallest is --slots {facts.n_expert_used}; --slots auto sizes them from the memory that is free",
        )
    fit.check_most_slots(slots, facts, model.name)


def check_pins(facts: GgufFacts, slots: str, top_k: int | None) -> None:
    """Refuse more pinned experts than leave a token its slots, where the header tells; with ``auto`` and ``map`` the engine does.

    Raises:
        MoestreamError: names both numbers.
    """
    if not top_k or not (slots == "all" or slots.isdigit()):
        return
    for layer in facts.moe_layers:
        n_expert = facts.layer_tensors(layer)[0].n_expert
        n_slot = n_expert if slots == "all" else min(int(slots), n_expert)
        most = n_slot - facts.n_expert_used
        if top_k > most:
            more = "" if n_slot == n_expert else f"--slots {facts.n_expert_used + top_k}"
            fewer = f"--router-top-k {most}" if most > 0 else ""
            raise MoestreamError(
                f"--router-top-k {top_k} is too many: layer {layer} has {n_slot} slots, and a token of {facts.files[0].name} "
                f"uses {facts.n_expert_used} experts",
                hint=" or less, or ".join(filter(None, [fewer, more])) or "leave it out to pin none",
            )


def _api_key(extra: tuple[str, ...]) -> str | None:
    """The key with which to ask the server, found as llama-server finds it."""
    keys = value_after(extra, "--api-key") or os.environ.get("LLAMA_API_KEY", "")
    if keys:
        return keys.split(",")[0]
    file = value_after(extra, "--api-key-file") or os.environ.get("LLAMA_ARG_API_KEY_FILE")
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise MoestreamError(f"cannot read --api-key-file {file}: {error.strerror}", hint="check the path") from error
        return next((line for line in lines if line and not line.startswith("#")), None)
    return None


def _given(extra: tuple[str, ...], flag: str, variable: str) -> str:
    """A setting as llama-server finds it: an argument, even an empty one, beats the environment. Empty: not given."""
    value = value_after(extra, flag)
    return os.environ.get(variable, "") if value is None else value


def make_plan(
    settings: ServerSettings,
    *,
    backend: str | None = None,
    detached: bool = False,
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S,
    tell: Callable[[str], None] = notice,
) -> ServerPlan:
    """Check everything that can be checked before a process is started, and decide what a plan decides.

    Args:
        settings: ``model`` may be a directory or any shard here. Port 0 chooses a free one.
        backend: of the engine; None for the one in use.
        tell: prints a line about what was decided.

    Raises:
        MoestreamError: a wrong model, no engine, arguments that collide, an address in use, too little memory.
    """
    check_extra(settings.extra)
    check_streaming_flags(settings)
    _check_warm(settings.warm, ready_timeout_s)
    if not settings.streaming:
        _check_environment()
    facts = gguf_facts.read(settings.model)
    check_model(facts, settings.slots)
    check_pins(facts, settings.slots, settings.router_top_k)
    learning.wishes(settings, os.environ)
    store = RecordStore()
    port = settings.port or address.free_port(settings.host)
    _check_address(store, settings.host, port)
    engine = engines.in_use(backend)
    ctx = settings.ctx
    if ctx is None:
        ctx = min(DEFAULT_CTX_TOKENS, facts.n_ctx_train or DEFAULT_CTX_TOKENS)
    _check_gpu(settings, engine)
    planned = plan_for(replace(settings, model=paths.absolute(facts.files[0]), port=port, ctx=ctx), facts, engine, os.environ)
    ready = planned.settings
    check_pins(facts, ready.slots, settings.router_top_k)
    extra = settings.extra
    https = bool(_given(extra, "--ssl-key-file", "LLAMA_ARG_SSL_KEY_FILE")) and bool(
        _given(extra, "--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE")
    )
    prefix = _given(extra, "--api-prefix", "LLAMA_ARG_API_PREFIX")
    api_key = _api_key(extra)
    kept, said = learning.plan_for(settings, facts, store, os.environ, by_card=learning.is_by_card(ready, engine.backend))
    for line in (*planned.said, *said):
        tell(line)
    return ServerPlan(
        argv=tuple(build_argv(paths.absolute(engine.tool("llama-server")), ready)),
        host=settings.host,
        port=port,
        url=base_url(settings.host, port, https=https, prefix=prefix),
        model=str(ready.model),
        slots=settings.slots,
        engine_id=engine.id,
        backend=engine.backend,
        log_path=str(store.log_path(port)),
        n_ctx_train=facts.n_ctx_train,
        detached=detached,
        api_key=api_key,
        ready_timeout_s=ready_timeout_s,
        map_path=None if settings.map is None else str(settings.map),
        learning=kept,
        planned=planned.facts,
    )


def _check_gpu(settings: ServerSettings, engine: engines.Engine) -> None:
    """Refuse what an engine without code for a GPU cannot honour; whether there is a GPU is the engine's to find out."""
    if settings.require_gpu and engine.backend == "cpu":
        raise MoestreamError(
            f"--require-gpu cannot be honoured: the engine in use ({engine.id}) computes on the CPU alone",
            hint="an engine for the GPU: moestream build --backend cuda; moestream engines lists those that are built",
        )
    if engine.backend == "cpu" and (placing := first_of(settings.extra, fit.ON_GPU)):
        notice(
            f"notice: {placing} does nothing: the engine in use ({engine.id}) computes on the CPU alone (moestream build --backend cuda)"
        )


def _check_warm(warm: str | None, ready_timeout_s: float) -> None:
    """Filling slots belongs to start-up: a server that may take longer for it than for starting would be ended as not ready."""
    if warm not in (None, "off") and 0 < ready_timeout_s <= int(warm):
        raise MoestreamError(
            f"--warm {warm} may take as long as --ready-timeout {ready_timeout_s:g}, and the server would be ended as not ready",
            hint=f"add --ready-timeout {int(warm) + 900}, or 0 for no limit; or a smaller --warm",
        )


def _check_environment() -> None:
    for name, value in sorted(os.environ.items()):
        if name.startswith("LLAMA_ARG_MOE_") and value:  # llama-server would stream after all, or refuse
            raise MoestreamError(
                f"{name}={value} in the environment cannot be combined with --slots off",
                hint=f"unset {name}, or use --slots auto",
            )


def _check_address(store: RecordStore, host: str, port: int) -> None:
    try:
        address.check_free(host, port)
    except MoestreamError as error:
        record = store.read(port)
        if isinstance(record, ServerRecord) and record.alive:
            raise MoestreamError(
                f"port {port} is in use by a server that moestream has started (model {record.model})",
                hint=f"stop it: moestream stop --port {port}; or use --port {address.free_port(host, port)}",
            ) from error
        raise


def ready_result(plan: ServerPlan, facts: ReadyFacts, *, elapsed_s: float, supervisor_pid: int) -> Result:
    """What is reported when the server is ready."""
    stats, props = facts.stats, facts.props
    n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
    parallel = props.get("total_slots")
    stop = f"moestream stop --port {plan.port}"
    data: dict[str, Any] = {
        "state": "ready",
        "detached": plan.detached,
        "address": plan.url,
        "openai_base_url": f"{plan.url}/v1",
        "host": plan.host,
        "port": plan.port,
        "model": plan.model,
        "engine": plan.engine_id,
        "backend": plan.backend,
        "supervisor_pid": supervisor_pid,
        "log_path": plan.log_path,
        "elapsed_s": round(elapsed_s, 2),
        "ctx_tokens": n_ctx,
        "ctx_train_tokens": plan.n_ctx_train,
        "parallel": parallel,
        "slots_requested": plan.slots,
        "streaming": stats.streaming if stats.available else None,
        "stats": stats.raw,
        "stats_unavailable": stats.reason or None,
        "plan": plan.planned,
        "kept_map": learning.as_json(plan.learning, plan.argv),
        "config_sources": plan.config_sources,
        "argv": _without_key(plan.argv),
        "stop_command": stop,
    }
    rows: list[tuple[str, str | None]] = [
        ("address", plan.url),
        ("OpenAI URL", f"{plan.url}/v1"),
        ("model", plan.model),
        ("engine", f"{plan.engine_id} ({plan.backend})"),
        ("slots", report.slots_line(stats, requested=plan.slots, sleeping=props.get("is_sleeping") is True)),
        ("memory", report.memory_line(stats)),
        ("kernels", report.kernels_line(stats)),
        ("map", _map_line(plan)),
        ("context", _context_line(plan, n_ctx, parallel)),
        ("settings", ", ".join(f"{option} from {source}" for option, source in plan.config_sources.items()) or None),
        ("log", plan.log_path),
        ("stop", stop if plan.detached else f"Ctrl-C, or {stop}"),
    ]
    return Result("start", data, f"ready after {elapsed_s:.1f} s\n" + report.table(rows))


def _map_line(plan: ServerPlan) -> str | None:
    """The router map in force, and whether it goes on growing."""
    kept = learning.as_json(plan.learning, plan.argv)
    if kept is None:
        return plan.map_path
    if kept["problem"]:
        then = "a new one is begun when the server ends" if kept["learning"] else "moestream map forget removes it"
        return f"the kept one is damaged and not used, {then}: {kept['path']}"
    text = f"{kept['path']}, of {kept['tokens']} tokens" if kept["used"] else plan.map_path
    if not kept["learning"]:
        return text
    return f"{text}; learning" if text else f"none yet, learning for the next start: {kept['path']}"


def _context_line(plan: ServerPlan, n_ctx: int | None, parallel: int | None) -> str | None:
    if not n_ctx or not parallel:
        return None
    more = f" (the model was trained with {plan.n_ctx_train}: --ctx)" if plan.n_ctx_train > n_ctx else ""
    return f"{n_ctx} tokens{more}, {parallel} {'request' if parallel == 1 else 'requests'} at a time"


def _warn_if_open(plan: ServerPlan) -> None:
    if plan.api_key is None and not address.is_loopback(plan.host):
        notice(
            f"warning: listening on {plan.host} without an API key: whoever can reach port {plan.port} can use this server "
            "(-- --api-key-file FILE)"
        )


def _without_key(argv: tuple[str, ...]) -> list[str]:
    return ["…" if i and argv[i - 1] == "--api-key" else a for i, a in enumerate(argv)]


def _check_held(plan: ServerPlan, facts: ReadyFacts) -> None:
    """Raises:
    MoestreamError: the server takes more memory than was planned with.
    """
    stats = facts.stats
    if stats.streaming:
        check_held(plan.planned, stats.memory, int((stats.raw or {}).get("slots") or 0))


def serve(plan: ServerPlan) -> Generator[Result, None, None]:
    """Serve in the foreground: yields the report at ready, returns when the server was stopped.

    Closing the iterator stops the server too.

    Raises:
        MoestreamError: the server ended by itself, or takes more memory than was planned with.
    """
    started = time.monotonic()
    supervisor = Supervisor(plan)
    with stop_on_signals(supervisor.process.request_stop) as signals:
        try:
            supervisor.start()
            with progress(f"starting llama-server on port {plan.port}", Path(plan.log_path)) as show:
                while not (snapshot := supervisor.process.wait(lambda s: s.settled, 0.2)).settled:
                    show()
            was_ready = snapshot.exit is None
            if was_ready:
                facts = ask_ready_facts(plan)
                _check_held(plan, facts)
                elapsed_s = time.monotonic() - started
                _warn_if_open(plan)
                yield ready_result(supervisor.plan, facts, elapsed_s=elapsed_s, supervisor_pid=os.getpid())
                snapshot = supervisor.wait_exit()
        finally:
            # Not in the generator's hands alone: a failing print above must not leave the server running.
            supervisor.stop()
    end = snapshot.exit
    assert end is not None
    if end.cause is not Cause.STOPPED:
        raise end_error(plan, end, was_ready=was_ready, after_s=time.monotonic() - started)
    late = stop_notice(end, plan.stop_grace_s)
    if late and len(signals) < 2:
        notice(f"notice: {late}")
    if not was_ready:
        raise stopped_early()
    notice(end.outcome.value)


def detach(plan: ServerPlan) -> Generator[Result, None, None]:
    """Start in the background, wait until it is ready, yield the report. Ctrl-C until then stops it.

    A server whose report could not be printed is stopped: to whoever started it, a failed start means that none runs.

    Raises:
        MoestreamError: the server ended before it was ready, or takes more memory than was planned with.
    """
    started = time.monotonic()
    detached = Detached(plan)
    with (
        stop_on_signals(detached.request_stop),
        progress(f"starting llama-server on port {plan.port}", Path(plan.log_path)) as show,
    ):
        while not detached.wait(0.2):
            show()
    plan = detached.check()
    try:
        facts = ask_ready_facts(plan)
        _check_held(plan, facts)
        _warn_if_open(plan)
        yield ready_result(plan, facts, elapsed_s=time.monotonic() - started, supervisor_pid=detached.pid)
    except MoestreamError:
        detached.stop()
        raise
    except BaseException:  # GeneratorExit when printing failed
        detached.stop()
        notice(f"notice: the server on port {plan.port} was ready and has been stopped, for this could not be reported")
        raise


def start(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME|FILE|DIR",
            help="A model of moestream.yaml, a pulled one; or a GGUF file, any shard, or a directory with one.",
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|all|map|off",
            help="Expert slots in each MoE layer; off: no streaming.",
            show_default=BUILT_IN["slots"],
            autocompletion=lambda: ["auto", "all", "map", "off"],
        ),
    ] = None,
    ram: options.Ram = None,
    vram: options.Vram = None,
    ctx: options.Ctx = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on.", show_default=DEFAULT_HOST)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0: any free one.", show_default=str(DEFAULT_PORT)),
    ] = None,
    parallel: Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests served at a time.")] = None,
    io_threads: options.IoThreads = None,
    io: options.IoMode = None,
    policy: options.PolicyName = None,
    overlap: options.Overlap = None,
    ram_tier: options.RamTier = None,
    prefetch: options.PrefetchMode = None,
    pool: options.PoolPlace = None,
    gpu_path: options.GpuPathName = None,
    require_gpu: options.RequireGpu = None,
    map_: Annotated[
        str | None, typer.Option("--map", metavar="FILE", help="A router map of yours, instead of the one that is kept.")
    ] = None,
    kept_map: Annotated[
        bool | None,
        typer.Option(
            "--kept-map/--no-map",
            help="Start with the router map that is kept of the model, or without one and record nothing.",
            show_default="with it, unless --map is given",
        ),
    ] = None,
    learn: Annotated[
        options.Switch | None,
        typer.Option(
            help="Record which experts are chosen, for the kept map. Default: on, unless --map or --no-map is given.",
        ),
    ] = None,
    router_top_k: options.RouterTopK = None,
    warm: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS|off",
            help="Fill slots before the first request; wait for that so long at most. Default: 0, in the background.",
        ),
    ] = None,
    backend: options.Backend = None,
    detach_: Annotated[
        bool | None, typer.Option("--detach/--no-detach", "-d", help="Serve in the background.", show_default="no")
    ] = None,
    ready_timeout: options.ReadyTimeout = None,
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] -- LLAMA ARGS…", help="The model, as for --model; what to pass on to llama-server."),
    ] = None,
) -> Generator[Result, None, None]:
    """Serve a model, experts left on disk, through an OpenAI-compatible server."""
    rest = list(extra or ())
    if rest and not rest[0].startswith("-"):
        if model is not None:
            raise MoestreamError(
                f"two models are given: {rest[0]} and --model {model}", hint="leave out one of them", exit_code=2
            )
        model = rest.pop(0)
    given = options.given(
        model=model, slots=slots, ram=ram, vram=vram, ctx=ctx, host=host, port=port, parallel=parallel, io_threads=io_threads, io=io,
        policy=policy, overlap=overlap, ram_tier=ram_tier, prefetch=prefetch, pool=pool, gpu_path=gpu_path, require_gpu=require_gpu,
        map=map_, kept_map=kept_map, learn=learn, router_top_k=router_top_k, warm=warm, backend=backend, detach=detach_,
        ready_timeout=ready_timeout,
    )  # fmt: skip
    merged = config.merge(given, os.environ, config.load())
    try:
        plan = plan_of(merged, rest)
    except MoestreamError as error:
        raise config.explained(error, merged.settings) from error
    if plan.detached:
        yield from detach(plan)
    else:
        yield from serve(plan)


def settings_of(merged: config.Merged, extra: Sequence[str], *, model: Path | None = None) -> ServerSettings:
    """From all that was said to the settings of a server.

    Args:
        extra: arguments for llama-server of the command line; they follow those of the files, and the last of two counts.
        model: instead of the one that was asked for, which is looked up otherwise.

    Raises:
        MoestreamError: no model is given, or something is no setting.
    """
    as_they_are = (
        "ram", "vram", "ctx", "host", "port", "parallel", "io_threads", "io", "policy", "overlap", "ram_tier", "prefetch", "pool",
        "gpu_path", "require_gpu", "kept_map", "learn", "router_top_k",
    )  # fmt: skip
    return ServerSettings(
        model=model_names.locate(merged) if model is None else model,
        slots=parse_slots(merged["slots"]),
        map=None if merged["map"] is None else check_map(Path(merged["map"])),
        warm=None if merged.settings["warm"].source == config.DEFAULT else merged["warm"],
        extra=(*merged["llama_args"], *extra),
        **{option: merged[option] for option in as_they_are},
    )


def plan_of(merged: config.Merged, extra: Sequence[str]) -> ServerPlan:
    """From all that was said to what is started.

    Args:
        extra: see :func:`settings_of`.

    Raises:
        MoestreamError: see :func:`make_plan`; or no model is given.
    """
    settings = settings_of(merged, extra)
    plan = make_plan(settings, backend=merged["backend"], detached=merged["detach"], ready_timeout_s=merged["ready_timeout"])
    return replace(plan, config_sources=config.sources(merged))
