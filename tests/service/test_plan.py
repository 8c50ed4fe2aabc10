"""``moestream plan``: models on a hub by their headers alone, on real sockets; its JSON; what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Repo, fake_hub
from malformed import STR, array, tiny, write_shards
from service_harness import DEMO, ROOT, Home

from moestream.upstream import engines

ARR = 9
DOC = ROOT / "docs" / "planning.md"
KIB = 1 << 10
PADDING = 24 << 20  # behind the weights that a plan needs nothing of


def with_vocabulary(n_token: int) -> bytes:
    """The tiny model with a long vocabulary, and some tens of megabytes of weights."""
    model = tiny()
    model.kv["tokenizer.ggml.tokens"] = (ARR, array(STR, [f"token {i:08d}" for i in range(n_token)]))
    widest = model.tensors[-1]
    model.tensors.append(type(widest)("big.weight", (PADDING // 4,), 0, bytes(PADDING)))
    data = model.write()
    assert len(data) > PADDING
    return data


@pytest.fixture
def hub(home: Home, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        home.variables |= {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }  # fmt: skip
        yield hub


def served_bytes(hub: FakeHub) -> int:
    """What the storage was asked for; each request is for a range."""
    total = 0
    for text in hub.ranges():
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", text or "")
        assert asked, text
        total += int(asked[2]) + 1 - int(asked[1])
    return total


def plan(home: Home, *arguments: str) -> dict[str, Any]:
    done = home.run("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- models on a hub ---


def test_the_header_alone_is_fetched(home: Home, hub: FakeHub) -> None:
    data = with_vocabulary(250_000)
    end = data.index(b"big.weight") + 100  # the last of the header
    hub.repos["org/big-GGUF"] = Repo({"big-Q4_K_M.gguf": data, "mmproj-F16.gguf": b"no model"})
    answer = plan(home, "hf:org/big-GGUF")
    served = served_bytes(hub)
    assert end <= served <= end + (2 << 20) and served < len(data) / 2
    assert answer["model"]["header_bytes_fetched"] == served
    assert answer["model"]["remote"] is True and answer["model"]["name"] == "hf:org/big-GGUF:Q4_K_M"
    assert answer["model"]["total_bytes"] == len(data)
    sizes = [int(b) + 1 - int(a) for a, b in (re.findall(r"\d+", text) for text in hub.ranges())]
    assert sizes[0] == 64 * KIB and sizes[:-1] == sorted(sizes[:-1]) and max(sizes) == 2 << 20  # they grow, to a limit
    assert "moestream start --model hf:org/big-GGUF:Q4_K_M" in answer["command"]
    assert not (home.folder / "data" / "models").exists()


def test_it_says_what_a_local_file_says(home: Home, hub: FakeHub, tmp_path: Path) -> None:
    data = tiny().write()
    hub.repos["org/tiny-GGUF"] = Repo({"tiny-Q8_0.gguf": data})
    (tmp_path / "tiny.gguf").write_bytes(data)
    there, here = (plan(home, model, "--ram", "1GiB") for model in ("hf:org/tiny-GGUF", str(tmp_path / "tiny.gguf")))
    for key in ("slots", "staging", "tiers", "memory", "hit_rate_source"):
        assert there[key] == here[key]
    assert there["model"]["layers"] == here["model"]["layers"] and here["model"]["header_bytes_fetched"] is None
    assert there["hardware"]["drive"]["bytes_s"] is None and "no large file" in there["hardware"]["drive"]["note"]


def test_a_split_model(home: Home, hub: FakeHub, tmp_path: Path) -> None:
    shards = write_shards(tmp_path, "tiny-Q4_K_M", 3)
    hub.repos["org/split-GGUF"] = Repo({path.name: path.read_bytes() for path in shards})
    answer = plan(home, "hf:org/split-GGUF:q4_k_m")
    assert len(answer["model"]["files"]) == 3 and answer["model"]["n_layer_moe"] == 2
    del hub.repos["org/split-GGUF"].files[shards[1].name]
    done = home.run("plan", "hf:org/split-GGUF:q4_k_m")
    assert done.returncode == 1 and shards[1].name in done.stderr


def test_a_model_that_was_pulled_is_read_where_it_is(home: Home, hub: FakeHub) -> None:
    hub.repos["org/tiny-GGUF"] = Repo({"tiny-Q8_0.gguf": tiny().write()})
    assert home.run("pull", "hf:org/tiny-GGUF").returncode == 0
    hub.requests.clear()
    assert plan(home, "hf:org/tiny-GGUF")["model"]["remote"] is False
    assert hub.requests == []


def test_lost_connections_are_taken_up_again(home: Home, hub: FakeHub) -> None:
    hub.repos["org/big-GGUF"] = Repo({"big-Q4_K_M.gguf": with_vocabulary(40_000)})
    hub.cuts = [1000, 20_000]
    assert plan(home, "hf:org/big-GGUF")["model"]["n_layer_moe"] == 2


def refused(home: Home, *arguments: str) -> str:
    done = home.run("plan", *arguments)
    assert done.returncode == 1 and done.stdout == "" and "\nhint: " in done.stderr and "Traceback" not in done.stderr
    return done.stderr


def test_a_server_without_ranges_is_not_read_to_its_end(home: Home, hub: FakeHub) -> None:
    hub.repos["org/big-GGUF"] = Repo({"big-Q4_K_M.gguf": with_vocabulary(40_000)})
    hub.no_range = True
    assert "that were asked for" in refused(home, "hf:org/big-GGUF")


def test_what_a_hub_refuses_and_lacks(home: Home, hub: FakeHub) -> None:
    data = tiny().write()
    hub.repos["org/gated-GGUF"] = Repo({"x-Q8_0.gguf": data}, access="gated")
    hub.repos["org/cut-GGUF"] = Repo({"x-Q8_0.gguf": data[:5000]})
    hub.repos["org/none-GGUF"] = Repo({"README.md": b"#"})
    hub.repos["org/poor-GGUF"] = Repo({"x-Q8_0.gguf": data}, no_digest=True)
    assert "org/gated-GGUF is gated" in refused(home, "hf:org/gated-GGUF")
    assert "there is no repository org/missing-GGUF" in refused(home, "hf:org/missing-GGUF")
    assert "ends inside its header" in refused(home, "hf:org/cut-GGUF")
    assert "has no GGUF model" in refused(home, "hf:org/none-GGUF")
    assert "does not say the size" in refused(home, "hf:org/poor-GGUF")


# --- what is said ---


def documented() -> set[str]:
    table = DOC.read_text().split("## Fields of `--json`")[1].split("## Reference")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_json_is_as_documented(home: Home) -> None:
    answer = plan(home, str(DEMO), "--slots", "16", "--ram", "1GiB", "--vram", "1GiB", "--target-tps", "1")
    assert answer.pop("schema") == "moestream/plan/1"
    assert set(answer) == documented()
    text = DOC.read_text()
    for part in ("model", "settings", "hardware", "memory", "prediction"):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{part}` |"))
        assert set(answer[part]) <= set(re.findall(r"`(\w+)`", line)), part
    for row in answer["table"]:
        assert set(row) == {"slots", "fits", "total_bytes", *answer["prediction"]}
    assert answer["memory"]["expected"]["total_bytes"] == sum(
        n for key, n in answer["memory"]["expected"].items() if key != "total_bytes"
    )
    assert sum(tier["experts"] for tier in answer["tiers"]) == 8 * 64
    assert sum(tier["bytes"] for tier in answer["tiers"]) == answer["model"]["expert_bytes"]
    assert answer["target_slots"] is not None and answer["memory"]["dense_on_gpu"] is True


def test_text_names_the_figures(home: Home) -> None:
    done = home.run("plan", str(DEMO), "--slots", "16", "--ram", "1GiB", "--ram-tier", "4MiB", "--cache-type-k", "q8_0")
    assert done.returncode == 0 and done.stderr == ""
    assert "16 of 64 in each layer" in done.stdout and "\n16 *" in done.stdout and "assumed" in done.stdout
    assert "start with: moestream start" in done.stdout
    assert re.search(r"--slots 16 --ctx 2048 --ram-tier 4MiB -- --cache-type-k q8_0 --cache-ram \d+$", done.stdout.rstrip())


def test_a_card_and_an_engine_without_code_for_it(home: Home) -> None:
    done = home.run("plan", str(DEMO), "--ram", "1GiB", "--vram", "1GiB")
    assert done.returncode == 0
    assert "the commands below need an engine for the card: moestream build --backend cuda" in done.stdout + done.stderr


def test_the_command_of_a_name_starts_the_name(home: Home) -> None:
    folder = home.folder / "config"
    folder.mkdir()
    (folder / "moestream.yaml").write_text(f"models: {{coder: {{model: {DEMO}, ram: 1GiB, policy: heat}}}}\n")
    assert plan(home, "coder")["command"].startswith("moestream start --model coder --slots ")


def test_settings_of_moestream_yaml(home: Home) -> None:
    folder = home.folder / "config"
    folder.mkdir()
    (folder / "moestream.yaml").write_text(
        f"models:\n  coder:\n    model: {DEMO}\n    ctx: 512\n    parallel: 2\n    slots: 24\n    llama_args: [-ctk, q8_0]\n"
    )
    answer = plan(home, "coder")
    assert (answer["settings"]["ctx_tokens"], answer["settings"]["parallel"], answer["slots"]) == (512, 2, 24)
    answer = plan(home, "coder", "--ctx", "256", "--slots", "8")
    assert (answer["slots"], answer["settings"]["cache_type_k"]) == (8, "q8_0")
    assert not any("slots" in text for text in answer["notices"])


def test_a_map_says_what_is_hit(home: Home, tmp_path: Path) -> None:
    from moestream import gguf_facts
    from moestream.routing.fingerprint import fingerprint

    facts = gguf_facts.read(DEMO)
    layers = [{"layer": il, "n_expert": 64, "counts": [50] * 6 + [0] * 58} for il in range(8)]
    content = {
        "format": "moestream.map", "version": 1, "tokens": 50, "n_expert_used": 6, "layers": layers,
        "model": {"architecture": "qwen3moe", "name": "demo", "fingerprint": fingerprint(facts)},
    }  # fmt: skip
    path = tmp_path / "x.map"
    path.write_text(json.dumps(content))
    answer = plan(home, str(DEMO), "--slots", "8", "--map", str(path))
    assert answer["hit_rate_source"] == "map" and answer["prediction"]["hit_rate"] == 1.0
    kept = home.folder / "data" / "maps" / f"{fingerprint(facts)}.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(content))
    assert plan(home, str(DEMO), "--slots", "8")["hit_rate_source"] == "map"
    content["model"]["fingerprint"] = "0" * 16
    path.write_text(json.dumps(content))
    assert "is of another model" in refused(home, str(DEMO), "--map", str(path))


# --- machines and servers ---


def test_gpus_count_for_an_engine_that_uses_them(home: Home, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA X, 8192, 7000, 0, GPU-x'\n")
    program.chmod(0o755)
    home.variables["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    answer = plan(home, str(DEMO))
    assert answer["hardware"]["gpus"] == [{"name": "NVIDIA X", "total_bytes": 8192 << 20, "free_bytes": 7000 << 20}]
    assert answer["memory"]["vram_bytes"] is None and answer["memory"]["dense_on_gpu"] is False
    cpu = engines.read_engine(home.server.parents[1])
    folder = cpu.path.with_name("fake-cuda")
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "llama-server").write_text("#!/bin/sh\n")
    engines.write_description(replace(cpu, id=folder.name, path=folder, backend="cuda"), folder)
    answer = plan(home, str(DEMO))
    assert answer["memory"]["vram_bytes"] == 7000 << 20 and answer["memory"]["dense_on_gpu"] is True
    assert any(
        text.startswith("start leaves --slots auto to the engine, in the memory of the card") for text in answer["notices"]
    )
    assert answer["command"].endswith(" -- --cpu-moe -ngl 99")
    home.variables["MOESTREAM_BACKEND"] = "cpu"
    cpu_alone = plan(home, str(DEMO))
    assert cpu_alone["card"] is None and "-ngl" not in cpu_alone["command"], "the engine that will be started counts"
    on_card = answer["card"]
    assert (on_card["slots"], on_card["free_bytes"], on_card["fits"]) == (64, 7000 << 20, True)
    assert on_card["command"].endswith("--slots all --ctx 2048 -- -ngl 99")


def test_slots_on_a_card_beside_those_in_ram(home: Home) -> None:
    given = (str(DEMO), "--ram", "1GiB", "--vram", "100MiB", "--cache-type-k", "q8_0")
    on_card = plan(home, *given)["card"]
    line = next(line for line in DOC.read_text().splitlines() if line.startswith("| `card` |"))
    named = set(re.findall(r"`(\w+)`", line))
    assert set(on_card) <= named and all(set(row) <= named for row in on_card["table"])
    assert 6 <= on_card["slots"] < 64 and on_card["link_bytes_s"] is None and on_card["tokens_per_s_at_most"] is None
    assert on_card["ram_tier_bytes"] == 8 * 64 * 62208
    assert on_card["command"].endswith(f"--slots {on_card['slots']} --ctx 2048 -- --cache-type-k q8_0 -ngl 99")
    said = home.run("plan", *given).stdout
    assert (
        f"on the card  {on_card['slots']} of 64 slots in each layer, " in said
        and "a token over the link (not measured)" in said
    )
    in_ram = plan(home, *given)["command"]
    assert said.rstrip().endswith(f"start with: {on_card['command']}\nor with slots in RAM: {in_ram}")
    assert f"\n{on_card['slots']} *" in said.split("\non the card\n")[1], "the table of the card"
    many = plan(home, *given, "--slots", "60")["card"]
    assert (many["slots"], many["fits"], many["most_slots"], many["command"]) == (60, False, on_card["slots"], None)
    said = home.run("plan", *given, "--slots", "60").stdout
    assert f": they do not fit, {on_card['slots']} do; " in said and "or with slots in RAM" not in said
    too_small = home.run("plan", str(DEMO), "--ram", "1GiB", "--vram", "20MiB").stdout
    assert (
        "on the card  no: 6 slots, what one token uses, do not fit; " in too_small and "or with slots in RAM" not in too_small
    )
    assert plan(home, str(DEMO), "--ram", "1GiB")["card"] is None


def test_check_of_a_server_that_reports_other_bytes(home: Home) -> None:
    """The fake server's figures are made up, so that the plan cannot hold."""
    assert home.run(*home.start_arguments("--detach")).returncode == 0
    done = home.run("plan", "--check", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and "the plan does not hold: " in done.stderr
    assert answer["schema"] == "moestream/plan-check/1" and answer["held"] is False
    wrong = {d["name"] for d in answer["deviations"] if d["held"] is False}
    assert wrong and wrong <= {
        "slots",
        "tokens_per_s",
        *(d["name"] for d in answer["deviations"] if d["name"].endswith("_bytes")),
    }
    assert next(d for d in answer["deviations"] if d["name"] == "tokens_per_s")["reported"] is None


@pytest.mark.parametrize(
    ("settings", "in_ram", "on_card"),
    [
        ("vram: 100MiB", "--ctx 2048", "--ctx 2048 --pool device"),
        ("vram: 100MiB\n  ram: 1GiB", "--ctx 2048", "--ctx 2048 --pool device"),
        ("ram_tier: none\n  vram: 100MiB", "--ctx 2048", "--ctx 2048 --ram-tier none --pool device"),
    ],
)
def test_commands_under_budgets_of_a_file(home: Home, settings: str, in_ram: str, on_card: str) -> None:
    """``start`` finds them there as well, and takes no word of -- beside them about where weights go."""
    file = home.folder / "config" / "moestream.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"defaults:\n  {settings}\n")
    answer = plan(home, str(DEMO))
    assert answer["command"].endswith(in_ram) and answer["card"]["command"].endswith(on_card)


def test_check_of_slots_that_a_card_looks_after(home: Home) -> None:
    """What is below them is the card's: locked RAM, no room for guesses. The other figures are made up."""
    home.variables["FAKE_LLAMA"] = "on-card"
    assert home.run(*home.start_arguments("--detach", "--slots", "16")).returncode == 0
    answer = json.loads(home.run("plan", "--check", "--json").stdout)
    found = {d["name"]: d for d in answer["deviations"]}
    assert found["slots"]["reported"] == 16
    assert found["ram_bytes"]["predicted"] == found["ram_bytes"]["reported"] == 8 * 64 * 62208 and found["ram_bytes"]["held"]
    assert found["guess_bytes"]["predicted"] == 0 and found["guess_bytes"]["held"]
    assert found["pool_bytes"]["predicted"] == 16 * 8 * 3 * 96 * 384 * 18 // 32
    total = sum(d["predicted"] for name, d in found.items() if name.endswith("_bytes") and name != "total_bytes")
    assert found["total_bytes"]["predicted"] == total
    assert found["tokens_per_s"]["predicted"] is None, "no card was measured"


@pytest.mark.parametrize("kept", ["{", "folder"])
def test_a_damaged_kept_map_is_left_out(home: Home, kept: str) -> None:
    from moestream import gguf_facts
    from moestream.routing.fingerprint import fingerprint

    path = home.folder / "data" / "maps" / f"{fingerprint(gguf_facts.read(DEMO))}.json"
    path.parent.mkdir(parents=True)
    if kept == "folder":
        path.mkdir()
    else:
        path.write_text(kept)
    answer = plan(home, str(DEMO), "--ram", "1GiB")
    assert answer["hit_rate_source"] == "assumed"
    assert any(notice.startswith("the kept router map is not used: ") for notice in answer["notices"])
