"""Router maps in the engine: pinned experts, slots for each layer, slots that are filled beforehand; and maps that are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from llama_server import LlamaServer, environment
from waiting import until

from moestream import gguf_facts
from moestream.routing.fingerprint import fingerprint

POISON = {"MOESTREAM_POISON": "1", "MOESTREAM_CHECK": "1"}
PROMPT = "The command reads the file named on the command line and writes each line to standard output, numbered. " * 3
N_LAYER, N_EXPERT, N_USED = 8, 64, 6


def map_of(model: Path) -> dict[str, Any]:
    """A map in which the experts of layer i are used the more the nearer they come after 7 * i."""
    facts = gguf_facts.read(model)
    n_expert = {il: facts.layer_tensors(il)[0].n_expert for il in facts.moe_layers}
    return {
        "format": "moestream.map",
        "version": 1,
        "model": {"fingerprint": fingerprint(facts), "architecture": facts.architecture, "name": model.name},
        "tokens": 1000,
        "n_expert_used": facts.n_expert_used,
        "layers": [{"layer": il, "n_expert": n, "counts": [(7 * il - e) % n for e in range(n)]} for il, n in n_expert.items()],
    }


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def logits(model: Path, out: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> bytes:
    """All logits of a text, written by upstream's own program; several ubatches wide and narrow ones."""
    run(
        tool("llama-results"), "-m", model, "-o", out, "-p", PROMPT, "-b", "256", "-ub", "5", "-t", "1", "-c", "512", *arguments,
        env=environment({**POISON, **(env or {})}),
    )  # fmt: skip
    return out.read_bytes()


@pytest.mark.parametrize("layout", ["demo", "qwen2moe", "gemma4"])
def test_identity(demo: Path, model: Callable[[str, str], Path], tmp_path: Path, layout: str) -> None:
    path = demo if layout == "demo" else model(layout, "q4_0")
    document = map_of(path)
    used, layers = document["n_expert_used"], document["layers"]
    document["slots"] = {str(one["layer"]): min(used + 2 + i % 3, one["n_expert"]) for i, one in enumerate(layers)}
    router_map = write(tmp_path / "map.json", document)
    stock = logits(path, tmp_path / "stock")
    assert len(stock) > 50 * 8 * 4
    few = str(used + 2)
    for name, arguments in {
        "pinned": ("--moe-slots", few, "--moe-map-pin", "2"),
        "pinned, heat": ("--moe-slots", few, "--moe-map-pin", "1", "--moe-policy", "heat", "--moe-io", "direct"),
        "warm": ("--moe-slots", few, "--moe-warm", "60"),
        "warm meanwhile": ("--moe-slots", few, "--moe-map-pin", "2", "--moe-warm", "0"),
        "slots of the map": ("--moe-slots", "map", "--moe-map-pin", "2", "--moe-warm", "0"),
    }.items():
        stats = tmp_path / "stats.json"
        env = {"MOESTREAM_STATS_FILE": str(stats)}
        assert logits(path, tmp_path / "streamed", *arguments, "--moe-map", router_map, env=env) == stock, name
        report = json.loads(stats.read_text())
        assert report["totals"]["evictions"] > 0, name
        assert report["map"]["name"] == "map.json"
        if arguments[1] == "map":
            assert {str(one["layer"]): one["slots"] for one in report["layers"]} == document["slots"]
            assert report["slots_requested"] == "map"
            assert report["slots"] == max(document["slots"].values())
            experts = {
                il: sum(t.bytes_per_expert for t in gguf_facts.read(path).layer_tensors(il))
                for il in map(int, document["slots"])
            }
            assert report["memory"]["pool_bytes"] == sum(n * experts[int(il)] for il, n in document["slots"].items())


def test_pinned_and_warm(demo: Path, tmp_path: Path) -> None:
    """Before the first request the slots hold what the map says; after many the pinned experts are still there."""
    router_map = write(tmp_path / "map.json", map_of(demo))
    arguments = ("--moe-slots", "12", "--moe-map", str(router_map), "--moe-map-pin", "5", "--moe-warm", "60")
    with LlamaServer(demo, tmp_path / "plain", "--moe-slots", "12") as server:
        expected = server.complete(PROMPT, 40)
        assert server.stats()["totals"]["warm_bytes"] == 0
    with LlamaServer(demo, tmp_path / "log", *arguments, env=POISON) as server:
        ready = server.stats()
        assert (ready["map"], ready["warm"]) == ({"name": "map.json", "pin": 5}, "60 s")
        one = gguf_facts.read(demo).layer_tensors(0)
        for layer in ready["layers"]:
            assert (layer["warm_filled"], layer["pins"], layer["hits"], layer["misses"], layer["bytes_read"]) == (
                12,
                5,
                0,
                0,
                0,
            )
            assert layer["warm_bytes"] == 12 * sum(t.bytes_per_expert for t in one)
        assert server.metrics()['moestream_pins{layer="7"}'] == 5
        assert server.complete(PROMPT, 40) == expected
        assert server.complete(PROMPT, 40) == expected
        busy = server.stats()
        for layer in busy["layers"]:
            assert (layer["warm_filled"], layer["pins"]) == (12, 5)
            assert layer["evictions"] > 50


def test_warm_in_the_background(demo: Path, tmp_path: Path) -> None:
    with LlamaServer(demo, tmp_path / "log", "--moe-slots", "9", "--moe-warm", "0") as server:

        def is_full() -> bool:
            return server.stats()["totals"]["warm_filled"] == 9 * N_LAYER

        until(is_full, "the slots to be filled", 30)
        assert server.stats()["warm"] == "background"
        assert server.stats()["totals"]["misses"] == 0


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def text(document: dict[str, Any]) -> str:
        change(document)
        return json.dumps(document)

    return text


BAD = {
    "no JSON": (lambda _: "GGUF", "this is no JSON: "),
    "empty": (lambda _: "", "this is no JSON: "),
    "cut off": (lambda d: json.dumps(d)[:-9], "this is no JSON: "),
    "deep": (lambda _: "[" * 100_000, "this is no JSON: "),
    "a list": (lambda _: "[1]", 'this is no router map: its "format" is not "moestream.map"'),
    "another format": (changed(lambda d: d.update(format="moestream.trace")), "this is no router map"),
    "another version": (changed(lambda d: d.update(version=2)), "version 2 of the map format, expected 1; hint: make the map again with this version"),
    "no version": (changed(lambda d: d.pop("version")), '"version" is missing'),
    "another model": (changed(lambda d: d["model"].update(fingerprint="0" * 16, name="x.gguf")), "this is a map of another model, 'x.gguf' (0000000000000000), not of the one to load ("),
    "no fingerprint": (changed(lambda d: d["model"].pop("fingerprint")), '"model.fingerprint" is missing'),
    "a number for a name": (changed(lambda d: d["model"].update(name=3)), '"model.name" is 3, expected a text'),
    "no layers": (changed(lambda d: d.update(layers=[])), '"layers" is [], expected a list of layers'),
    "a layer too few": (changed(lambda d: d["layers"].pop(3)), "layer 3 is missing; hint: make a map of this model"),
    "a layer too many": (changed(lambda d: d["layers"].append({**d["layers"][0], "layer": 8})), "the model has no experts in layer 8"),
    "a layer twice": (changed(lambda d: d["layers"].append(d["layers"][2])), "layer 2 is there twice"),
    "other experts": (changed(lambda d: d["layers"][1].update(n_expert=2, counts=[1, 2])), "layer 1 has 64 experts, the map counts 2"),
    "a count too few": (changed(lambda d: d["layers"][1]["counts"].pop()), '"layers[1].counts" has 63 entries, expected the 64 of n_expert'),
    "a negative count": (changed(lambda d: d["layers"][1]["counts"].__setitem__(9, -1)), '"layers[1].counts[9]" is -1, expected a number that is not negative'),
    "half a count": (changed(lambda d: d["layers"][1]["counts"].__setitem__(9, 0.5)), '"layers[1].counts[9]" is 0.5, expected'),
    "a count beyond 63 bits": (changed(lambda d: d["layers"][1]["counts"].__setitem__(9, 2**63)), '"layers[1].counts[9]" is 9223372036854775808, expected'),
    "slots of a layer missing": (changed(lambda d: d.update(slots={"0": 8})), '"slots.1" is missing'),
    "slots of no layer": (changed(lambda d: d.update(slots={str(i): 8 for i in range(9)})), '"slots" has 9 entries, expected the 8 layers of the map'),
    "slots 0": (changed(lambda d: d.update(slots={str(i): i for i in range(8)})), '"slots.0" is 0, expected a number from 1'),
}  # fmt: skip


def refusal(*arguments: str | Path, env: dict[str, str] | None = None) -> str:
    done = run(tool("llama-server"), "--port", "1", *arguments, env=environment(env), timeout_s=60, ok=False)
    assert done.returncode == 1, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", BAD)
def test_bad_maps(demo: Path, tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    path = tmp_path / "map.json"
    path.write_text(text(map_of(demo)))
    output = refusal("-m", demo, "--moe-slots", "8", "--moe-map-pin", "1", "--moe-map", path)
    assert f"--moe-map {path}: {message}" in output
    assert "; hint: " in output


def test_files_that_are_none(demo: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (("none", "No such file or directory"), ("pipe", "is no regular file"), (".", "is no regular file")):
        output = refusal("-m", demo, "--moe-slots", "8", "--moe-map-pin", "1", "--moe-map", tmp_path / path)
        assert f"{why}; hint: give the path of a router map" in output


@pytest.mark.parametrize(("arguments", "message"), [
    (("--moe-slots", "8", "--moe-map-pin", "3"), "--moe-map-pin 3 is too many: layer 0 has 8 slots, and a token of this model uses 6 experts; hint: --moe-map-pin 2 or less, or more slots"),
    (("--moe-slots", "6", "--moe-map-pin", "1"), "--moe-map-pin 1 is too many: layer 0 has 6 slots, and a token of this model uses 6 experts; hint: more slots"),
    (("--moe-slots", "map"), "does not say how many slots a layer gets; hint: moestream map make --budget, or --moe-slots N"),
    (("--moe-slots", "8"), "--moe-map does nothing alone; hint: add --moe-map-pin N, --moe-warm SECONDS or --moe-slots map, or leave it out"),
    ((), "--moe-map does nothing without --moe-slots; hint: add --moe-slots N, or leave out --moe-map"),
])  # fmt: skip
def test_combinations(demo: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    router_map = write(tmp_path / "map.json", map_of(demo))
    assert message in refusal("-m", demo, "--moe-map", router_map, *arguments)


def test_slots_of_the_map_that_are_too_few(demo: Path, tmp_path: Path) -> None:
    router_map = write(tmp_path / "map.json", {**map_of(demo), "slots": {str(i): 5 if i == 4 else 9 for i in range(N_LAYER)}})
    output = refusal("-m", demo, "--moe-slots", "map", "--moe-map", router_map)
    assert "gives layer 4 5 slots, which is too few: a token of this model uses 6 experts a layer" in output


@pytest.mark.parametrize(("arguments", "message"), [
    (("--moe-map-pin", "2"), "--moe-map-pin does nothing without --moe-map; hint: add --moe-map FILE, or leave out --moe-map-pin"),
    (("--moe-slots", "map"), "--moe-slots map does nothing without --moe-map"),
])  # fmt: skip
def test_without_a_map(demo: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal("-m", demo, "--moe-slots", "8", *arguments)
