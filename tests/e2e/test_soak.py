"""The soak, for twenty seconds: everything but the speed, which no test may depend on."""

from __future__ import annotations

from pathlib import Path

import soak


def test_a_short_soak(tmp_path: Path) -> None:
    report = soak.run(tmp_path, 20, judge_speed=False)
    assert not report.problems, report.text()
    assert report.actions["answer"] > 0
    assert report.actions["cancel"] > 0
    assert report.n_tokens_computed > 0
