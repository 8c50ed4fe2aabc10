"""``moestream config``: which settings are in force, and where they come from."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

from moestream import config, model_names
from moestream.config import ConfigFile
from moestream.errors import MoestreamError
from moestream.result import Result
from moestream.server import report

EXIT_CODES = {1: "a file or a variable is wrong, or another error"}
HELP = "Settings of start: moestream.yaml and the environment."


def show(
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME|FILE", help="As start would be asked for it.")
    ] = None,
) -> Result:
    """Show each setting of start and where it comes from."""
    merged = config.merge({"model": model}, os.environ, config.load())
    if model is not None and merged.name is None:
        model_names.locate(merged)  # or the error that start would end with
    rows = []
    settings: dict[str, Any] = {}
    for option, setting in merged.settings.items():
        settings[option] = {"value": setting.value, "source": setting.source}
        rows.append((option, _text(setting.value), setting.source))
    width, wide = (max(len(row[i]) for row in rows) for i in (0, 1))
    text = "\n".join(f"{option:<{width}}  {value:<{wide}}  {source}" for option, value, source in rows)
    if merged.name is None and merged.names:
        text += f"\nmodels: {', '.join(merged.names)} (--model NAME)"
    return Result("config-show", {"model": merged.name, "models": list(merged.names), "settings": settings}, text)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return shlex.join(value) or "-"
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def path() -> Result:
    """Show where moestream.yaml is looked for, the project's first."""
    places = [("project", config.project_path()), ("user", config.user_path())]
    data = [{"kind": kind, "path": str(place), "exists": os.path.lexists(place)} for kind, place in places]
    rows: list[tuple[str, str | None]] = [
        (str(entry["kind"]), f"{entry['path']}{'' if entry['exists'] else ' (none)'}") for entry in data
    ]
    return Result("config-path", {"files": data}, report.table(rows))


def check() -> Result:
    """Check both files and the environment, also what no start has asked for yet."""
    found: list[ConfigFile] = []
    failures: list[MoestreamError] = []
    places = config.places()
    for place in places:
        try:
            found.append(config.read(place))
        except MoestreamError as error:
            failures.append(error)
    names = list(dict.fromkeys(name for file in found for name in file.document.models))
    notices = config.unknown_variables(os.environ)
    for name in [None, *names]:
        try:
            merged = config.merge({"model": name}, os.environ, found)
        except MoestreamError as error:
            failures.append(error)
            continue
        model = merged["model"]
        if name is not None and model and not str(model).startswith("hf:") and not os.path.exists(model):
            notices.append(f"{merged.settings['model'].source}: there is no {model}")
    if failures:
        message = "\n".join(dict.fromkeys(error.message for error in failures))
        raise MoestreamError(message, hint=failures[0].hint)
    lines = [f"{place}: good" for place in places] or ["no moestream.yaml; moestream config path says where one is looked for"]
    return Result(
        "config-check", {"files": [str(p) for p in places], "models": names, "notices": notices}, "\n".join(lines + notices)
    )


SUBCOMMANDS = {"show": show, "path": path, "check": check}
