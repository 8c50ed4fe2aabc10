"""``moestream status``: which servers run, and how they do."""

from __future__ import annotations

import time
from typing import Annotated, Any

import psutil
import typer

from moestream.result import Result
from moestream.server import report
from moestream.server.arguments import value_after
from moestream.server.client import Health, ServerClient, Stats
from moestream.server.process import State
from moestream.server.records import BrokenRecord, RecordStore, ServerRecord

_BY_HEALTH = {
    Health.READY: "ready",
    Health.LOADING: "loading",
    Health.SILENT: "not answering",
    Health.REFUSED: "starting",
    Health.WRONG: "not answering",
}


def _rss_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def _map_of(record: ServerRecord, store: RecordStore) -> dict[str, Any] | None:
    """The router map that a server was started with, and whether it adds to the one that is kept; None: neither."""
    path = value_after(record.argv, "--moe-map")
    used_kept = path is not None and path == str(store.map_path(record.port))
    learns = value_after(record.argv, "--moe-trace") == str(store.trace_path(record.port))
    if path is None and not learns:
        return None
    return {"path": (record.kept_map or path) if used_kept else path, "kept": used_kept, "learning": learns}


def _map_line(found: dict[str, Any] | None, record: ServerRecord) -> str | None:
    if found is None:
        return None
    if found["path"] is None:
        return f"none yet, learning for the next start: {record.kept_map or 'the kept map'}"
    text = f"{found['path']}{', as kept when it was started' if found['kept'] else ''}"
    return text + ("; learning" if found["learning"] else "")


def describe(record: ServerRecord) -> tuple[dict[str, Any], str]:
    """What a server does now, as data and as text; asks it."""
    pid = record.server.pid if record.server else None
    stats: Stats | None = None
    sleeping: bool | None = None
    server_alive, supervisor_alive = record.server_alive, record.supervisor.alive()
    if not server_alive:
        # A moment before the first fork and after the last wait the supervisor alone is there.
        state = "starting" if supervisor_alive and record.state == State.NEW.value else "ended"
    elif record.state == State.STOPPING.value:
        state = "stopping"
    else:
        with ServerClient(record.url, api_key=record.api_key) as client:
            health = client.health()
            if health is Health.READY:
                stats = client.stats()
                sleeping = client.sleeping()
        state = _BY_HEALTH[health]
        if health is Health.REFUSED and record.ready_s is not None:
            state = "not answering"
    uptime_s = time.time() - record.started_s if server_alive else None
    rss = _rss_bytes(pid) if pid is not None and server_alive else None
    router_map = _map_of(record, RecordStore())
    data: dict[str, Any] = {
        "port": record.port,
        "state": state,
        "pid": pid,
        "supervisor_pid": record.supervisor.pid,
        "supervised": supervisor_alive,
        "detached": record.detached,
        "address": record.url,
        "model": record.model,
        "engine": record.engine_id,
        "backend": record.backend,
        "log_path": record.log_path,
        "started_s": record.started_s,
        "uptime_s": None if uptime_s is None else round(uptime_s, 1),
        "ended": record.ended or None,
        "rss_bytes": rss,
        "slots_requested": record.slots,
        "map": router_map,
        "sleeping": sleeping,
        "streaming": stats.streaming if stats and stats.available else None,
        "hit_rate": stats.hit_rate if stats else None,
        "stats": stats.raw if stats else None,
        "stats_unavailable": (stats.reason or None) if stats else None,
    }
    head = f"port {record.port}: {state}" + (", asleep until the next request" if sleeping else "")
    if state == "ended":
        head += f" ({record.ended or 'without a trace: its supervisor was killed or the machine restarted'})"
    rows: list[tuple[str, str | None]] = [
        ("  address", record.url if server_alive else None),
        ("  model", record.model),
        ("  pid", f"{pid}, up {report.duration(uptime_s)}" if uptime_s is not None else None),
        ("  slots", report.slots_line(stats, requested=record.slots, sleeping=bool(sleeping)) if stats else None),
        ("  experts", report.traffic_line(stats) if stats else None),
        ("  memory", report.memory_line(stats) if stats else None),
        ("  resident", report.size(rss) if rss is not None else None),
        ("  map", _map_line(router_map, record)),
        ("  log", record.log_path),
        ("  warning", "its supervisor is gone" if server_alive and not supervisor_alive else None),
    ]
    return data, head + "\n" + report.table(rows)


def status(
    port: Annotated[int | None, typer.Option(min=1, max=65535, metavar="N", help="Only the server on this port.")] = None,
) -> Result:
    """Show the servers that moestream has started."""
    store = RecordStore()
    records = store.all() if port is None else filter(None, [store.read(port)])
    servers: list[dict[str, Any]] = []
    texts: list[str] = []
    for record in records:
        if isinstance(record, BrokenRecord):
            servers.append({"port": record.port, "state": "unknown", "problem": record.reason})
            texts.append(f"port {record.port}: unreadable state file {record.path} ({record.reason})")
            continue
        data, text = describe(record)
        servers.append(data)
        texts.append(text)
    if not texts:
        where = "" if port is None else f" on port {port}"
        texts.append(f"no server{where} was started by moestream")
    return Result("status", {"servers": servers}, "\n".join(texts))
