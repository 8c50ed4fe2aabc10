"""A model and settings with which stock llama.cpp gives a client the same answer bit for bit, whoever is served beside it.

Two things make stock's bits depend on other clients, and a router that is nearly undecided then takes another expert:

- The matmul kernels for several tokens (tinyBLAS) sum in another order than those for one. They know F32, F16, Q8_0, Q4_0 and others,
  but not Q4_1: in the model made here every matrix, the router's too, is Q4_1.
- Sequences that share one KV cache (``-kvu``) lie there in an order that is up to time. With ``-no-kvu`` each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from fixture_models import copy_metadata, finish
from gguf.quants import dequantize, quantize
from llama_server import LlamaServer

N_CLIENTS = 4
# The prompt cache is small, so that it is full, and memory flat, soon.
SETTINGS = ("-np", str(N_CLIENTS), "-no-kvu", "--cache-ram", "8")
PROMPTS = (
    "The purpose of this manual is to describe",
    "Define harbor. A harbor is",
    "Once upon a time there was a",
    "In the year 1815 the",
    "The command grep",
    "A prime number is",
    "Permission is granted to copy, distribute and",
    "He looked at the sea and",
    "To install the package, run",
    "She had never been",
    "The function returns",
    "Latin: a word that means",
)
N_TOKENS = 48

Answers = dict[str, list[int]]


def write_model(source: Path, target: Path) -> Path:
    """The model in ``source`` with all its matrices in Q4_1."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            writer.add_tensor(
                tensor.name, quantize(values, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
            )
    finish(writer)
    return target


def answers_alone(model: Path, log: Path) -> Answers:
    """What a server without streaming answers one client."""
    with LlamaServer(model, log) as server:
        return {prompt: server.complete(prompt, N_TOKENS) for prompt in PROMPTS}


def is_right(alone: Answers, prompt: str, tokens: Sequence[int]) -> bool:
    """Whether an answer, or the beginning of one, is that of a client alone."""
    return list(tokens[:N_TOKENS]) == alone[prompt][: len(tokens)]
