"""The estimate for GPUs: what layers store, counted without a GPU, and peaks that a GPU has measured."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from gpu_gate.stored_on_gpu import ARCHITECTURES
from neox_config.estimate import activation_bytes_per_layer
from neox_config.estimate.memory import device_memory
from neox_config.estimate.setup import setup_of
from neox_config.facts import loss
from support.settings import resolved_from
from support.sources import ROOT

GIB = 2**30
# In activations of gMLP layers, the masked matrix that mixes positions is left out.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def counted():
    command = [sys.executable, "-m", "gpu_gate.stored_on_gpu"]
    paths = os.pathsep.join(str(ROOT / name) for name in ("tests", "tools"))
    variables = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for the device in name")
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_estimated_activations_are_what_a_layer_stores_on_a_gpu(counted, architecture, compiles):
    resolved = resolved_from(ARCHITECTURES[architecture] | {"compile": compiles})
    setup = setup_of(resolved, vocab_size=1024)
    estimated = activation_bytes_per_layer(setup, setup.model.layers[0], device="cuda")
    assert estimated == pytest.approx(counted[architecture][compiles], rel=TOLERANCE)


class Measured(NamedTuple):
    """A peak of `torch.cuda.max_memory_allocated`, which is without the context of CUDA."""

    model: str
    compiles: bool
    logits_per_chunk: int
    gibibytes: float


COMMON: dict[str, Any] = {
    "engine": "torch",
    "precision": "bfloat16",
    "pos_emb": "rotary",
    "gradient_accumulation_steps": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "Pythia 160M": {
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "gpt_j_residual": True,
        "openai_gelu": True,
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 50_304,
        "train_micro_batch_size_per_gpu": 16,
    },
    "Llama 3.2 1B": {
        "num_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "mlp_width": 8192,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "use_bias_in_mlp": False,
        "use_bias_in_attn_linear": False,
        "make_vocab_size_divisible_by": 128_256,
        "train_micro_batch_size_per_gpu": 4,
    },
    "GPT-NeoX 1.3B": {
        "num_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "gpt_j_residual": True,
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 50_304,
        "train_micro_batch_size_per_gpu": 8,
    },
}
# Source: one H100 80GB, torch 2.11, one process, Adam with float32 master weights, ZeRO stage 0.
MEASURED = (
    Measured("Pythia 160M", False, 1 << 27, 12.58),
    Measured("Pythia 160M", True, 1 << 27, 12.58),
    Measured("Pythia 160M", True, 1 << 28, 13.07),
    Measured("Llama 3.2 1B", False, 1 << 27, 41.88),
    Measured("Llama 3.2 1B", True, 1 << 27, 37.88),
    Measured("Llama 3.2 1B", True, 1 << 28, 38.14),
    Measured("GPT-NeoX 1.3B", True, 1 << 27, 45.13),
)


@pytest.mark.parametrize("row", MEASURED)
def test_estimated_peaks_are_those_that_a_gpu_has_measured(row, monkeypatch):
    monkeypatch.setitem(loss.CHUNK_NUMBERS, "cuda", row.logits_per_chunk)
    resolved = resolved_from(COMMON | MODELS[row.model] | {"compile": row.compiles})
    memory = device_memory(setup_of(resolved, vocab_size=1024))
    of_cuda = GIB
    assert (memory.total - of_cuda) / GIB == pytest.approx(row.gibibytes, rel=0.02)
