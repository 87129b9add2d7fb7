"""Small configurations for tests, through the real loader."""

import json
import tempfile
from pathlib import Path
from typing import Any

from neox_launcher.config import Resolved, load_config, resolve

__all__ = ["TINY", "resolved_from"]

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


def resolved_from(settings: dict[str, Any], *, devices: int = 1) -> Resolved:
    """TINY with `settings` on top, resolved for that many devices on one host."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yml"
        # JSON is YAML.
        path.write_text(json.dumps({**TINY, **settings}))
        return resolve(load_config([path]), devices=devices)
