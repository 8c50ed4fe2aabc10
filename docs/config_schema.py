"""Write the JSON schema of moestream.yaml, from the model that reads it and the help texts of ``moestream start``.

python docs/config_schema.py            rewrite docs/moestream.schema.json
python docs/config_schema.py --check    exit 1 when it would change
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any, get_args

from typer.models import OptionInfo

from moestream.commands.start import start
from moestream.config import Document

PATH = Path(__file__).resolve().parent / "moestream.schema.json"
_MORE = {
    "model": "A GGUF file, any shard, a directory with one, or hf:OWNER/REPO:QUANT. Below defaults also the name of a model of this file.",
    "map": "A router map of yours, instead of the one that is kept.",
    "llama_args": "Arguments for llama-server, as after -- of moestream start.",
}


def start_options() -> dict[str, tuple[type, Any, Any]]:
    """The options of ``moestream start`` that a file may have, by key: type, default, and what Typer knows of it."""
    found = {}
    for name, parameter in inspect.signature(start, eval_str=True).parameters.items():
        annotated, info = get_args(parameter.annotation)
        if isinstance(info, OptionInfo):
            (kind,) = (part for part in get_args(annotated) if part is not type(None))
            found[name.rstrip("_")] = (kind, parameter.default, info)
    return found


def schema() -> str:
    made = Document.model_json_schema()
    options = start_options()
    properties: dict[str, Any] = made["$defs"]["Options"]["properties"]
    for key, entry in properties.items():
        entry.pop("default", None)
        entry.pop("title", None)
        entry["description"] = _MORE.get(key) or options[key][2].help
    made["$defs"]["Options"]["description"] = "Options of moestream start; of a model, or of all."
    for entry in made["properties"].values():
        entry.pop("title", None)
    made["properties"]["models"]["propertyNames"] = {
        "pattern": next(iter(made["properties"]["models"].pop("patternProperties")))
    }
    made["properties"]["models"]["additionalProperties"] = {"$ref": "#/$defs/Options"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "moestream.yaml"}
    return json.dumps({**made, **head, "description": "Settings of moestream start: docs/config.md."}, indent=2) + "\n"


def main() -> int:
    text = schema()
    if PATH.is_file() and PATH.read_text(encoding="utf-8") == text:
        return 0
    check = "--check" in sys.argv[1:]
    if not check:
        PATH.write_text(text, encoding="utf-8")
    print(f"{'out of date' if check else 'rewritten'}: {PATH.name}")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
