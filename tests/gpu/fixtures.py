"""Small models for proofs on a card, made where there is a CPU engine with the test programs (``moestream build --test-series``).

python tests/gpu/fixtures.py build/gpu-models [folder with test-llama-archs and llama-quantize]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fixture_models
from fixture_models import make_layout, quantize
from fixture_variants import write_nvfp4

from bench.synthetic import write_model

# Biases (openai-moe), shared experts (qwen2moe, deepseek2, qwen35moe), gate and up in one tensor (gemma4, deepseek2-merged).
TYPES = {
    "qwen3moe": ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q3_K_S", "MXFP4_MOE", "IQ4_NL"),
    "qwen2moe": ("Q4_0", "Q4_K"),
    "openai-moe": ("Q8_0", "MXFP4_MOE"),
    "deepseek2": ("Q4_0",),
    "deepseek2-merged": ("Q8_0",),
    "qwen35moe": ("Q4_0",),
    "gemma4": ("Q4_0",),
}


# Rows of 320 and 160 values: no multiple of what kernels take at once, so that they read behind the last row of an expert.
ODD_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def make_odd(folder: Path) -> list[Path]:
    """Write a small model of each of ODD_TYPES into the folder."""
    shape = dict(
        n_layer=4, n_expert=16, n_used=4, d_model=320, d_ff=160, n_head=4, n_head_kv=2, d_head=64, n_vocab=320, n_ctx=2048
    )
    return [write_model(folder / f"odd-{t.lower()}.gguf", expert_type=t, dense_type="Q8_0", **shape) for t in ODD_TYPES]


def make(folder: Path) -> list[Path]:
    """Write every model of TYPES into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for layout, types in TYPES.items():
        source = make_layout(layout, folder)
        for type_name in types:
            target = folder / f"{layout}-{type_name.lower().removesuffix('_moe').removesuffix('_s')}.gguf"
            made.append(target if target == source else quantize(source, target, type_name))
        if layout == "qwen3moe":  # with a scale for each expert, as that type has
            made.append(write_nvfp4(source, folder / f"{layout}-nvfp4.gguf"))
        if source not in made:
            source.unlink()
    return made + make_odd(folder)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: fixtures.py FOLDER [BIN]")
    if len(sys.argv) == 3:
        fixture_models.tool = lambda name: Path(sys.argv[2], name)
    for path in make(Path(sys.argv[1])):
        print(path)
