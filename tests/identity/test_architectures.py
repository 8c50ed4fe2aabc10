"""Every architecture of upstream's that has experts: streamed logits are the bits of unstreamed ones, with the fewest slots there can
be, and Python and engine agree on which tensors hold experts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixture_models import N_USED, quantize, run, spread_routing, tool
from llama_server import environment

from moestream import gguf_facts

# Upstream's fixtures of these have expert tensors that their graphs never use.
WITHOUT_MOE_GRAPH = {"refact"}
# Upstream's own CPU code cannot compute with every matrix of these in Q4_0.
NOT_IN_Q4_0 = {"qwen4exp"}
# fewer would mean that upstream's fixtures or our selection broke
AT_LEAST = 50


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Upstream's fixtures that have expert tensors, by architecture."""
    folder = tmp_path_factory.mktemp("architectures")
    run(tool("test-llama-archs"), "-o", folder, "-s", "1")
    found = {}
    for path in sorted(folder.glob("*.gguf")):
        name = re.sub(r"-(moe|dense)$", "", path.stem)
        if gguf_facts.read(path).expert_tensors and name not in WITHOUT_MOE_GRAPH:
            spread_routing(path)
            found[name] = path
        else:
            path.unlink()
    return found


def test_all_architectures(fixtures: dict[str, Path], tmp_path: Path) -> None:
    assert len(fixtures) >= AT_LEAST, sorted(fixtures)
    failed = []
    for name, path in fixtures.items():
        for type_name in ("f32", "q4_0"):
            if type_name == "q4_0" and name in NOT_IN_Q4_0:
                continue
            model = path if type_name == "f32" else quantize(path, tmp_path / path.name)
            problem = compare(model)
            if problem:
                failed.append(f"{name} {type_name}: {problem}")
            if model is not path:
                model.unlink()
    assert failed == []


def compare(model: Path) -> str:
    """What is wrong with this model streamed, or nothing."""
    done = run(
        tool("moe-identity"), "-m", model, "--threads", "1", "--slots", f"{N_USED},all", "--ubatch", "1,9", "--tokens", "48",
        env=environment({"MOESTREAM_POISON": "1"}), ok=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) != 4:
        return (done.stdout + done.stderr)[-600:]
    pool_bytes = int(re.search(r"pool_bytes=(\d+)", lines[-1])[1])
    expert_bytes = gguf_facts.read(model).expert_bytes
    return "" if pool_bytes == expert_bytes else f"the engine's experts have {pool_bytes} bytes, Python's {expert_bytes}"
