"""moestream.yaml: what is refused, and where; who has the last word."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moestream import config
from moestream.config import COMMAND_LINE, DEFAULT, ConfigFile
from moestream.errors import MoestreamError


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a project, and one of the user's configuration."""
    for name in [name for name in os.environ if name.startswith("MOESTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg" / "moestream").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "project" / "moestream.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def user(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "xdg" / "moestream" / "moestream.yaml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(MoestreamError) as caught:
        config.read(path)
    assert caught.value.hint
    return caught.value.message


# --- reading ---


def test_everything(project: Callable[[str], Path]) -> None:
    path = project("""\
defaults:
  host: 127.0.0.1
  port: 8090
  ready_timeout: 60
models:
  small-1.0:
    model: m.gguf
    slots: 32
    ctx: 0
    ram: 16GiB
    vram: 8000000000
    parallel: 2
    io_threads: 8
    io: direct
    policy: heat
    overlap: off
    ram_tier: 4GiB
    prefetch: off
    pool: host
    gpu_path: mailbox
    require_gpu: true
    map: m.json
    router_top_k: 4
    learn: on
    warm: off
    backend: cpu
    detach: true
    llama_args: [--threads, 8, --temp, 0.5]
  "7b": {kept_map: false, slots: all}
""")
    read = config.read(path)
    small = read.document.models["small-1.0"]
    assert small.model_dump(exclude_unset=True) == {
        "model": "m.gguf", "slots": "32", "ctx": 0, "ram": "16GiB", "vram": "8000000000", "parallel": 2, "io_threads": 8, "io": "direct", "policy": "heat",
        "overlap": "off", "ram_tier": "4GiB", "prefetch": "off", "pool": "host", "gpu_path": "mailbox", "require_gpu": True, "map": "m.json", "router_top_k": 4, "learn": "on", "warm": "off", "backend": "cpu", "detach": True,
        "llama_args": ["--threads", "8", "--temp", "0.5"],
    }  # fmt: skip
    assert read.document.models["7b"].model_dump(exclude_unset=True) == {"kept_map": False, "slots": "all"}
    assert read.document.defaults.ready_timeout == 60
    assert read.place("models", "small-1.0", "ctx") == f"{path}:9"
    covered = {*small.model_fields_set, *read.document.models["7b"].model_fields_set, *read.document.defaults.model_fields_set}
    assert covered == set(config.OPTIONS), "an option that this test does not know"


@pytest.mark.parametrize("text", ["", "# nothing\n", "defaults:\nmodels:\n", "models:\n  small:\n", "{}"])
def test_nothing(project: Callable[[str], Path], text: str) -> None:
    assert config.read(project(text)).document.defaults.model_fields_set == set()


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("default: {}", "1:1", "unknown key 'default' at the top: did you mean 'defaults'?"),
        ("defaults:\n  slts: 8", "2:3", "unknown key 'slts' in defaults: did you mean 'slots'?"),
        ("models:\n  a:\n    io-threads: 8", "3:5", "unknown key 'io-threads' in models.a: did you mean 'io_threads'?"),
        ("models:\n  a: {zzz: 8}", "2:7", "unknown key 'zzz' in models.a"),
        ("slots: 8", "1:1", "unknown key 'slots' at the top: it belongs below 'defaults', or below a model"),
        ("defaults:\n  ctx: many", "2:8", "defaults.ctx is 'many': expected a whole number"),
        ("defaults:\n  ctx: true", "2:8", "defaults.ctx is true: expected a whole number"),
        ("defaults:\n  ctx: '8192'", "2:8", "defaults.ctx is '8192': expected a whole number"),
        ("defaults:\n  ctx: 1.5", "2:8", "defaults.ctx is 1.5: expected a whole number"),
        ("defaults:\n  ctx:", "2:7", "defaults.ctx is empty: expected a whole number"),
        ("defaults:\n  ctx: -1", "2:8", "defaults.ctx is -1: expected 0 or more"),
        ("defaults:\n  ctx: [1]", "2:8", "defaults.ctx is a list: expected a whole number"),
        ("defaults:\n  port: 65536", "2:9", "defaults.port is 65536: expected 65535 or less"),
        ("defaults:\n  parallel: 0", "2:13", "defaults.parallel is 0: expected 1 or more"),
        ("defaults:\n  slots: 0", "2:10", "defaults.slots: --slots 0: expected a number of expert slots per layer, auto, all, map or off"),
        ("defaults:\n  slots: true", "2:10", "defaults.slots: expected a number or a word"),
        ("defaults:\n  warm: 1:30", "2:9", "defaults.warm: --warm 1:30: expected off, or a number of seconds up to 86400"),
        ("defaults:\n  io_threads: 257", "2:15", "defaults.io_threads: --io-threads 257: expected a number from 1 to 256"),
        ("defaults:\n  router_top_k: -1", "2:17", "defaults.router_top_k: --router-top-k -1: expected a number of experts"),
        ("defaults:\n  ram_tier: much", "2:13", "defaults.ram_tier: --ram-tier much: expected a size"),
        ("defaults:\n  ram: much", "2:8", "defaults.ram: --ram much: expected a size"),
        ("defaults:\n  vram: 0", "2:9", "defaults.vram: --vram 0: expected a size"),
        ("defaults:\n  vram: true", "2:9", "defaults.vram: expected a number or a word"),
        ("defaults:\n  pool: gpu", "2:9", "defaults.pool is 'gpu': expected 'auto', 'device' or 'host'"),
        ("defaults:\n  require_gpu: on", "2:16", "defaults.require_gpu is 'on': expected true or false"),
        ("defaults:\n  overlap: true", "2:12", "defaults.overlap is true: expected 'on' or 'off'"),
        ("defaults:\n  policy: mru", "2:11", "defaults.policy is 'mru': expected 'lru', 'lfu' or 'heat'"),
        ("defaults:\n  kept_map: off", "2:13", "defaults.kept_map is 'off': expected true or false"),
        ("defaults:\n  ready_timeout: .inf", "2:18", "defaults.ready_timeout is '.inf': expected a number"),
        ("defaults:\n  host: ''", "2:9", "defaults.host is '': expected a text"),
        ('defaults:\n  host: "a\\0b"', "2:9", "defaults.host: expected a text without control characters"),
        ('defaults:\n  llama_args: ["\\ud800"]', "2:16", "defaults.llama_args.0: expected a text without control characters"),
        ("defaults:\n  ctx: " + "9" * 5000, "2:8", "'99999999999999999999…' has too many digits"),
        ("defaults:\n  llama_args: --x", "2:15", "defaults.llama_args is '--x': expected a list"),
        ("defaults:\n  llama_args:\n  - [a]", "3:5", "defaults.llama_args.0: expected a text or a number; true and false need quotes"),
        ("defaults: 8", "1:11", "defaults is 8: expected keys and values below it"),
        ("- a", "1:1", "the file is a list: expected keys and values below it"),
        ("models:\n  a/b: {}", "2:3", "'a/b' is no name of a model: letters, digits, '.', '_' and '-' make one"),
        ("models:\n  a: {}\n  b: {}\n  a: {}", "4:3", "'a' is there twice, first in line 2"),
        ("defaults:\n  ctx: 1\n  port: 2\n  ctx: 1", "4:3", "'ctx' is there twice, first in line 2"),
        ("? [a]\n: b", "1:3", "a key must be a word"),
        ("defaults:\n  host: !!binary aGk=", "2:9", "tag:yaml.org,2002:binary is no type of value that is known here"),
        ("defaults:\n  ctx: [", "2:9", "this is no YAML: "),
        ("defaults:\n\tctx: 1", "2:1", "this is no YAML: "),
        ("defaults: *a", "1:11", "this is no YAML: found undefined alias"),
        ("a: 1\n---\nb: 2", "2:1", "this is no YAML: expected a single document"),
        ("a: \x07", "1:4", "a character that YAML forbids: "),
    ],
)  # fmt: skip
def test_refused(project: Callable[[str], Path], text: str, place: str, message: str) -> None:
    path = project(text)
    told = refusal(path)
    assert told.startswith(f"{path}:{place}: {message}") and "\n" not in told.removesuffix("\n")


def test_every_mistake_is_told(project: Callable[[str], Path]) -> None:
    path = project("defaults:\n  ctx: many\n  slts: 8\nmodels: 3\n")
    assert [line.split(": ")[0] for line in refusal(path).splitlines()] == [f"{path}:{p}" for p in ("2:8", "3:3", "4:9")]


def test_files_that_cannot_be_read(project: Callable[[str], Path], tmp_path: Path) -> None:
    path = project("")
    path.write_bytes(b"defaults:\n  host: \xff\n")
    assert refusal(path) == f"{path}:2:9: this is no UTF-8"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    assert "no configuration has more than 1 MiB" in refusal(path)
    path.unlink()
    path.mkdir()
    assert refusal(path) == f"cannot read the configuration {path}: Is a directory"
    path.rmdir()
    os.mkfifo(path)
    assert refusal(path) == f"cannot read the configuration {path}: it is no regular file"
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(MoestreamError, match=r"cannot read the configuration .*: No such file"):
        config.load()


@pytest.mark.parametrize("text", ["[" * 100_000, "a: &a [*a]", "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)
)])  # fmt: skip
def test_files_that_would_take_all_memory(project: Callable[[str], Path], text: str) -> None:
    path = project(text)
    message = refusal(path)
    assert "nested too deeply" in message or "more than 20000 values" in message


# --- precedence ---


def merged(given: dict[str, Any] | None = None, **variables: str) -> config.Merged:
    return config.merge(given or {}, {f"MOESTREAM_{name.upper()}": text for name, text in variables.items()}, config.load())


def said(found: config.Merged, option: str) -> tuple[Any, str]:
    setting = found.settings[option]
    return setting.value, setting.source


def test_nothing_is_said() -> None:
    found = merged()
    assert {option: setting.value for option, setting in found.settings.items() if setting.value not in (None, [], False)} == {
        "slots": "auto", "host": "127.0.0.1", "port": 8080, "warm": "0", "ready_timeout": 900.0,
    }  # fmt: skip
    assert {setting.source for setting in found.settings.values()} == {DEFAULT}


def test_each_pair(project: Callable[[str], Path], user: Callable[[str], Path]) -> None:
    """Each level against the one below it, and all that are left against the built-in value."""
    mine, yours = project(""), user("")
    assert said(merged(), "ctx") == (None, DEFAULT)
    user("defaults: {ctx: 1}")
    assert said(merged(), "ctx") == (1, f"{yours}:1")
    user("defaults: {ctx: 1}\nmodels:\n  a: {model: /u, ctx: 2}")
    assert said(merged({"model": "a"}), "ctx") == (2, f"{yours}:3")
    project("defaults: {ctx: 3}")
    assert said(merged({"model": "a"}), "ctx") == (3, f"{mine}:1")
    project("defaults: {ctx: 3}\nmodels:\n  a: {ctx: 4}")
    found = merged({"model": "a"})
    assert said(found, "ctx") == (4, f"{mine}:3")
    assert said(found, "model") == ("/u", f"{yours}:3"), "the project changes a model of the user's"
    assert said(merged({"model": "a"}, ctx="5"), "ctx") == (5, "MOESTREAM_CTX")
    assert said(merged({"model": "a", "ctx": 6}, ctx="5"), "ctx") == (6, COMMAND_LINE)
    assert said(merged({"model": "a"}, ctx=""), "ctx") == (4, f"{mine}:3"), "an empty variable says nothing"


def test_what_is_false_or_0_is_said_all_the_same(user: Callable[[str], Path]) -> None:
    path = user("defaults: {detach: true, port: 1, ctx: 9}")
    found = merged({"detach": False, "ctx": 0}, port="0")
    assert [said(found, option) for option in ("detach", "ctx", "port")] == [
        (False, COMMAND_LINE), (0, COMMAND_LINE), (0, "MOESTREAM_PORT"),
    ]  # fmt: skip
    assert said(merged(), "detach") == (True, f"{path}:1")


def test_which_model(project: Callable[[str], Path], user: Callable[[str], Path], tmp_path: Path) -> None:
    yours = user(
        "models:\n  a: {model: models/a.gguf, slots: 7}\n  b: {model: ~/b.gguf}\n  c: {model: hf:o/r:q4}\n  d: {slots: 9}"
    )
    assert merged().names == ("a", "b", "c", "d")
    found = merged({"model": "a"})
    assert (found.name, found["slots"]) == ("a", "7")
    assert found["model"] == str(tmp_path / "xdg" / "moestream" / "models" / "a.gguf"), "relative to the file that says so"
    assert merged({"model": "b"})["model"] == str(Path.home() / "b.gguf")
    assert merged({"model": "c"})["model"] == "hf:o/r:q4"
    found = merged({"model": "./a"})
    assert (found.name, found["model"], found["slots"]) == (None, "./a", "auto"), "a file of that name"
    assert merged(model="a").name == "a"
    project("defaults: {model: b}")
    assert merged().name == "b"
    assert merged({"model": "a"}).name == "a"
    project("defaults: {model: x.gguf}")
    assert said(merged(), "model") == (str(tmp_path / "project" / "x.gguf"), f"{tmp_path}/project/moestream.yaml:1")
    project("defaults: {model: ../x.gguf}")
    assert merged()["model"] == str(tmp_path / "x.gguf"), "as people read it"
    project("defaults: {model: ~no-such-user/x.gguf}")
    assert merged()["model"] == str(tmp_path / "project" / "~no-such-user" / "x.gguf")
    with pytest.raises(MoestreamError, match=f"{yours}:5: the model 'd' has no file") as caught:
        merged({"model": "d"})
    assert caught.value.hint == "add 'model: PATH' below 'd'"


def test_what_gives_way(user: Callable[[str], Path]) -> None:
    """What a lower level says of something that a higher one has turned off is no contradiction."""
    user("defaults: {policy: heat, io: direct, map: m.json, router_top_k: 3, warm: 9, learn: on}")
    found = merged({"slots": "off"})
    assert {found[o] for o in ("policy", "io", "map", "router_top_k", "learn")} == {None} and said(found, "warm") == (
        "0",
        DEFAULT,
    )
    found = merged({"kept_map": False})
    assert (found["map"], found["router_top_k"], found["policy"]) == (None, None, "heat")
    user("defaults: {kept_map: false}")
    assert merged({"map": "m"})["kept_map"] is None
    user("defaults: {ram: 8GiB, vram: 1GiB, pool: host, require_gpu: true}")
    found = merged({"slots": "map"})
    assert (found["ram"], found["vram"], found["pool"]) == (None, None, "host")
    found = merged({"slots": "off"})
    assert {found[o] for o in ("ram", "vram", "pool", "require_gpu")} == {None}
    user("defaults: {slots: off, policy: heat}")
    assert merged()["policy"] == "heat", "one file says both: start refuses that"


# --- environment ---


def test_variables() -> None:
    found = merged(
        slots="OFF", detach="yes", ready_timeout="1.5", llama_args="--alias 'a b'", io_threads="7", warm="off", kept_map="0"
    )
    assert [found[o] for o in ("slots", "detach", "ready_timeout", "llama_args", "io_threads")] == [
        "off", True, 1.5, ["--alias", "a b"], 7,
    ]  # fmt: skip
    assert config.from_environment({"MOESTREAM_KEPT_MAP": "0"}) == {"kept_map": False}
    asked = {"MOESTREAM_RAM": "16 GiB", "MOESTREAM_REQUIRE_GPU": "1", "MOESTREAM_GPU_PATH": "copy"}
    assert config.from_environment(asked) == {"ram": "16 GiB", "require_gpu": True, "gpu_path": "copy"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ctx", "many", "expected a whole number"),
        ("port", "70000", "expected 65535 or less"),
        ("slots", "0", "--slots 0: expected a number of expert slots per layer, auto, all, map or off"),
        ("detach", "perhaps", "expected true or false"),
        ("policy", "mru", "expected 'lru', 'lfu' or 'heat'"),
        ("ready_timeout", "nan", "expected a number"),
        ("llama_args", "'a", "No closing quotation"),
    ],
)
def test_wrong_variables(name: str, text: str, message: str) -> None:
    with pytest.raises(MoestreamError) as caught:
        merged(**{name: text})
    assert caught.value.message == f"MOESTREAM_{name.upper()}={text}: {message}"


def test_variables_that_nothing_reads() -> None:
    names = ("MOESTREAM_HOME", "MOESTREAM_SLTOS", "MOESTREAM_QQQQQQQQQQQQ", "MOESTREAM_SLOTS", "OTHER")
    assert config.unknown_variables(dict.fromkeys(names, "1")) == [
        "MOESTREAM_QQQQQQQQQQQQ is read by nothing",
        "MOESTREAM_SLTOS is read by nothing: did you mean MOESTREAM_SLOTS?",
    ]


# --- where files are, and errors that come later ---


def test_places(
    project: Callable[[str], Path], user: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert config.load() == []
    yours = user("{}")
    mine = project("{}")
    assert [file.path for file in config.load()] == [mine, yours]
    monkeypatch.chdir(yours.parent)
    assert [file.path for file in config.load()] == [yours], "one file is read once"
    monkeypatch.setenv("MOESTREAM_HOME", str(tmp_path / "home"))
    assert config.user_path() == tmp_path / "home" / "config" / "moestream.yaml"
    monkeypatch.delenv("MOESTREAM_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config.user_path() == Path.home() / ".config" / "moestream" / "moestream.yaml"


def test_errors_say_where_a_flag_comes_from(user: Callable[[str], Path]) -> None:
    path = user("defaults:\n  slots: 99\n  llama_args: [--moe-io, x]\n")
    settings = merged(host="h").settings
    error = config.explained(MoestreamError("--slots 99: too many", hint="--slots all"), settings)
    assert (error.message, error.hint) == ("--slots 99: too many", f"--slots all; slots is from {path}:2")
    error = config.explained(MoestreamError("--moe-io after -- collides"), settings)
    assert error.hint == f"llama_args is from {path}:3"
    error = MoestreamError("--ctx 3: no", hint="x")
    assert config.explained(error, settings) is error


def test_a_read_file_knows_its_lines(project: Callable[[str], Path]) -> None:
    read: ConfigFile = config.read(project("models:\n  a:\n    llama_args:\n    - x\n"))
    assert read.lines["models", "a"] == 2 and read.lines["models", "a", "llama_args"] == 3
