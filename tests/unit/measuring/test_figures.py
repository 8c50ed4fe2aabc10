"""Statistics of runs."""

from __future__ import annotations

import pytest

from moestream.measuring.figures import Run, median_by_token, paired_ratios, percentile, summarise, token_times


def run(side: str, number: int, speed: float | None, cache: str = "cold", **more: float) -> Run:
    return Run(side, cache, number, decode_tok_per_s=speed, **more)  # type: ignore[arg-type]


def test_percentile() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0, 0.25, 0.5, 0.95, 1)] == [1, 2, 3, pytest.approx(4.8), 5]
    assert percentile([7.0], 0.95) == 7
    for bad in ([], [1.0]):
        with pytest.raises(ValueError, match="percentile"):
            percentile(bad, 0.5 if not bad else 1.5)


def test_token_times_share_what_came_together() -> None:
    # the first token is the time to the first token; tokens 3 and 4 made one character
    assert token_times([(1, 10.0), (2, 10.5), (4, 11.5)]) == [0.5, 0.5, 0.5]
    assert token_times([(1, 10.0), (1, 10.4), (2, 10.5)]) == [pytest.approx(0.1)], "a part without a new token"
    assert token_times([(1, 10.0)]) == [] == token_times([])


def test_summary() -> None:
    runs = [
        run("a", 0, 1.0, peak_rss_bytes=10),
        run("b", 0, 4.0, hit_rate=0.5),
        run("a", 1, 3.0, peak_rss_bytes=30),
        run("a", 2, 9.0, peak_rss_bytes=20),
        run("a", 0, None, "warm"),
    ]
    rows = {(row["side"], row["cache"]): row for row in summarise(runs)}
    assert list(rows) == [("a", "cold"), ("b", "cold"), ("a", "warm")]
    a = rows["a", "cold"]
    assert (a["runs"], a["decode_tok_per_s"], a["decode_tok_per_s_min"], a["decode_tok_per_s_max"]) == (3, 3, 1, 9)
    assert a["peak_rss_bytes"] == 30
    assert (a["hit_rate"], rows["b", "cold"]["hit_rate"]) == (None, 0.5)
    assert rows["a", "warm"]["decode_tok_per_s"] is None and rows["a", "warm"]["decode_tok_per_s_min"] is None


def test_ratios_are_of_pairs() -> None:
    """A machine that gets ten times slower meanwhile changes no ratio; that of the medians would be another one."""
    runs = [
        run("stock", 0, 100.0), run("ours", 0, 200.0),
        run("ours", 1, 30.0), run("stock", 1, 10.0),
        run("stock", 2, 1.0), run("ours", 2, 1.5),
        run("ours", 3, 77.0),  # no partner
        run("stock", 0, 50.0, "warm"), run("ours", 0, None, "warm"),
    ]  # fmt: skip
    (ratio,) = paired_ratios(runs, "stock")
    assert ratio == {
        "side": "ours", "cache": "cold", "figure": "decode_tok_per_s", "pairs": 3, "ratio": 2.0, "ratio_min": 1.5, "ratio_max": 3.0,
    }  # fmt: skip
    assert paired_ratios(runs, "nobody") == []


def test_median_by_token() -> None:
    runs = [Run("a", "cold", i, token_s=times) for i, times in enumerate([[1.0, 5.0, 9.0], [3.0, 1.0], [2.0, 2.0, 2.0]])]
    assert median_by_token(runs) == [2.0, 2.0]
