"""Settings of ``moestream start`` from configuration files and the environment: read strictly, and put together.

A file is YAML, ``moestream.yaml``: the project's in the current folder, the user's in the configuration folder. What may be in it is
the model :class:`Document`; its JSON schema is docs/moestream.schema.json. The one place that decides about precedence is :func:`merge`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from moestream import paths
from moestream.errors import MoestreamError
from moestream.routing import files
from moestream.server.arguments import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_READY_TIMEOUT_S,
    DEFAULT_WARM,
    MAX_IO_THREADS,
    MAX_WARM_S,
    STREAMING_OPTIONS,
    check_budget,
    check_io_threads,
    check_ram_tier,
    check_top_k,
    check_warm,
    parse_slots,
)

FILE_NAME = "moestream.yaml"
VARIABLE = "MOESTREAM_"
COMMAND_LINE, DEFAULT = "command line", "default"
# Variables of that prefix which are no settings of start.
OTHER_VARIABLES = ("HOME", "ENGINE_DIR", "BINS_URL", "STATS_FILE", "CHECK", "POISON", "GUESS_NOISE")
_MAX_BYTES = 1 << 20
_MAX_NODES = 20_000  # YAML's aliases make few bytes many
_REFERENCE = "docs/config.md lists the keys; moestream config check looks at everything"


def _checked(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A check of ours as a validator of pydantic's."""

    def run(value: Any) -> Any:
        try:
            return check(value)
        except MoestreamError as error:
            raise PydanticCustomError("moestream", "{message}", {"message": error.message}) from error

    return run


def _word(value: Any) -> str:
    """A number or a word, as a flag would have it."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("moestream", "expected a number or a word")
    return str(value)


def _argument(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("moestream", "expected a text or a number; true and false need quotes")
    return str(value)


def _plain(value: str) -> str:
    """YAML can write characters that no argument and no path can have."""
    if any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in value):
        raise PydanticCustomError("moestream", "expected a text without control characters")
    return value


def _nothing(value: Any) -> Any:
    """A key whose values are all commented out."""
    return {} if value is None else value


def _number_or(*words: str, least: int, most: int | None = None) -> WithJsonSchema:
    number = {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}
    return WithJsonSchema({"anyOf": [number, {"enum": list(words)}]})


def _size(flag: str) -> Any:
    """A size, as a flag would have it."""
    schema = {"anyOf": [{"type": "string", "pattern": "^[0-9]"}, {"type": "integer", "minimum": 1}]}
    return Annotated[str, BeforeValidator(_word), AfterValidator(_checked(partial(check_budget, flag))), WithJsonSchema(schema)]


_Slots = Annotated[
    str, BeforeValidator(_word), AfterValidator(_checked(parse_slots)), _number_or("auto", "all", "map", "off", least=1)
]
_Warm = Annotated[
    str, BeforeValidator(_word), AfterValidator(_checked(check_warm)), _number_or("off", least=0, most=MAX_WARM_S)
]
_IoThreads = Annotated[
    int,
    AfterValidator(_checked(check_io_threads)),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_IO_THREADS}),
]
_TopK = Annotated[int, AfterValidator(_checked(check_top_k)), WithJsonSchema({"type": "integer", "minimum": 0})]
_Text = Annotated[str, StringConstraints(min_length=1), AfterValidator(_plain)]
_Argument = Annotated[str, BeforeValidator(_argument), AfterValidator(_plain), WithJsonSchema({"type": ["string", "number"]})]
_RamTier = Annotated[
    str,
    BeforeValidator(_word),
    AfterValidator(_checked(check_ram_tier)),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": "^[0-9]"}, {"type": "integer", "minimum": 1}, {"enum": ["auto", "none"]}]}
    ),
]
_Ram, _Vram = _size("--ram"), _size("--vram")
_Switch = Literal["on", "off"]


class Options(BaseModel):
    """Every option of ``moestream start``, in the order in which they are shown. What is not given is None."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: _Text = Field(default=None)
    slots: _Slots = Field(default=None)
    ram: _Ram = Field(default=None)
    vram: _Vram = Field(default=None)
    ctx: int = Field(default=None, ge=0)
    host: _Text = Field(default=None)
    port: int = Field(default=None, ge=0, le=65535)
    parallel: int = Field(default=None, ge=1)
    io_threads: _IoThreads = Field(default=None)
    io: Literal["auto", "direct", "buffered"] = Field(default=None)
    policy: Literal["lru", "lfu", "heat"] = Field(default=None)
    overlap: _Switch = Field(default=None)
    ram_tier: _RamTier = Field(default=None)
    prefetch: Literal["auto", "on", "off"] = Field(default=None)
    pool: Literal["auto", "device", "host"] = Field(default=None)
    gpu_path: Literal["auto", "copy", "mailbox"] = Field(default=None)
    require_gpu: bool = Field(default=None)
    map: _Text = Field(default=None)
    kept_map: bool = Field(default=None)
    learn: _Switch = Field(default=None)
    router_top_k: _TopK = Field(default=None)
    warm: _Warm = Field(default=None)
    backend: _Text = Field(default=None)
    detach: bool = Field(default=None)
    ready_timeout: float = Field(default=None, ge=0, allow_inf_nan=False)
    llama_args: list[_Argument] = Field(default=None)


_Section = Annotated[Options, BeforeValidator(_nothing)]
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Document(BaseModel):
    """A configuration file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    defaults: _Section = Field(default_factory=Options)
    models: Annotated[dict[_Name, _Section], BeforeValidator(_nothing)] = Field(default_factory=dict)


OPTIONS: tuple[str, ...] = tuple(Options.model_fields)
# What holds when nothing is said; None: the engine, llama-server or the model decides.
BUILT_IN: dict[str, Any] = {
    **dict.fromkeys(OPTIONS),
    "slots": "auto",
    "host": DEFAULT_HOST,
    "port": DEFAULT_PORT,
    "warm": DEFAULT_WARM,
    "detach": False,
    "ready_timeout": DEFAULT_READY_TIMEOUT_S,
    "llama_args": [],
}
_PATHS = ("model", "map")
# Where the first says so, the others mean nothing; those of a lower rank give way, those of the same are a contradiction for start to refuse.
_GIVE_WAY: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    (
        "slots",
        lambda v: v == "off",
        (*STREAMING_OPTIONS, "learn", "kept_map"),
    ),
    ("slots", lambda v: v == "map", ("ram", "vram")),
    ("kept_map", lambda v: True, ("map", "router_top_k")),
    ("map", lambda v: True, ("kept_map",)),
)


# --- files ---


@dataclass(frozen=True)
class ConfigFile:
    """A file that was read and found to be right.

    Attributes:
        lines: of each value, by where it is: ``("models", "small", "slots")``; from 1.
    """

    path: Path
    document: Document
    lines: Mapping[tuple[str, ...], int] = field(repr=False)

    def place(self, *where: str) -> str:
        return f"{self.path}:{self.lines[where]}"


def user_path() -> Path:
    return paths.config_dir() / FILE_NAME


def project_path() -> Path:
    """In the current folder.

    Raises:
        MoestreamError: that has been deleted.
    """
    return paths.absolute(Path(FILE_NAME))


def places() -> list[Path]:
    """The files that are there, the project's first. A folder that was deleted has none."""
    found = [user_path()]
    with contextlib.suppress(MoestreamError):
        found.insert(0, project_path())
    found = [path for path in dict.fromkeys(found) if os.path.lexists(path)]
    return found[:1] if len(found) == 2 and all(map(os.path.exists, found)) and os.path.samefile(*found) else found


def load() -> list[ConfigFile]:
    """The project's file and the user's, as far as they are there; what is said first counts.

    Raises:
        MoestreamError: see :func:`read`.
    """
    return [read(path) for path in places()]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: ``off`` is a word, ``1:30`` is no number."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}  # noqa: RUF012


def _resolver(tag: str, pattern: str, first: str) -> None:
    import re

    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolver("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.yaml_implicit_resolvers.setdefault("", []).extend(_Loader.yaml_implicit_resolvers["~"])
_resolver("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolver("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789")
_resolver("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}


class _Tree:
    """A YAML document as Python's values, and where each of them is."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self.path = path
        self.keys: dict[tuple[str, ...], yaml.Mark] = {}
        self.values: dict[tuple[str, ...], yaml.Mark] = {}
        self.problems: list[tuple[yaml.Mark, str]] = []
        self._loader = loader
        self._n_nodes = 0
        node = loader.get_single_node()
        self.data = {} if node is None else self._value(node, ())

    def _value(self, node: yaml.Node, where: tuple[str, ...]) -> Any:
        self._n_nodes += 1
        if self._n_nodes > _MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"more than {_MAX_NODES} values", problem_mark=node.start_mark)
        self.values[where] = node.start_mark
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(child, (*where, str(i))) for i, child in enumerate(node.value)]
        if node.tag not in _SCALARS:
            self.problems.append((node.start_mark, f"{node.tag} is no type of value that is known here"))
            return None
        try:
            return self._loader.construct_object(node)
        except ValueError:  # Python reads no number of thousands of digits
            self.problems.append((node.start_mark, f"'{node.value[:20]}…' has too many digits"))
            return None

    def _mapping(self, node: yaml.MappingNode, where: tuple[str, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append((key_node.start_mark, "a key must be a word"))
                continue
            key = key_node.value
            here = (*where, key)
            if key in made:
                first = self.keys[here].line + 1
                self.problems.append((key_node.start_mark, f"'{key}' is there twice, first in line {first}"))
                continue
            self.keys[here] = key_node.start_mark
            made[key] = self._value(child, here)
        return made


def _error(path: Path, problems: Sequence[tuple[yaml.Mark, str]]) -> MoestreamError:
    """All that is wrong with a file, by line."""
    ordered = sorted({(mark.line + 1, mark.column + 1, text) for mark, text in problems})
    return MoestreamError("\n".join(f"{path}:{line}:{column}: {text}" for line, column, text in ordered), hint=_REFERENCE)


def read(path: Path) -> ConfigFile:
    """Read a configuration file, strictly.

    Raises:
        MoestreamError: it cannot be read, is no YAML, has a key twice, a key that is not known, or a value that start would refuse. Each
            is named with line and column.
    """
    with files.open_regular(path, "configuration") as file:
        try:
            raw = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise MoestreamError(f"cannot read the configuration {path}: {error.strerror}", hint="check the path") from error
    if len(raw) > _MAX_BYTES:
        raise MoestreamError(f"{path}: no configuration has more than {_MAX_BYTES >> 20} MiB", hint="is it another file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise MoestreamError(f"{path}:{line}:{column}: this is no UTF-8", hint="save it as UTF-8") from error
    loader = None
    try:
        loader = _Loader(text)
        tree = _Tree(path, loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise MoestreamError(
            f"{path}:{line}:{column}: a character that YAML forbids: {error.reason}", hint=_REFERENCE
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(filter(None, [error.context, error.problem]))
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise MoestreamError(f"{where}: this is no YAML: {what}", hint="is the indentation right?") from error
    except RecursionError as error:
        raise MoestreamError(f"{path}: nested too deeply", hint=_REFERENCE) from error
    finally:
        if loader is not None:
            loader.dispose()
    problems = list(tree.problems)
    try:
        document = Document.model_validate(tree.data)
    except ValidationError as error:
        told = {
            (mark.line, mark.column) for mark, _ in problems
        }  # of a value that could not be read pydantic says that there is none
        more = [_problem(tree, dict(found)) for found in error.errors(include_url=False)]
        problems += [(mark, text) for mark, text in more if (mark.line, mark.column) not in told]
    if problems:
        raise _error(path, problems)
    return ConfigFile(path, document, {where: mark.line + 1 for where, mark in (tree.values | tree.keys).items()})


def _problem(tree: _Tree, found: dict[str, Any]) -> tuple[yaml.Mark, str]:
    """What pydantic found, and where."""
    where = tuple(str(part) for part in found["loc"])
    in_key = where[-1:] == ("[key]",)
    where = where[:-1] if in_key else where
    if found["type"] == "extra_forbidden":
        return tree.keys[where], _unknown(where)
    if in_key:
        return tree.keys[where], f"'{where[-1]}' is no name of a model: letters, digits, '.', '_' and '-' make one"
    name = ".".join(where) or "the file"
    if found["type"] == "moestream":
        return tree.values[where], f"{name}: {found['msg']}"
    return tree.values[where], f"{name} is {_shown(found['input'])}: {_expected(found)}"


_EXPECTED = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected keys and values below it"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    **dict.fromkeys(("string_type", "string_too_short"), "expected a text"),
    "list_type": "expected a list",
}


def _expected(found: Mapping[str, Any]) -> str:
    """Pydantic's message in other words than those for who writes programs."""
    limits = found.get("ctx") or {}
    if found["type"] == "greater_than_equal":
        return f"expected {limits['ge']} or more"
    if found["type"] == "less_than_equal":
        return f"expected {limits['le']} or less"
    return _EXPECTED.get(found["type"]) or str(found["msg"]).replace("Input should be", "expected")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a mapping"
    text = "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _unknown(where: tuple[str, ...]) -> str:
    key, parents = where[-1], where[:-1]
    known = OPTIONS if parents else tuple(Document.model_fields)
    place = f"in {'.'.join(parents)}" if parents else "at the top"
    text = f"unknown key '{key}' {place}"
    like = key.strip("-").replace("-", "_").lower()
    if not parents and like in OPTIONS:
        return f"{text}: it belongs below 'defaults', or below a model"
    close = difflib.get_close_matches(like, known, n=1)
    return f"{text}: did you mean '{close[0]}'?" if close else text


# --- environment ---


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that ``MOESTREAM_…`` variables give; empty ones give none.

    Raises:
        MoestreamError: names the variable and its value.
    """
    found: dict[str, Any] = {}
    for option in OPTIONS:
        variable = VARIABLE + option.upper()
        text = environment.get(variable, "")
        if not text:
            continue
        try:
            given = shlex.split(text) if option == "llama_args" else text
            found[option] = getattr(Options.model_validate({option: given}, strict=False), option)
        except ValidationError as error:
            first = dict(error.errors(include_url=False)[0])
            message = str(first["msg"]) if first["type"] == "moestream" else _expected(first)
            raise MoestreamError(f"{variable}={text}: {message}", hint=f"change it, or unset {variable}") from error
        except ValueError as error:  # of shlex
            raise MoestreamError(f"{variable}={text}: {error}", hint="quote as in a shell") from error
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Lines about ``MOESTREAM_…`` variables that nothing reads."""
    known = [VARIABLE + name for name in (*(o.upper() for o in OPTIONS), *OTHER_VARIABLES)]
    lines = []
    for name in sorted(environment):
        if name.startswith(VARIABLE) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            lines.append(f"{name} is read by nothing" + (f": did you mean {close[0]}?" if close else ""))
    return lines


# --- together ---


@dataclass(frozen=True)
class Setting:
    """A value in force, and who said so.

    Attributes:
        value: None: not given anywhere.
        source: ``command line``, a variable, ``FILE:LINE`` or ``default``.
        rank: 0 for who has the most to say.
    """

    value: Any
    source: str
    rank: int


@dataclass(frozen=True)
class Merged:
    """All settings of a start.

    Attributes:
        name: of the model in the files; None where it was given as a path, or not at all.
        settings: every option.
        names: of all models in the files.
    """

    name: str | None
    settings: Mapping[str, Setting]
    names: tuple[str, ...]

    def __getitem__(self, option: str) -> Any:
        return self.settings[option].value


@dataclass(frozen=True)
class _Layer:
    """One that has something to say.

    Attributes:
        folder: what its paths are relative to; None: the current one.
        named: whether it is a model's own part of a file.
    """

    values: Mapping[str, Any]
    source: Callable[[str], str]
    folder: Path | None = None
    named: bool = False


def merge(given: Mapping[str, Any], environment: Mapping[str, str], found: Sequence[ConfigFile]) -> Merged:
    """Put together what was said: the command line before variables, those before the project's file, that before the user's,
    the built-in values last. In a file, what is said of the model counts before ``defaults``.

    Args:
        given: options of the command line; those that are None were not given.
        found: the files, the project's first.

    Raises:
        MoestreamError: a variable is wrong, or a model has a name and no file.
    """
    on_line = _Layer({k: v for k, v in given.items() if v is not None}, lambda option: COMMAND_LINE)
    variables = _Layer(from_environment(environment), lambda option: VARIABLE + option.upper())
    names = tuple(dict.fromkeys(name for file in found for name in file.document.models))
    defaults = {file.path: _layer(file, "defaults") for file in found}

    asked = next((x.values["model"] for x in (on_line, variables, *defaults.values()) if "model" in x.values), None)
    name = str(asked) if str(asked) in names else None
    layers = [on_line, variables]
    for file in found:
        if name in file.document.models:
            layers.append(_layer(file, "models", name or ""))
        layers.append(defaults[file.path])
    settings: dict[str, Setting] = {}
    for option in OPTIONS:
        candidates = [(i, layer) for i, layer in enumerate(layers) if option in layer.values]
        if option == "model" and name is not None:  # the name was found; its file is what the model's own entries say
            candidates = [(i, layer) for i, layer in candidates if layer.named]
            if not candidates:
                raise _without_file(name, found)
        rank, layer = candidates[0] if candidates else (len(layers), None)
        if layer is None:
            settings[option] = Setting(BUILT_IN[option], DEFAULT, rank)
        else:
            value = layer.values[option]
            settings[option] = Setting(_path(value, layer.folder) if option in _PATHS else value, layer.source(option), rank)
    _give_way(settings)
    return Merged(name, settings, names)


def _layer(file: ConfigFile, *where: str) -> _Layer:
    options = file.document.defaults if where == ("defaults",) else file.document.models[where[1]]
    values = {option: getattr(options, option) for option in options.model_fields_set}
    return _Layer(values, lambda option: file.place(*where, option), file.path.parent, named=where != ("defaults",))


def _path(value: Any, folder: Path | None) -> str:
    """As a file means it: relative to its own folder. A model of a hub has no place."""
    text = str(value)
    if folder is None or text.startswith("hf:"):
        return text
    return str(paths.absolute(folder / os.path.expanduser(text)))


def _without_file(name: str, found: Sequence[ConfigFile]) -> MoestreamError:
    file = next(file for file in found if name in file.document.models)
    return MoestreamError(
        f"{file.place('models', name)}: the model '{name}' has no file", hint=f"add 'model: PATH' below '{name}'"
    )


def _give_way(settings: dict[str, Setting]) -> None:
    for option, means, others in _GIVE_WAY:
        winner = settings[option]
        if winner.source == DEFAULT or not means(winner.value):
            continue
        for other in others:
            if settings[other].source != DEFAULT and settings[other].rank > winner.rank:
                settings[other] = Setting(BUILT_IN[other], DEFAULT, len(settings))


def sources(merged: Merged) -> dict[str, str]:
    """What files and variables have decided, for the report of a start."""
    return {
        option: setting.source for option, setting in merged.settings.items() if setting.source not in (COMMAND_LINE, DEFAULT)
    }


def explained(error: MoestreamError, settings: Mapping[str, Setting]) -> MoestreamError:
    """The same error; where a flag that it names was given by a file or a variable, the hint says by which."""
    said = [
        f"{option} is from {setting.source}"
        for option, setting in settings.items()
        if setting.source not in (COMMAND_LINE, DEFAULT) and f"{_flag_of(option)} " in f"{error.message} "
    ]
    if not said:
        return error
    hint = "; ".join(filter(None, [error.hint, *said]))
    return MoestreamError(error.message, hint=hint, exit_code=error.exit_code)


def _flag_of(option: str) -> str:
    """The flag of an option, as messages name it."""
    return " --" if option == "llama_args" else "--" + option.replace("_", "-")
