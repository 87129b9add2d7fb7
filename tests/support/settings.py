"""Small configurations for tests, through the real loader."""

import json
import tempfile
from pathlib import Path
from typing import Any

from neox_config import Resolved, load_config, resolve
from neox_config.spec.model import ModelSpec
from neox_config.spec.run import RunSpec

__all__ = ["SMALL_TRAINING", "TINY", "resolved_from"]

# Six heads and a width of 24: sizes that do not divide nicely. No dropout, so that runs can be compared.
TINY: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "seq_length": 12,
    "max_position_embeddings": 12,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "train_iters": 5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "init_method_std": 0.3,
    "seed": 7,
}

# A run of a few iterations on the corpus of `support.corpus`, with dropout.
SMALL_TRAINING: dict[str, Any] = {
    "split": "100,0,0",
    "tokenizer_type": "CharLevelTokenizer",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "hidden_dropout": 0.1,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "eval_iters": 0,
}


def resolved_from(settings: dict[str, Any], *, devices: int = 1) -> Resolved:
    """TINY with `settings` on top, resolved for that many devices on one host."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yml"
        # JSON is YAML.
        path.write_text(json.dumps({**TINY, **settings}))
        return resolve(load_config([path]), devices=devices)


def specs_from(settings: dict[str, Any], *, devices: int = 1) -> tuple[ModelSpec, RunSpec]:
    """TINY with `settings` on top: the model, and how it runs on that many devices on one host."""
    resolved = resolved_from(settings, devices=devices)
    return resolved.model, resolved.run
