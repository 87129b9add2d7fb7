"""Setups for the formulas of the estimate, from parameters, and with other values that no rule checks."""

import json
from dataclasses import fields, replace
from typing import Any

from neox_config import Text, load_config, resolve
from neox_config.estimate.setup import Setup, setup_of

_TRAINING = {
    "train-micro-batch-size-per-gpu": 1,
    "train-iters": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0e-3}},
    "zero-optimization": {"stage": 0},
    "precision": "bfloat16",
    "data-types": {"grad-accum-dtype": "bf16"},
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "make-vocab-size-divisible-by": 1,
}


def make(
    layers: int = 2,
    hidden: int = 8,
    heads: int = 2,
    length: int = 4,
    vocab: int = 10,
    /,
    **settings: Any,
) -> Setup:
    """Return a small model on one device, with these parameters, in bfloat16 without dropout."""
    sizes = {
        "num-layers": layers,
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "seq-length": length,
        "max-position-embeddings": length,
    }
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    config = load_config([], texts=[Text(json.dumps(_TRAINING | sizes | given), "setup")])
    return setup_of(resolve(config, devices=1), vocab_size=vocab)


def on(setup: Setup, **values: Any) -> Setup:
    """Return the same with other values, each by the name of its field in a part of the run or in `Setup`."""
    parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        parts_with_it = (
            part.name
            for part in fields(setup.run)
            if name in {each.name for each in fields(getattr(setup.run, part.name))}
        )
        part = None if hasattr(setup, name) else next(parts_with_it)
        (own if part is None else parts.setdefault(part, {}))[name] = value
    return replace(setup.changed(**parts), **own)
