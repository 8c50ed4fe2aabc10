"""``moestream trace`` and ``moestream map`` with the demo model: recorded, replayed, mapped, and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_models import run, tool
from llama_server import environment

from moestream import gguf_facts
from moestream.routing.fingerprint import fingerprint

TEXTS = ("The command grep", "A harbor is")


def moestream(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    env = environment({k: v for k, v in os.environ.items() if k == "MOESTREAM_HOME"})
    command = [sys.executable, "-m", "moestream.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def answer(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(moestream(*arguments[:2], "--json", *arguments[2:]).stdout)


def refusal(*arguments: str | Path) -> tuple[str, str]:
    """The error and the hint."""
    done = moestream(*arguments, code=1)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    return lines[0].removeprefix("error: "), lines[1].removeprefix("hint: ") if len(lines) > 1 else ""


@pytest.fixture(scope="module")
def recorded(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """A trace of each text, and what was reported of it."""
    folder = tmp_path_factory.mktemp("traces")
    found = []
    for i, text in enumerate(TEXTS):
        out = folder / f"{i}.trace"
        found.append(
            (
                out,
                answer(
                    "trace",
                    "record",
                    demo,
                    "--out",
                    out,
                    "--slots",
                    "13",
                    "--text",
                    text,
                    "--tokens",
                    "60",
                    "--",
                    "--temp",
                    "0",
                    "-t",
                    "1",
                ),
            )
        )
    return found


def test_record(recorded: list[tuple[Path, dict[str, Any]]], demo: Path) -> None:
    for path, report in recorded:
        assert report["schema"] == "moestream/trace-record/1"
        assert report["model"] == {
            "fingerprint": fingerprint(gguf_facts.read(demo)), "architecture": "qwen3moe", "name": demo.name,
        }  # fmt: skip
        totals = report["stats"]["totals"]
        assert report["tokens"] == totals["tokens_decode"] + totals["tokens_prefill"] > 40
        assert report["records"] == 8 * report["batches"]
        assert report["size_bytes"] == path.stat().st_size
        assert (report["truncated"], report["notice"]) == (False, None)
        info = answer("trace", "info", path)
        assert {name: info[name] for name in ("records", "tokens", "model")} == {
            name: report[name] for name in ("records", "tokens", "model")
        }
        assert [layer["layer"] for layer in info["layers"]] == list(range(8))
        assert all(0 < layer["experts_for_half"] < layer["chosen"] <= 64 for layer in info["layers"])


def test_record_from_a_file(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The command sed")
    done = moestream(
        "trace", "record", demo, "--out", tmp_path / "t", "--prompt", tmp_path / "text", "--tokens", "5", "--limit", "1"
    )
    assert "moestream trace replay" in done.stdout
    assert answer("trace", "info", tmp_path / "t")["tokens"] >= 7


def test_replay(recorded: list[tuple[Path, dict[str, Any]]], demo: Path) -> None:
    path, report = recorded[0]
    replayed = answer("trace", "replay", path, "--slots", "13,8", "--model", demo, "--bandwidth", "500", "--compute-tps", "100")
    runs = {(one["policy"], one["slots"]): one for one in replayed["runs"]}
    assert {slots for _, slots in runs} == {8, 13}
    totals = report["stats"]["totals"]
    assert [runs["lru", 13][name] for name in ("hits", "misses", "evictions")] == [
        totals[n] for n in ("hits", "misses", "evictions")
    ]
    expert = gguf_facts.read(demo).bytes_per_slot(0)
    for one in runs.values():
        assert one["bytes_per_token"] == pytest.approx(one["misses_per_token"] * expert)
        assert one["predicted_tps"] == pytest.approx(1 / (1 / 100 + one["bytes_per_token"] / 500e6))
    best = max((one for one in runs.values() if one["policy"] != "opt"), key=lambda one: one["predicted_tps"])
    assert replayed["start"].startswith(f"moestream start --model {demo} --slots ")
    assert best["slots"] == 13
    text = moestream("trace", "replay", path, "--slots", "8", "--policy", "lru").stdout.splitlines()
    assert text[0].split() == ["policy", "slots", "hit", "rate", "misses/token"]
    assert text[-1] == f"start with: moestream start --model {demo.name} --slots 8 --policy lru"


def test_map(recorded: list[tuple[Path, dict[str, Any]]], demo: Path, tmp_path: Path) -> None:
    (first, report), (second, other) = recorded
    answer("map", "make", first, "--out", tmp_path / "a")
    answer("map", "make", second, "--out", tmp_path / "b")
    made = answer("map", "make", first, second, "--out", tmp_path / "both")
    assert made["tokens"] == report["tokens"] + other["tokens"]
    a, b, both = (json.loads((tmp_path / name).read_text()) for name in ("a", "b", "both"))
    assert both["model"]["fingerprint"] == fingerprint(gguf_facts.read(demo))
    for one, two, sum_ in zip(a["layers"], b["layers"], both["layers"], strict=True):
        assert [x + y for x, y in zip(one["counts"], two["counts"], strict=True)] == sum_["counts"]
        # the last layer is computed for the last token of a prompt alone
        assert sum(sum_["counts"]) == 6 * (both["tokens"] if one["layer"] < 7 else 120)

    shown = answer("map", "show", tmp_path / "both")
    assert all(len(layer["most_used"]) == 8 and layer["slots"] is None for layer in shown["layers"])
    assert answer("map", "diff", tmp_path / "a", tmp_path / "a")["distance"] == 0
    assert 0 < answer("map", "diff", tmp_path / "a", tmp_path / "b")["distance"] < 1
    rows = answer("map", "validate", tmp_path / "a", "--trace", second, "--top", "4,16,64")["rows"]
    assert [row["top"] for row in rows] == [4, 16, 64]
    assert 0 < rows[0]["covered"] < rows[1]["covered"] < rows[2]["covered"] == 1
    assert rows[0]["lru_hit_rate"] is None, "a token uses more than 4"
    (lru,) = answer("trace", "replay", second, "--slots", "16", "--policy", "lru")["runs"]
    assert round(rows[1]["lru_hit_rate"], 5) == lru["hit_rate"]


def test_slots_under_a_budget(recorded: list[tuple[Path, dict[str, Any]]], demo: Path, tmp_path: Path) -> None:
    first = recorded[0][0]
    expert = gguf_facts.read(demo).bytes_per_slot(0)
    budget = 8 * 12 * expert
    made = answer("map", "make", first, "--out", tmp_path / "m", "--budget", budget, "--model", demo)
    slots = {int(layer): n for layer, n in json.loads((tmp_path / "m").read_text())["slots"].items()}
    assert (made["slots_alike"], made["slots_bytes"]) == (12, budget), "all of it is used"
    assert sorted(slots) == list(range(8))
    assert len(set(slots.values())) > 1
    assert all(6 <= n <= 64 for n in slots.values())
    mixed = ",".join(f"{layer}={n}" for layer, n in slots.items())
    done = run(tool("moe-replay-policy"), first, "--layer-slots", mixed, "--slots", "12", "--policy", "lru")
    alike, own = (one["totals"]["misses"] for one in json.loads(done.stdout)["runs"])
    assert (made["missed_bytes"], made["missed_bytes_alike"]) == (own * expert, alike * expert)
    assert own < alike


def test_refusals(recorded: list[tuple[Path, dict[str, Any]]], demo: Path, tmp_path: Path) -> None:
    path = recorded[0][0]
    message, hint = refusal("trace", "record", demo, "--out", demo, "--text", "x")
    assert message == f"{demo}: the file exists and holds no trace"
    assert hint == "choose another name, or remove it"
    out = ("--out", tmp_path / "t")
    assert "a text to go on from is needed" in refusal("trace", "record", demo, *out)[0]
    assert "a text to go on from is needed" in refusal("trace", "record", demo, *out, "--text", "x", "--prompt", path)[0]
    assert "no such file" in refusal("trace", "record", demo, *out, "--prompt", tmp_path / "none")[0]
    assert "--slots 5: too few" in refusal("trace", "record", demo, *out, "--text", "x", "--slots", "5")[0]
    assert "without streaming" in refusal("trace", "record", demo, *out, "--text", "x", "--slots", "off")[0]
    assert (
        "collides with moestream's own --out"
        in refusal("trace", "record", demo, *out, "--text", "x", "--", "--moe-trace", "y")[0]
    )
    assert not (tmp_path / "t").exists()

    message, hint = refusal("trace", "replay", path, "--slots", "5")
    assert message.endswith("5 slots are too few: a token of this trace uses 6 experts in layer 0")
    assert hint == "6 or more"
    assert "--policy 'mru': expected one of" in refusal("trace", "replay", path, "--policy", "mru")[0]
    assert "together" in refusal("trace", "replay", path, "--bandwidth", "500")[0]
    assert "--bandwidth -1: expected a number above 0" in refusal("trace", "replay", path, "--bandwidth", "-1")[0]

    damaged = tmp_path / "other.trace"
    damaged.write_bytes(path.read_bytes().replace(fingerprint(gguf_facts.read(demo)).encode(), b"f" * 16))
    message, _ = refusal("trace", "replay", damaged, "--model", demo)
    assert f"is of another model: {demo.name} ({'f' * 16}), and {demo.name} is" in message
    assert "is of another model" in refusal("map", "make", path, damaged, "--out", tmp_path / "m")[0]
    assert "--budget needs the sizes" in refusal("map", "make", path, "--out", tmp_path / "m", "--budget", "4GiB")[0]
    message, hint = refusal("map", "make", path, "--out", tmp_path / "m", "--budget", "1MiB", "--model", demo)
    assert "a budget of 1.0 MiB is too small" in message and hint.startswith("--budget ")
    assert "is not a map" in refusal("map", "make", path, "--out", path)[0]
    assert "is not a map" in refusal("map", "show", path)[0]
    assert not (tmp_path / "m").exists()


def test_models_by_their_names(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moestream.yaml calls a model is enough for every command that takes one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    (tmp_path / "moestream.yaml").write_text(f"models:\n  coder: {{model: {demo}}}\n")
    text = ("--text", TEXTS[0], "--tokens", "4", "--slots", "13")
    assert answer("trace", "record", "coder", "--out", "t.trace", *text)["model"]["name"] == demo.name
    assert "--model coder --slots" in answer("trace", "replay", "t.trace", "--model", "coder", "--slots", "13")["start"]
    assert answer("map", "make", "t.trace", "--out", "t.map", "--model", "coder", "--budget", "12MiB")["slots_bytes"] > 0
    done = json.loads(moestream("verify", "coder", "--tokens", "16", "--slots", "6", "--json", "--", "--threads", "1").stdout)
    assert done["model"] == str(demo) and done["verdict"] == "equal"
    for command in (("trace", "record", "dmeo", "--out", "u"), ("verify", "dmeo")):
        message, hint = refusal(*command, *(text if command[0] == "trace" else ()))
        assert message == "--model dmeo: neither a file nor a name that is known" and "coder" in hint
