"""Every architecture that has experts: streamed values are the bits of unstreamed ones, with the fewest slots there can be, and
Python and engine agree on which tensors hold experts. ``make identity`` runs the whole matrix, see matrix.py."""

from __future__ import annotations

import os
from pathlib import Path

import fixture_architectures as architectures
import matrix
import pytest
from fixture_models import run, tool
from llama_server import environment

from moestream import gguf_facts


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return architectures.make_all(tmp_path_factory.mktemp("architectures"))


def test_all_architectures(sources: dict[str, Path], tmp_path: Path) -> None:
    assert len(sources) >= architectures.AT_LEAST, sorted(sources)
    cells = list(matrix.short_matrix(list(sources)))
    outcomes = list(matrix.run_cells(cells, sources, tmp_path, os.cpu_count() or 1))
    assert [f"{o.cell}: {o.problem}" for o in outcomes if o.problem] == []
    assert sum(o.n_equal for o in outcomes) == 6 * len(sources)
    # with the fewest slots one token goes through them, and nine do not fit
    assert all(o.ways == {"slots": 1, "staging": 1} and o.n_evicting == 2 for o in outcomes)
    # few fixtures have but one layer of experts, or routers of another name
    assert all(o.n_ram == 2 for o in outcomes if o.cell.ram)
    assert sum(o.n_guessed == 1 for o in outcomes) >= len(sources)


def test_adapters_stacked_like_experts_are_none(tmp_path: Path) -> None:
    path = tmp_path / "graniteswitch.gguf"
    architectures.write_graniteswitch(path)
    facts = gguf_facts.read(path)
    assert (facts.n_expert, facts.expert_tensors) == (0, ())
    reference = ("-m", path, "--threads", "1", "--tokens", "32", "--ubatch", "1,9")
    done = run(tool("moe-identity"), *reference, "--slots", "all", env=environment(), ok=False)
    assert "this is not a mixture-of-experts model" in done.stderr
    assert done.stdout == "", "the reference loads, computes and equals itself; what streams is refused"
    assert done.returncode == 2
