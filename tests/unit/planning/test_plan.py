"""Plans: decisions, refusals, speeds, and what is said of them. Pure, with made-up machines."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from malformed import tiny

from moestream import gguf_facts
from moestream.errors import MoestreamError
from moestream.gguf_facts import GgufFacts
from moestream.planning import check, hits, memory, speed, state
from moestream.planning.memory import RAM_AUTO, Wishes
from moestream.planning.plan import Machine, make_plan
from moestream.planning.speed import Rates
from moestream.planning.state import ContextShape

MIB = 1 << 20
DEMO = Path(__file__).resolve().parents[3] / "demo" / "moestream-demo-q4_0.gguf"
RATES = Rates(disk_bytes_s=1e9, memory_bytes_s=10e9, flops=1e12)
CONTEXT = ContextShape(2048, 1, False)


@pytest.fixture(scope="module")
def facts() -> GgufFacts:
    return gguf_facts.read(DEMO)


def machine(available: int, rates: Rates = RATES, vram: int | None = None) -> Machine:
    return Machine(available, "MemAvailable", 2, rates, vram)


def planned(facts: GgufFacts, available: int, wishes: Wishes | None = None, **more):
    return make_plan(facts, machine(available, **more), wishes or Wishes(CONTEXT), hits.assumed(facts))


# --- memory ---


@pytest.mark.parametrize("available", [1, 10 * MIB, 1 << 30, 5 << 30, 64 << 30])
def test_what_must_be_there_for_so_much_to_be_usable(available: int) -> None:
    need = memory.available_for(memory.usable(available))
    assert memory.usable(need) >= memory.usable(available)
    assert need == 0 or memory.usable(need - 1) < memory.usable(available)


def test_slots_grow_with_memory_and_the_budget_is_kept(facts: GgufFacts) -> None:
    slots = []
    for mib in range(37, 90, 3):
        plan = memory.decide(facts, Wishes(CONTEXT), mib * MIB)
        slots.append(plan.slots)
        if plan.slots >= plan.least_slots:
            assert plan.fits and plan.budgeted_bytes <= plan.usable_bytes
        more = memory.decide(facts, Wishes(CONTEXT, slots=plan.slots + 1), mib * MIB)
        if 6 <= plan.slots < 63 and more.staging == plan.staging:
            assert not more.fits
    assert slots == sorted(slots) and slots[0] < 6 and slots[-1] == 64


def test_all_experts_need_no_staging_and_no_guesses(facts: GgufFacts) -> None:
    sizes = memory.decide(facts, Wishes(CONTEXT, slots=64, ram_tier_bytes=RAM_AUTO), 1 << 30).sizes
    assert (sizes.staging_bytes, sizes.guess_bytes, sizes.ram_bytes) == (0, 0, 0)
    assert sizes.pool_bytes == facts.expert_bytes


def test_ring_where_memory_is_short(facts: GgufFacts) -> None:
    assert memory.decide(facts, Wishes(CONTEXT, slots=8), 1 << 30).staging == "full width"
    assert memory.decide(facts, Wishes(CONTEXT, slots=8), 55 * MIB).staging == "ring of 64"
    assert memory.decide(facts, Wishes(CONTEXT, slots=8, staging="full"), 55 * MIB).staging == "full width"


def test_ram_tier_takes_what_is_left_and_no_more_than_is_of_use(facts: GgufFacts) -> None:
    some = memory.decide(facts, Wishes(CONTEXT, slots=8, ram_tier_bytes=4 * MIB), 1 << 30)
    assert 4 * MIB - 62464 < some.sizes.ram_bytes <= 4 * MIB
    whole = memory.decide(facts, Wishes(CONTEXT, slots=8, ram_tier_bytes=RAM_AUTO), 1 << 30)
    assert whole.sizes.ram_bytes == 8 * 56 * 62208


def test_prefetch_off_has_no_room_for_guesses(facts: GgufFacts) -> None:
    assert memory.decide(facts, Wishes(CONTEXT, slots=8, prefetch=False), 1 << 30).sizes.guess_bytes == 0


def test_reads_under_way_as_the_engine_chooses_them() -> None:
    assert memory.in_flight_chosen({}) == 4
    assert memory.in_flight_chosen({1: 900, 2: 149, 4: 100, 8: 114}) == 4
    assert memory.in_flight_chosen({1: 900, 2: 151, 4: 100, 8: 116}) == 2
    assert memory.in_flight_chosen({1: 10, 2: 50, 4: 100, 8: 116}) == 8


def test_direct_reads_though_the_page_cache_could_hold_all(facts: GgufFacts) -> None:
    ways = {io: memory.decide(facts, Wishes(CONTEXT, slots=8, io=io), 1 << 30) for io in ("auto", "direct", "buffered")}
    assert [ways[io].cached for io in ways] == [True, False, True]
    assert ways["direct"].sizes.bounce_bytes > ways["auto"].sizes.bounce_bytes
    assert not memory.decide(facts, Wishes(CONTEXT, slots=8, io="buffered"), 40 * MIB).cached


# --- state ---


def test_cells_are_padded_and_streams_are_apart(facts: GgufFacts) -> None:
    cell = 8 * 2 * 128 * 2  # layers, K and V, two heads of 64, F16
    assert state.expected(facts, ContextShape(2000, 1, False)) == 2048 * cell
    assert state.expected(facts, ContextShape(2048, 3, False)) == 3 * 768 * cell
    assert state.expected(facts, ContextShape(2048, 4, True)) == 2048 * cell
    assert state.budgeted(facts, ContextShape(2000, 1, False)) == 2000 * cell
    assert (
        state.expected(facts, ContextShape(2048, 1, False, type_k="Q8_0", type_v="F32"))
        == 2048 * 8 * 128 * 34 // 32 + 2048 * 8 * 128 * 4
    )


def like(facts: GgufFacts, arch: str, **keys: object) -> GgufFacts:
    return replace(facts, architecture=arch, metadata={f"{arch}.{k}": v for k, v in keys.items()})


def test_windows(facts: GgufFacts) -> None:
    gpt_oss = like(facts, "gpt-oss", **{"attention.sliding_window": 128})
    assert state.window_layers(gpt_oss) == [True, False] * 4
    full, window = 8192, 1024  # 4 * 128 + 512, in steps of 256
    assert state.expected(gpt_oss, ContextShape(8192)) == 4 * 512 * (full + window)
    assert state.window_layers(like(facts, "smallthinker", **{"attention.sliding_window": 9})) == [False, True, True, True] * 2
    # the header may have the key, and no window
    assert not any(state.window_layers(like(facts, "qwen3moe", **{"attention.sliding_window": 128})))


def test_latent_caches_have_no_values(facts: GgufFacts) -> None:
    mla = like(facts, "deepseek2", **{"attention.key_length_mla": 8, "attention.value_length_mla": 8})
    assert state.expected(mla, CONTEXT) == 2048 * 8 * 128 * 2


def test_recurrent_layers(facts: GgufFacts) -> None:
    ssm = {"ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 128, "ssm.group_count": 2}
    hybrid = like(facts, "qwen35moe", full_attention_interval=4, **ssm)
    assert state.recurrent_layers(hybrid) == [True, True, True, False] * 2
    per_layer = 4 * (3 * (256 + 2 * 2 * 128) + 128 * 256)
    assert state.expected(hybrid, CONTEXT) == 2 * 2048 * 512 + 6 * per_layer
    assert state.expected(hybrid, replace(CONTEXT, n_seq=4, unified=True)) == 2 * 2048 * 512 + 6 * 4 * per_layer


def test_unknown_caches_are_told(facts: GgufFacts) -> None:
    assert any("lower bound" in text for text in planned(like(facts, "deepseek32"), 1 << 30).notices)
    assert planned(facts, 1 << 30).notices == ()


# --- refusals ---


def refusal(facts: GgufFacts, available: int, wishes: Wishes | None = None, **more) -> MoestreamError:
    with pytest.raises(MoestreamError) as caught:
        planned(facts, available, wishes, **more)
    return caught.value


def test_below_one_token_s_experts(facts: GgufFacts) -> None:
    error = refusal(facts, 40 * MIB)
    assert (
        "6 slots a layer, what one token uses, need" in error.message and "40.0 MiB available (MemAvailable)" in error.message
    )
    need = float(re.search(r"([\d.]+) MiB of memory$", error.hint)[1])
    assert planned(facts, math.ceil((need + 0.05) * MIB)).memory.slots >= 6
    refusal(facts, int((need - 0.1) * MIB))


def test_what_would_do_does(facts: GgufFacts) -> None:
    wishes = Wishes(replace(CONTEXT, n_ctx=8192))
    error = refusal(facts, 80 * MIB, wishes)
    ctx = int(re.search(r"--ctx (\d+)", error.hint)[1])
    assert planned(facts, 80 * MIB, Wishes(replace(CONTEXT, n_ctx=ctx))).memory.slots >= 6
    refusal(facts, 80 * MIB, Wishes(replace(CONTEXT, n_ctx=ctx + 256)))
    assert "--cache-type-k q8_0 --cache-type-v q8_0" in error.hint
    small = replace(wishes, context=replace(wishes.context, type_k="Q8_0", type_v="Q8_0"))
    assert planned(facts, 80 * MIB, small).memory.slots >= 6


def test_no_way_is_named_that_does_not_help(facts: GgufFacts) -> None:
    hint = refusal(facts, 20 * MIB).hint
    assert "--ctx" not in hint and "cache-type" not in hint


def test_a_ram_tier_that_takes_the_slots_memory(facts: GgufFacts) -> None:
    assert "no --ram-tier" in refusal(facts, 70 * MIB, Wishes(CONTEXT, ram_tier_bytes=60 * MIB)).hint


def test_too_few_slots(facts: GgufFacts) -> None:
    error = refusal(facts, 1 << 30, Wishes(CONTEXT, slots=5))
    assert "--slots 5: too few" in error.message and error.hint == "the smallest is --slots 6"


def test_no_experts(tmp_path: Path) -> None:
    model = tiny()
    model.tensors = [t for t in model.tensors if "_exps" not in str(t.name)]
    (tmp_path / "dense.gguf").write_bytes(model.write())
    dense = gguf_facts.read(tmp_path / "dense.gguf")
    with pytest.raises(MoestreamError, match="not a mixture-of-experts model"):
        make_plan(dense, machine(1 << 30), Wishes(CONTEXT), hits.HitModel("assumed", "", {}))


def test_slots_that_do_not_fit_are_planned_and_told(facts: GgufFacts) -> None:
    plan = planned(facts, 66 * MIB, Wishes(CONTEXT, slots=60))
    assert plan.memory.slots == 60 and not plan.memory.fits
    fit = int(re.search(r"; (\d+) slots fit$", plan.notices[0])[1])
    assert planned(facts, 66 * MIB).memory.slots == fit


# --- GPUs ---


def test_dense_weights_on_a_gpu_leave_memory_to_slots(facts: GgufFacts) -> None:
    with_gpu = planned(facts, 44 * MIB, vram=1 << 30)
    assert with_gpu.on_gpu and with_gpu.memory.slots > 6
    refusal(facts, 44 * MIB)
    small = planned(facts, 66 * MIB, vram=8 * MIB)
    assert not small.on_gpu and small.memory.slots == planned(facts, 66 * MIB).memory.slots
    assert any("planned in RAM" in text for text in small.notices)


# --- speed ---


def predict(facts: GgufFacts, rates: Rates = RATES, slots: int = 16, **more) -> speed.Speed:
    return speed.predict(facts, hits.assumed(facts), rates, slots=slots, **more)


def test_time_of_a_token_is_its_parts(facts: GgufFacts) -> None:
    s = predict(facts)
    missed = 8 * 6 * (1 - s.hit_rate) * 62208
    assert s.read_bytes == pytest.approx(missed)
    assert 1 / s.tokens_per_s == pytest.approx(speed.active_bytes(facts) / 10e9 + missed / 1e9)
    assert speed.active_bytes(facts) == facts.dense_bytes + 8 * 6 * 62208  # its output is its token embeddings


def test_numbers_of_a_token_s_weights(facts: GgufFacts) -> None:
    """Of each tensor in its own type: 8 layers of attention, router and norms, the tied output, and 6 experts."""
    layer = 384 * (6 + 2 + 2) * 64 + 6 * 64 * 384 + 64 * 384 + 2 * 384 + 2 * 64
    assert speed.active_values(facts) == 8 * (layer + 6 * 3 * 384 * 96) + 384 + 8192 * 384


def test_what_limits(facts: GgufFacts) -> None:
    assert predict(facts, replace(RATES, disk_bytes_s=1e7)).limit == "disk"
    assert predict(facts, slots=64).limit == "memory"
    assert predict(facts, replace(RATES, flops=1e6), slots=64).limit == "compute"
    assert predict(facts, replace(RATES, cache_bytes_s=1e7), cached=True).limit == "ram"
    assert predict(facts, replace(RATES, disk_bytes_s=1e7)).prompt_limit == "disk"
    assert predict(facts, replace(RATES, flops=1e9)).prompt_limit == "compute"
    slow = predict(facts, replace(RATES, prompt_flops=1e9))
    assert slow.prompt_limit == "compute" and slow.limit == predict(facts).limit


def test_a_drive_that_is_not_measured_gives_no_speed(facts: GgufFacts) -> None:
    unknown = predict(facts, replace(RATES, disk_bytes_s=None))
    assert (unknown.tokens_per_s, unknown.prompt_s, unknown.limit) == (None, None, "")
    assert predict(facts, replace(RATES, disk_bytes_s=None), slots=64).tokens_per_s is not None
    assert predict(facts, replace(RATES, disk_bytes_s=None), cached=True).tokens_per_s is not None


def test_a_ram_tier_saves_reads(facts: GgufFacts) -> None:
    without, some, whole = (predict(facts, slots=8, ram_bytes=n) for n in (0, 10 * MIB, 8 * 56 * 62208))
    assert without.read_bytes > some.read_bytes > whole.read_bytes == 0
    assert without.hit_rate == some.hit_rate and some.ram_rate > 0
    assert without.tokens_per_s < some.tokens_per_s < whole.tokens_per_s


def test_small_batches_read_experts_again(facts: GgufFacts) -> None:
    slow = replace(RATES, disk_bytes_s=1e7)
    assert predict(facts, slow, ubatch=128).prompt_s > 3 * predict(facts, slow, ubatch=512).prompt_s


def test_table_has_the_slots_and_their_neighbours(facts: GgufFacts) -> None:
    plan = planned(facts, 66 * MIB)
    counts = [row.slots for row in plan.rows]
    assert counts == sorted(set(counts)) and {6, plan.memory.slots, 64} <= set(counts) and len(counts) > 4
    assert [row.fits for row in plan.rows] == sorted((row.fits for row in plan.rows), reverse=True)
    speeds = [row.speed.tokens_per_s for row in plan.rows]
    assert speeds == sorted(speeds)


def test_target(facts: GgufFacts) -> None:
    slow = machine(66 * MIB, replace(RATES, disk_bytes_s=1e7))

    def asked(tps: float):
        return make_plan(facts, slow, Wishes(CONTEXT), hits.assumed(facts), target_tps=tps)

    rows = {row.slots: row.speed.tokens_per_s for row in asked(1).rows}
    own = asked(1).memory.slots
    near = asked(rows[own] * 0.99)
    assert near.target_slots is not None and 6 < near.target_slots <= own and "which fit" in near.notices[-1]
    far = asked((rows[own] + rows[64]) / 2)
    assert far.target_slots > own and "do not fit" in far.notices[-1]
    never = asked(1e9)
    assert never.target_slots is None and "more than this machine computes" in never.notices[-1]


# --- check ---


def test_deviations() -> None:
    reported = {"pool_bytes": 1000, "compute_bytes": 1000, "ram_bytes": 0, "total_bytes": 2000}
    good = check.memory({"pool_bytes": 1030, "compute_bytes": 500, "ram_bytes": 0, "total_bytes": 1941}, reported)
    assert [d.held for d in good] == [True, None, True, True] and check.failed(good) == []
    bad = check.memory({"pool_bytes": 1031, "compute_bytes": 1, "ram_bytes": 1, "total_bytes": 1939}, reported)
    assert [d.name for d in check.failed(bad)] == ["pool_bytes", "ram_bytes", "total_bytes"]
    assert check.Deviation("x", None, 1.0, 0.25).held is None
    assert check.Deviation("x", 1.0, 0.0, 0.25).as_json()["deviation"] is None
