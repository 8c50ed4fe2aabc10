"""The synthetic models: reproducible, mean zero, and routed as asked. Routing is computed here by a plain numpy forward pass."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bench import routing, synthetic
from moestream import gguf_facts
from moestream.errors import MoestreamError

SMALL = {
    "n_layer": 4, "n_expert": 32, "n_used": 4, "d_model": 256, "d_ff": 64, "n_head": 4, "n_head_kv": 2, "d_head": 64, "n_vocab": 400,
}  # fmt: skip
SKEWED = synthetic.Routing(skew=1.0, locality=1.0, recency=1.5)


def small(path, **changes):
    return synthetic.write_model(path, **{**SMALL, "expert_type": "Q8_0", **changes})


def weights(path) -> dict[str, np.ndarray]:
    """All tensors as float32, in numpy order."""
    out = {}
    for t in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        out[t.name] = values.reshape(tuple(int(n) for n in t.shape[::-1])).astype(np.float32)
    return out


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rope(x):
    """NEOX pairs (i, i + d/2), as upstream rotates qwen3moe; x: [token, head, d]."""
    half = x.shape[-1] // 2
    angle = np.outer(np.arange(len(x)), synthetic.ROPE_BASE ** (-np.arange(half) / half))[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


def route(w: dict[str, np.ndarray], tokens: np.ndarray, shape=SMALL) -> np.ndarray:
    """Chosen experts [token, layer, 1, n_used] of upstream's qwen3moe graph."""
    n, d_head, n_kv = len(tokens), shape["d_head"], shape["n_head_kv"]
    x = w["token_embd.weight"][tokens]
    mask = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    chosen = []
    for i in range(shape["n_layer"]):
        p = f"blk.{i}."
        h = rms(x) * w[p + "attn_norm.weight"]
        q, k, v = ((h @ w[p + f"attn_{name}.weight"].T).reshape(n, -1, d_head) for name in "qkv")
        q, k = rope(rms(q) * w[p + "attn_q_norm.weight"]), rope(rms(k) * w[p + "attn_k_norm.weight"])
        k, v = (np.repeat(t, q.shape[1] // n_kv, 1) for t in (k, v))
        score = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d_head) + mask
        score = np.exp(score - score.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", score / score.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + mixed @ w[p + "attn_output.weight"].T
        h = rms(x) * w[p + "ffn_norm.weight"]
        logits = h @ w[p + "ffn_gate_inp.weight"].T
        ids = np.argsort(-logits, 1)[:, : shape["n_used"]]
        chosen.append(ids)
        gates = np.zeros_like(logits)
        np.put_along_axis(gates, ids, np.exp(np.take_along_axis(logits, ids, 1)), 1)
        gates /= gates.sum(1, keepdims=True)
        g, u, down = (w[p + f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        g, u = h @ g.transpose(0, 2, 1), h @ u.transpose(0, 2, 1)  # [expert, token, d_ff]; the gate of most is zero
        moe = np.einsum("etd,te->td", (g / (1 + np.exp(-g)) * u) @ down.transpose(0, 2, 1), gates)
        x = x + moe
    return np.stack(chosen, 1)[:, :, None, :]


def measured(path, n_tokens=240) -> routing.Curve:
    tokens = np.random.default_rng(3).integers(0, SMALL["n_vocab"], n_tokens)
    return routing.curve(route(weights(path), tokens), SMALL["n_expert"], slots=(4, 8, 16, 24))


def test_shapes_are_those_asked_for(tmp_path):
    f = gguf_facts.read(small(tmp_path / "m.gguf", expert_type="Q4_0"))
    assert (f.architecture, f.n_layer, f.n_expert, f.n_expert_used, f.n_embd, f.n_vocab) == ("qwen3moe", 4, 32, 4, 256, 400)
    assert {t.shape for t in f.layer_tensors(0)} == {(256, 64, 32), (64, 256, 32)}
    assert f.bytes_per_slot(3) == 3 * 256 * 64 // 32 * 18
    assert f.metadata["moestream.synthetic.skew"] == 0


def test_standard_case_is_16_gib():
    shape = {k: v for k, v in synthetic.write_model.__kwdefaults__.items() if k.startswith(("n_", "d_")) and k != "n_ctx"}
    plan = synthetic._Plan(**shape, routing=synthetic.PRESETS[75], gain=0.02)
    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    assert 15.5 * 2**30 < sum(t.size_bytes for t in plan.tensors(q4, q8)) < 16.5 * 2**30


def test_same_seed_same_bytes(tmp_path):
    a, b, c = (small(tmp_path / f"{n}.gguf", seed=s).read_bytes() for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert a == b
    assert a != c


@pytest.mark.parametrize("expert_type", ["Q4_0", "Q8_0", "Q5_1", "F16", "BF16", "F32"])
def test_experts_have_mean_zero_and_differ(tmp_path, expert_type):
    """Weights with a mean add the same vector whatever the token, and the routing collapses."""
    w = weights(small(tmp_path / "m.gguf", expert_type=expert_type))
    for name, std in (("gate", 1 / 16), ("up", 1 / 16), ("down", 0.02 / (0.6 * np.sqrt(64 / 4)))):
        e = w[f"blk.2.ffn_{name}_exps.weight"]
        assert abs(e.mean()) < 4 * e.std() / np.sqrt(e.size)
        per_expert = e.reshape(len(e), -1)
        assert np.abs(per_expert.mean(1)).max() < 0.05 * std
        assert per_expert.std() == pytest.approx(std, rel=0.05)
        assert len(np.unique(per_expert[:, :64], axis=0)) == len(e)


def test_routing_is_skewed_local_and_not_collapsed(tmp_path):
    uniform = measured(small(tmp_path / "u.gguf"))
    skewed = measured(small(tmp_path / "s.gguf", routing=SKEWED))
    half = measured(small(tmp_path / "h.gguf", routing=synthetic.Routing(0.5, 1.0, 1.5)))
    # without skew an LRU of s slots finds about s of 32
    assert uniform.at(16) == pytest.approx(0.5, abs=0.05)
    assert uniform.at(16) + 0.05 < half.at(16) < skewed.at(16) - 0.05
    assert list(skewed.hits) == sorted(skewed.hits)
    assert skewed.at(16) < 0.95
    assert skewed.distinct > 0.75 * SMALL["n_expert"]
    assert uniform.distinct == SMALL["n_expert"]


def test_every_layer_has_its_own_favourites(tmp_path):
    w = weights(small(tmp_path / "m.gguf", routing=SKEWED))
    ids = route(w, np.random.default_rng(4).integers(0, SMALL["n_vocab"], 200))
    top = [np.argsort(-np.bincount(ids[:, layer].ravel(), minlength=32))[:4] for layer in range(4)]
    assert len({tuple(sorted(t)) for t in top}) == 4
    # The last layer is as skewed as the first: what the experts add has not wiped it out.
    share = [np.sort(np.bincount(ids[:, layer].ravel(), minlength=32))[-8:].sum() / ids[:, layer].size for layer in range(4)]
    assert share[3] == pytest.approx(share[0], abs=0.12)


def test_locality_raises_the_overlap_of_neighbours(tmp_path):
    without = measured(small(tmp_path / "w.gguf", routing=synthetic.Routing(0.0, 0.0, 1.5)))
    local = measured(small(tmp_path / "l.gguf", routing=synthetic.Routing(0.0, 2.0, 1.5)))
    assert local.overlap > without.overlap + 0.1
    assert local.distinct == SMALL["n_expert"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_type": "Q9_9"}, "Q9_9"),
        ({"expert_type": "Q4_K"}, "256"),
        ({"d_ff": 48}, "48"),
        ({"n_used": 33}, "33 experts used of 32"),
        ({"n_vocab": 100}, "100 tokens"),
        ({"n_head": 3}, "3 heads"),
    ],
)
def test_impossible_models_are_refused(tmp_path, changes, said):
    with pytest.raises(MoestreamError, match=said) as e:
        small(tmp_path / "m.gguf", **changes)
    assert e.value.hint
    assert not (tmp_path / "m.gguf").exists()
