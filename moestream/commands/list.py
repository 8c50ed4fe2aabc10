"""``moestream list``: the models that were pulled."""

from __future__ import annotations

from moestream.commands.pull import describe, facts_of
from moestream.commands.trace import text_table
from moestream.models.store import BrokenEntry, ModelStore
from moestream.result import Result
from moestream.server import report


def list() -> Result:
    """List the models that pull has downloaded."""
    store = ModelStore()
    models, broken, notes = [], [], []
    rows = [["NAME", "STATE", "SIZE", "SHARDS", "EXPERTS", "USED", "ARCHITECTURE"]]
    for entry in store.all():
        if isinstance(entry, BrokenEntry):
            broken.append({"path": str(entry.path), "problem": entry.reason})
            notes.append(f"unreadable record {entry.path} ({entry.reason}): look at it and remove it by hand")
            continue
        facts, problem = facts_of(entry)
        data = describe(entry, facts, problem)
        models.append(data)
        size = report.size(data["size_bytes"])
        if data["state"] == "partial":
            size = f"{report.size(data['present_bytes'])} of {size}"
        experts = ["-", "-", "-"]
        if facts:
            experts = [str(facts.n_expert) if facts.is_moe else "none", str(facts.n_expert_used) if facts.is_moe else "-"]
            experts.append(facts.architecture)
        rows.append([entry.name, data["state"], size, str(data["shards"]), *experts])
        if problem:
            notes.append(f"{entry.name}: {problem}")
        if data["state"] != "complete" or data["update_pending"]:
            notes.append(f"go on with: moestream pull hf:{entry.name}")
    lines = [text_table(rows)] if models else ["no model was pulled (moestream pull hf:OWNER/REPO)"]
    return Result("list", {"folder": str(store.folder), "models": models, "unreadable": broken}, "\n".join([*lines, *notes]))
