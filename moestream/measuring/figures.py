"""Statistics of runs. Pure: numbers in, numbers out."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Of a summary: the median of each over the runs, where there is one.
MEDIANS = (
    "load_s", "ttft_s", "prompt_tok_per_s", "decode_tok_per_s", "token_p50_s", "token_p95_s", "hit_rate", "prompt_disk_bytes",
    "decode_disk_bytes_per_token", "prompt_expert_bytes", "decode_expert_bytes_per_token", "prompt_stall_s", "decode_stall_share",
)  # fmt: skip
PEAKS = ("peak_rss_bytes", "peak_anon_bytes", "peak_vram_bytes")  # the largest of all runs
COMPARED = ("decode_tok_per_s", "prompt_tok_per_s", "ttft_s")


@dataclass
class Run:
    """One measured answer. None: not known here, or it means nothing (statistics of experts without streaming). What is of the prompt and
    of the tokens behind it comes from counters read at about the first token; of answers that were nearly over by then it is not known.

    Attributes:
        side: name of what was measured.
        cache: ``cold`` (the model's page cache was emptied before the server started; its first answer) or ``warm`` (its second).
        round: number of the round, from 0; runs of one round and cache are a pair.
        load_s: from the start of the process until it was ready.
        ttft_s: from the request to the first token.
        prompt_tok_per_s: prompt tokens by the server's own time for them.
        decode_tok_per_s: tokens behind the first one by the time between the first and the last.
        token_s: time of each token behind the first.
        hit_rate: accesses of experts that found them in a slot, from the first token on.
        prompt_disk_bytes, decode_disk_bytes_per_token: what the kernel had the disk read for this process, page faults included.
        prompt_expert_bytes, decode_expert_bytes_per_token: what the engine asked of the files, wherever it came from.
        prompt_stall_s, decode_stall_share: time that computing waited for experts; the latter of the time of all tokens.
        peak_rss_bytes, peak_anon_bytes, peak_vram_bytes: the most since the process started.
        cached_share: of the model in the page cache when the server was started.
        others_cpu_share: of all cores, used meanwhile by others than the server.
        output_sha256: of tokens and text.
    """

    side: str
    cache: str
    round: int
    load_s: float | None = None
    ttft_s: float | None = None
    prompt_tok_per_s: float | None = None
    decode_tok_per_s: float | None = None
    token_p50_s: float | None = None
    token_p95_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    hit_rate: float | None = None
    prompt_disk_bytes: int | None = None
    decode_disk_bytes_per_token: float | None = None
    prompt_expert_bytes: int | None = None
    decode_expert_bytes_per_token: float | None = None
    prompt_stall_s: float | None = None
    decode_stall_share: float | None = None
    peak_rss_bytes: int | None = None
    peak_anon_bytes: int | None = None
    peak_vram_bytes: int | None = None
    cached_share: float | None = None
    others_cpu_share: float | None = None
    output_sha256: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of the values are not above, linear between two of them.

    Raises:
        ValueError: no values, or ``share`` is out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"percentile {share} of {len(values)} values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def token_times(arrivals: Sequence[tuple[int, float]]) -> list[float]:
    """The time of each token behind the first one, in seconds.

    Args:
        arrivals: of each part of a streamed answer: how many tokens there were by then, and when. A part with several tokens, as
            when a character takes more than one, gives each of them the same share.
    """
    times: list[float] = []
    for (n_before, before), (n, at) in itertools.pairwise(arrivals):
        if n > n_before:
            times += [(at - before) / (n - n_before)] * (n - n_before)
    return times


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each side and cache, in the order of first appearance: medians, and smallest and largest speed and time to the first token."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.cache, run.side), []).append(run)
    rows = []
    for (cache, side), group in groups.items():
        row: dict[str, Any] = {"side": side, "cache": cache, "runs": len(group)}
        for name, of in (*((n, _median) for n in MEDIANS), *((n, _largest) for n in PEAKS)):
            row[name] = of([value for run in group if (value := getattr(run, name)) is not None])
        for name in COMPARED:
            values = [value for run in group if (value := getattr(run, name)) is not None]
            row[f"{name}_min"], row[f"{name}_max"] = (min(values), max(values)) if values else (None, None)
        rows.append(row)
    return rows


def _largest(values: Sequence[float]) -> float | None:
    return max(values) if values else None


def paired_ratios(runs: Sequence[Run], reference: str) -> list[dict[str, Any]]:
    """Each other side over the reference: the ratio of each pair, their median, smallest and largest.

    A pair are two runs of the same round and cache: what disturbs the machine for minutes touches both. Runs without a partner count
    for nothing.
    """
    by_key = {(run.side, run.cache, run.round): run for run in runs}
    groups: dict[tuple[str, str], list[tuple[Run, Run]]] = {}
    for (side, cache, number), run in by_key.items():
        partner = by_key.get((reference, cache, number))
        if side != reference and partner is not None:
            groups.setdefault((cache, side), []).append((run, partner))
    out = []
    for (cache, side), pairs in groups.items():
        for name in COMPARED:
            ratios = [_of(a, name) / _of(b, name) for a, b in pairs if _of(a, name) and _of(b, name)]
            if ratios:
                out.append({
                    "side": side, "cache": cache, "figure": name, "pairs": len(ratios), "ratio": statistics.median(ratios),
                    "ratio_min": min(ratios), "ratio_max": max(ratios),
                })  # fmt: skip
    return out


def _of(run: Run, name: str) -> float:
    return getattr(run, name) or 0.0


def median_by_token(runs: Sequence[Run], of: Callable[[Run], Sequence[float]] = lambda run: run.token_s) -> list[float]:
    """The median over the runs of the first token's time, of the second's, and so on as far as all have one."""
    return [statistics.median(times) for times in zip(*map(of, runs), strict=False)]
