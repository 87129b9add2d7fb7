"""A small retrieval model: its settings, its texts, and its embeddings written out in float64."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neox_config.facts.checkpoints import checkpoint_name
from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.shards import ShardReader
from support.settings import SMALL_TRAINING

__all__ = [
    "ITERATIONS",
    "LENGTH",
    "MODEL",
    "SETTINGS",
    "SIZE",
    "plain_embeddings",
    "weights_of",
    "write_letters",
]

ITERATIONS, HEADS, WIDTH, LENGTH, SIZE = 4, 4, 16, 32, 8
MODEL: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "hidden_size": WIDTH,
    "hidden_dropout": 0.0,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "init_method_std": 0.3,
}
SETTINGS: dict[str, Any] = (
    SMALL_TRAINING
    | MODEL
    | {
        "objective": "ict",
        "ict_head_size": SIZE,
        "report_topk_accuracies": [1, 3],
        "split": "80,20,0",
        "train_iters": ITERATIONS,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": None,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "eval_iters": 2,
        "eval_interval": ITERATIONS,
        "save_interval": 2,
        "num_workers": 0,
    }
)


def write_letters(prefix: Path) -> str:
    """Write documents of a few sentences, each about one letter; the prefix of the dataset."""
    tokenizer, generator = build_tokenizer("CharLevelTokenizer"), np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        for number in range(120):
            words = [chr(97 + number % 26) * int(size) for size in generator.integers(1, 4, 16)]
            text = "".join(word + (". " if place % 3 == 2 else " ") for place, word in enumerate(words))
            writer.append(np.array([*tokenizer.encode(text), 0], dtype=np.uint16))
    return str(prefix)


def weights_of(folder: Path, iteration: int = ITERATIONS) -> dict[str, Tensor]:
    """The whole weights of a checkpoint, by logical name."""
    place = folder / checkpoint_name(iteration)
    manifest = Manifest.read(place)
    reader, found = ShardReader(place, manifest), {}
    for name in manifest.weight_names:
        record = manifest.tensors[name]
        values = torch.empty(math.prod(record.shape))
        reader.fill(values, name, (tuple((0, size) for size in record.shape), 0, values.numel()))
        found[name] = values.view(record.shape)
    return found


def plain_embeddings(weights: dict[str, Tensor], rows_B2S: Tensor, tower: str) -> Tensor:
    """Embeddings of one tower, written out: every token of a text sees all others, and none sees padding."""
    w = {
        name.removeprefix(f"{tower}."): value.double()
        for name, value in weights.items()
        if name.startswith(f"{tower}.") or not name.startswith(("query.", "block."))
    }
    tokens_BS, is_content_BS = rows_B2S.unbind(1)
    batch = len(tokens_BS)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embedding.word_embeddings.weight"][tokens_BS]
    x = x + w["embedding.position_embeddings.weight"][:LENGTH]
    for layer in range(2):
        name = f"layers.{layer}"
        mixed = linear(norm(x, f"{name}.norm1"), f"{name}.attention.qkv")
        query, key, value = mixed.view(batch, LENGTH, HEADS, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill((is_content_BS == 0)[:, None, None], -math.inf)
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, LENGTH, WIDTH)
        x = x + linear(context, f"{name}.attention.dense")
        x = x + linear(
            functional.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.up")), f"{name}.mlp.down"
        )
    return linear(norm(x, "final_norm")[:, 0], "retrieval_head")
