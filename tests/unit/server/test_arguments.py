"""Settings to llama-server's command line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from moestream.errors import MoestreamError
from moestream.server.arguments import ServerSettings, build_argv, check_extra, parse_slots, value_after

SERVER = Path("/engine/bin/llama-server")
PLAIN = ServerSettings(model=Path("/models/m.gguf"))


def test_defaults() -> None:
    assert build_argv(SERVER, PLAIN) == [
        "/engine/bin/llama-server", "-m", "/models/m.gguf", "--moe-slots", "auto", "--moe-warm", "0", "--metrics",
        "--host", "127.0.0.1", "--port", "8080",
    ]  # fmt: skip


def test_everything() -> None:
    settings = ServerSettings(
        model=Path("m.gguf"), slots="32", ctx=0, host="::1", port=81, parallel=4, io_threads=8, io="direct",
        policy="lfu", overlap="off", ram_tier="4GiB", prefetch="on", pool="host", gpu_path="copy", require_gpu=True, map=Path("/maps/m.json"), router_top_k=3, warm="off", planned=("-t", "2"), extra=("--alias", "x"),
    )  # fmt: skip
    assert build_argv(SERVER, settings) == [
        "/engine/bin/llama-server", "-m", "m.gguf", "--moe-slots", "32", "--moe-io-threads", "8", "--moe-io",
        "direct", "--moe-policy", "lfu", "--moe-overlap", "off", "--moe-ram", "4GiB", "--moe-prefetch", "on", "--moe-pool", "host", "--moe-gpu-path", "copy", "--moe-require-gpu", "on", "--moe-map", "/maps/m.json", "--moe-map-pin", "3",
        "--moe-warm", "off", "-t", "2", "--metrics", "--host", "::1",
        "--port", "81", "-c", "0", "-np", "4", "--alias", "x",
    ]  # fmt: skip


def test_slots_off_passes_nothing_of_ours() -> None:
    argv = build_argv(SERVER, replace(PLAIN, slots="off", extra=("--repack",)))
    assert [a for a in argv if a.startswith("--moe")] == []


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({"io_threads": 4}, "--io-threads 4"),
        ({"io": "direct"}, "--io direct"),
        ({"policy": "lru"}, "--policy lru"),
        ({"overlap": "on"}, "--overlap on"),
        ({"ram_tier": "auto"}, "--ram-tier auto"),
        ({"prefetch": "off"}, "--prefetch off"),
        ({"map": Path("m.json")}, "--map m.json"),
        ({"pool": "host"}, "--pool host"),
        ({"gpu_path": "copy"}, "--gpu-path copy"),
        ({"require_gpu": True}, "--require-gpu"),
        ({"ram": "8GiB", "vram": "1GiB"}, "--ram 8GiB, --vram 1GiB"),
        ({"warm": "off"}, "--warm off"),
        ({"learn": "on"}, "--learn on"),
        ({"overlap": "off", "io_threads": 1}, "--io-threads 1, --overlap off"),
    ],
)
def test_flags_of_streaming_are_refused_without_it(change: dict[str, object], flags: str) -> None:
    with pytest.raises(MoestreamError, match=f"^{flags} cannot be combined with --slots off"):
        build_argv(SERVER, replace(PLAIN, slots="off", **change))


@pytest.mark.parametrize("warm", ["-1", "on", "", "1.5", "86401", "٣"])
def test_warm_the_engine_would_refuse(warm: str) -> None:
    with pytest.raises(MoestreamError, match=f"--warm {warm}: expected off, or a number of seconds up to 86400"):
        build_argv(SERVER, replace(PLAIN, warm=warm))


@pytest.mark.parametrize(("change", "what"), [({"router_top_k": 2}, "--router-top-k 2"), ({"slots": "map"}, "--slots map")])
def test_what_needs_a_map(change: dict[str, object], what: str) -> None:
    with pytest.raises(MoestreamError, match=f"^{what} needs a router map$"):
        build_argv(SERVER, replace(PLAIN, **change))
    argv = build_argv(SERVER, replace(PLAIN, map=Path("m.json"), **change))
    assert argv[argv.index("--moe-map") + 1] == "m.json"


def test_a_map_and_none() -> None:
    with pytest.raises(MoestreamError, match=r"--map m\.json cannot be combined with --no-map"):
        build_argv(SERVER, replace(PLAIN, map=Path("m.json"), kept_map=False))
    with pytest.raises(MoestreamError, match=r"--map m\.json cannot be combined with --kept-map"):
        build_argv(SERVER, replace(PLAIN, map=Path("m.json"), kept_map=True))


def test_router_top_k_that_is_no_number_of_experts() -> None:
    with pytest.raises(MoestreamError, match="--router-top-k -1: expected a number of experts"):
        build_argv(SERVER, replace(PLAIN, map=Path("m.json"), router_top_k=-1))


@pytest.mark.parametrize("number", [0, -1, 257])
def test_io_threads_the_engine_would_refuse(number: int) -> None:
    with pytest.raises(MoestreamError, match=f"--io-threads {number}: expected a number from 1 to 256"):
        build_argv(SERVER, replace(PLAIN, io_threads=number))


@pytest.mark.parametrize("number", [1, 256])
def test_io_threads_at_the_ends_of_the_range(number: int) -> None:
    argv = build_argv(SERVER, replace(PLAIN, io_threads=number))
    assert argv[argv.index("--moe-io-threads") + 1] == str(number)


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("-m", "--model"),
        ("--model", "--model"),
        ("-hf", "--model"),
        ("--host", "--host"),
        ("--port", "--port"),
        ("-c", "--ctx"),
        ("--ctx-size", "--ctx"),
        ("--ctx_size", "--ctx"),
        ("-np", "--parallel"),
        ("--moe-slots", "--slots"),
        ("--moe-io", "--io"),
        ("--moe-io-threads", "--io-threads"),
        ("--moe_policy", "--policy"),
        ("--moe-overlap", "--overlap"),
        ("--moe-ram", "--ram-tier"),
        ("--moe-prefetch", "--prefetch"),
        ("--moe-pool", "--pool"),
        ("--moe_gpu_path", "--gpu-path"),
        ("--moe-require-gpu", "--require-gpu"),
        ("--metrics", "--metrics"),
        ("--reuse-port", "--reuse-port"),
    ],
)
def test_collisions_name_both(argument: str, ours: str) -> None:
    with pytest.raises(MoestreamError) as caught:
        check_extra(["--alias", "x", argument, "1"])
    assert f"{argument} after --" in caught.value.message
    assert ours in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("argument", ["--metrics-x", "-md", "--chat-template", "-t", "--no-mmap", "--repack", "--no-repack"])
def test_others_pass(argument: str) -> None:
    check_extra([argument, "1"])


def test_a_forgotten_model_flag() -> None:
    with pytest.raises(MoestreamError, match=r"unexpected argument 'm\.gguf'") as caught:
        check_extra(["m.gguf"])
    assert caught.value.hint is not None and "--model m.gguf" in caught.value.hint


@pytest.mark.parametrize(("value", "meant"), [("8", "8"), ("008", "8"), (" ALL ", "all"), ("Auto", "auto"), ("off", "off")])
def test_slots(value: str, meant: str) -> None:
    assert parse_slots(value) == meant


@pytest.mark.parametrize("value", ["", "0", "-1", "8.5", "some", "²", "٣"])
def test_wrong_slots(value: str) -> None:
    with pytest.raises(MoestreamError, match="expected a number"):
        parse_slots(value)


def test_value_after() -> None:
    extra = ["--api-key", "a", "--api_key", "b", "--api-key"]
    assert value_after(extra, "--api-key") == "b"
    assert value_after(extra, "--ssl-key-file") is None


def test_words_for_slots() -> None:
    assert parse_slots("Map") == "map"
    with pytest.raises(MoestreamError, match="--slots map: expected a number of expert slots per layer, auto, all or off"):
        parse_slots("map", ("auto", "all", "off"))
    with pytest.raises(MoestreamError, match="expected a number of expert slots"):
        parse_slots("9" * 5000)


@pytest.mark.parametrize("ram", ["", "much", "-1", "4 GiB x", "0", "٣"])
def test_a_ram_tier_that_is_no_size_is_refused(ram: str) -> None:
    with pytest.raises(MoestreamError, match=r"^--ram-tier .*: expected a size"):
        build_argv(SERVER, replace(PLAIN, ram_tier=ram))


def test_settings_without_streaming() -> None:
    """Nothing of it is left, whatever was asked for."""
    asked = replace(
        PLAIN, **{f.name: "1" for f in fields(PLAIN) if f.default is None}, planned=("-t", "2"), extra=("--alias", "x")
    )
    argv = build_argv(SERVER, replace(asked.without_streaming(), ctx=1, parallel=1))
    assert argv[3:] == ["--metrics", "--host", "127.0.0.1", "--port", "8080", "-c", "1", "-np", "1", "--alias", "x"]
    assert build_argv(SERVER, replace(PLAIN, require_gpu=False)) == build_argv(SERVER, PLAIN)


@pytest.mark.parametrize(
    ("change", "what"), [({"ram": "much"}, "--ram much: expected a size"), ({"vram": "0"}, "--vram 0: expected a size")]
)
def test_budgets_that_are_no_sizes(change: dict[str, str], what: str) -> None:
    with pytest.raises(MoestreamError, match=f"^{what}"):
        build_argv(SERVER, replace(PLAIN, **change))


def test_a_budget_and_slots_of_a_map() -> None:
    with pytest.raises(MoestreamError, match=r"^--ram 8GiB cannot be combined with --slots map: the map says how many"):
        build_argv(SERVER, replace(PLAIN, slots="map", map=Path("m.json"), ram="8GiB"))
