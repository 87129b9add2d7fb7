"""Prove that a written checkpoint computes what the stored ranks compute together.

The ranks are not joined here: each computes its heads and its part of the feed-forward block from its own
tensors, and the results are added, as in tensor-parallel training. Nothing of the conversion's tables is
used. Each block is compared with neox-model's, built from the written checkpoint; embeddings and the output
projection are compared value by value.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.facts.norms import NORM_FACTS
from neox_config.pluralize import pluralize
from neox_config.spec.model import Alibi, Layer, Norm, Rotary, Rpe, Window
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.differences import attention_of
from neox_model.convert.errors import ProofError
from neox_model.convert.neox.files import Key, NeoXFiles
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.layers import OneLayer, kinds_of_layers
from neox_model.convert.stored import StoredWeights
from neox_model.convert.weights import HEAD
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS
from neox_model.layers.positions.relative import alibi_slopes, distance_buckets

__all__ = ["compare_blocks", "compare_rows"]

logger = logging.getLogger(__name__)

_TOKENS = 16
_SCALES = (1.0, 1e-3)
_OF_NORMS = ("weight", "scale", "g", "bias")


def compare_rows(files: NeoXFiles, weights: StoredWeights, figures: Figures, *, num_layers: int) -> None:
    """Compare embeddings and output projection with the rows of the ranks, value by value."""
    vocabulary = {TOKEN_EMBEDDING: Key(0, "word_embeddings.weight")}
    if HEAD in weights.shapes:
        vocabulary[HEAD] = Key(num_layers + 4, "final_linear.weight")
    for name, key in vocabulary.items():
        first = 0
        for rank in range(files.ranks):
            if files.shapes(key)[rank][1:] == weights.shapes[name][1:]:
                chunks = files.row_chunks(key, rank)
            elif rank == 0:
                # A projection that is divided over the hidden size.
                chunks = iter([torch.cat([files.whole(key, each) for each in range(files.ranks)], dim=1)])
            else:
                break
            for chunk in chunks:
                rows = chunk[: weights.vocab_size - first]
                if not rows.shape[0]:
                    break  # Padding that is left out.
                written = weights.rows(name, first, first + rows.shape[0])
                _require_same(name, written, rows, figures)
                first += rows.shape[0]
    name = "embedding.position_embeddings.weight"
    if name in weights.shapes:
        stored = _combined(files, Key(0, "position_embeddings.weight")).to(weights.dtype(name))
        _require_same(name, weights.whole(name), stored, figures)


def _combined(files: NeoXFiles, key: Key, *, is_added: bool = False) -> Tensor:
    """Return the mean (or the sum) of what the ranks store, rounded as a checkpoint stores it, in float64."""
    parts = [files.whole(key, rank).double() for rank in range(files.ranks)]
    total = sum(parts[1:], parts[0])
    return (total if is_added else total / files.ranks).to(files.dtype(key)).double()


def _require_same(name: str, written: Tensor, stored: Tensor, figures: Figures) -> None:
    if not torch.equal(written, stored):
        raise ProofError(f"{name} differs from the stored one; this is not the same model")
    figures.compare("rows", written.float(), stored.float())


def compare_blocks(files: NeoXFiles, checkpoint: Checkpoint, figures: Figures, *, order: str | None) -> None:
    """Compare every block, with the final norm, on random hidden states of two sizes.

    Args:
        files: the checkpoint of GPT-NeoX.
        checkpoint: the written one.
        figures: what is seen is added to it.
        order: of shared keys and values in GPT-NeoX's; nothing in the files shows whether it is right.
    """
    spec = checkpoint.model
    kinds = kinds_of_layers(spec)
    seen = [getattr(kind.mixer, "pattern", None) for kind in kinds]
    # In one block of a sparse pattern, and in a window, attention is plain causal attention.
    visible = [
        each.before + 1 if isinstance(each, Window) and each.block == 1 else each.block
        for each in seen
        if each is not None
    ]
    length = min(_TOKENS, spec.max_positions, *visible)
    ours: OneLayer | None = None
    logger.info("comparing %s", pluralize(len(seen), "layer"))
    with tracked(enumerate(kinds), len(kinds), "layers compared") as each:
        for index, kind in each:
            if ours is None or ours.kind != kind:
                ours = OneLayer(checkpoint, spec, checkpoint.resolved.run, index)
            ours.fill(index, torch.float32)
            ranks = _Ranks(files, spec.layers, index, order)
            generator = torch.Generator().manual_seed(index)
            hidden_SD = torch.randn(length, spec.width, generator=generator)
            hidden_BSD = torch.stack([hidden_SD * scale for scale in _SCALES])
            results = zip(ours.run(hidden_BSD), ranks.run(hidden_BSD.double()).float(), strict=True)
            for scale, (here, there) in zip(_SCALES, results, strict=True):
                where = f" {index}, {length} tokens, hidden states of size {scale:g}"
                figures.compare("layer", here, there, where=where)


class _Ranks:
    """A block as the ranks compute it, in float64."""

    def __init__(self, files: NeoXFiles, layers: Sequence[Layer], index: int, order: str | None) -> None:
        self._files, self._order = files, order
        self._ours, self._final = layers[index], len(layers) + 3
        self._attention = attention_of(self._ours)
        self._layer = index + 2
        self._names = {key.name for key in files.parts if key.layer == self._layer}

    def run(self, hidden_BSD: Tensor) -> Tensor:
        """Return the results of the block and the final norm."""
        first = self._norm(self._layer, "input_layernorm", hidden_BSD)
        attended = self._added("attention.dense", lambda rank: self._heads(rank, first))
        hidden = hidden_BSD + attended
        before = hidden_BSD if self._ours.residual == "parallel" else hidden
        stem = "input_layernorm" if self._ours.shares_norm else "post_attention_layernorm"
        second = self._norm(self._layer, stem, before)
        stem = next(
            each for each in ("linear2", "dense_4h_to_h", "w2") if f"mlp.{each}.weight" in self._names
        )
        hidden = hidden + self._added(f"mlp.{stem}", lambda rank: self._inner(rank, second))
        return self._norm(self._final, "norm", hidden)

    def _tensor(self, name: str, rank: int) -> Tensor | None:
        key = Key(self._layer, name)
        return self._files.whole(key, rank).double() if key in self._files.parts else None

    def _linear(self, stem: str, rank: int, inputs: Tensor, *, bias: bool = True) -> Tensor:
        weight = self._tensor(f"{stem}.weight", rank)
        assert weight is not None, stem
        return functional.linear(inputs, weight, self._tensor(f"{stem}.bias", rank) if bias else None)

    def _added(self, stem: str, inputs: Callable[[int], Tensor]) -> Tensor:
        """Return the sum over ranks of an output projection, with the bias."""
        ranks = range(self._files.ranks)
        parts = [self._linear(stem, rank, inputs(rank), bias=False) for rank in ranks]
        results, key = torch.stack(parts).sum(dim=0), Key(self._layer, f"{stem}.bias")
        if key not in self._files.parts:
            return results
        # With a parallel residual, the biases of all ranks are in the sum of their results.
        return results + _combined(self._files, key, is_added=self._ours.residual == "parallel")

    def _norm(self, layer: int, stem: str, inputs: Tensor) -> Tensor:
        keys = [Key(layer, f"{stem}.{name}") for name in _OF_NORMS]
        weights = [_combined(self._files, key) for key in keys if key in self._files.parts]
        return _normalized(self._ours.norm, inputs, inputs.shape[-1:], weights)

    def _normed_heads(self, rank: int, heads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return queries or keys of a rank, normalized if the model does."""
        if self._attention.qk_norm is None:
            return tuple(heads)
        inputs = torch.stack(list(heads), dim=-2)
        found = [self._tensor(f"attention.qk_layernorm.{name}", rank) for name in _OF_NORMS]
        weights = [each for each in found if each is not None]
        return _normalized(self._ours.norm, inputs, inputs.shape[-2:], weights).unbind(-2)

    def _inner(self, rank: int, inputs: Tensor) -> Tensor:
        """Return the inner activations of a rank."""
        mlp = self._ours.channel
        assert mlp is not None
        activation = {**ACTIVATIONS, **GATED_ACTIVATIONS}[mlp.activation]
        if "mlp.w1.weight" in self._names:
            return activation(self._linear("mlp.w1", rank, inputs)) * self._linear("mlp.w3", rank, inputs)
        stem = "mlp.linear1" if "mlp.linear1.weight" in self._names else "mlp.dense_h_to_4h"
        inner = self._linear(stem, rank, inputs)
        if not mlp.is_gated:
            return activation(inner)
        width = inner.shape[-1] // 2
        return inner[..., :width] * activation(inner[..., width:])

    def _heads(self, rank: int, inputs: Tensor) -> Tensor:
        """Return the results of the heads of a rank, next to each other."""
        a, ranks = self._attention, self._files.ranks
        width, queries, keys = a.head_width, a.heads // ranks, a.kv_heads // ranks
        mixed = self._linear("attention.query_key_value", rank, inputs)
        parts, results, length = [], [], inputs.shape[-2]
        for head in range(queries):
            if a.heads == a.kv_heads:
                query, key, value = (mixed[..., (3 * head + n) * width :][..., :width] for n in range(3))
            elif self._order == "separate":
                shared = head * keys // queries
                places = (head, queries + shared, queries + keys + shared)
                query, key, value = (mixed[..., place * width :][..., :width] for place in places)
            else:
                query, key, value = _of_parts(mixed, head, width=width, sharing=queries // keys)
            parts.append((query, key, value))
        all_queries, all_keys, all_values = zip(*parts, strict=True)
        normed = self._normed_heads(rank, all_queries), self._normed_heads(rank, all_keys)
        for head, (query, key, value) in enumerate(zip(*normed, all_values, strict=True)):
            scores = self._rotated(query) @ self._rotated(key).mT / math.sqrt(width)
            scores = scores + self._bias(rank, head, head + rank * queries, length, width)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            results.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value)
        return torch.cat(results, dim=-1)

    def _rotated(self, states_BSD: Tensor) -> Tensor:
        """Return queries or keys of a head, turned by their positions."""
        position = self._attention.position
        if not isinstance(position, Rotary):
            return states_BSD
        length, width = states_BSD.shape[-2:]
        channels = int(width * position.fraction)
        half = channels // 2
        rates = position.base ** -(torch.arange(half, dtype=torch.float64) * 2 / channels)
        turned = torch.polar(
            torch.ones(length, half, dtype=torch.float64),
            torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates,
        )
        pairs = torch.complex(states_BSD[..., :half], states_BSD[..., half:channels]) * turned
        return torch.cat([pairs.real, pairs.imag, states_BSD[..., channels:]], dim=-1)

    def _bias(self, rank: int, local: int, head: int, length: int, width: int) -> Tensor:
        """Return what is added to the scores of a head, by query and key."""
        place = torch.arange(length)
        distance = (place.unsqueeze(1) - place).clamp(min=0)
        position = self._attention.position
        if isinstance(position, Alibi):
            return -alibi_slopes(self._attention.heads)[head] * distance.double()
        if isinstance(position, Rpe):
            table = self._tensor("attention.rpe.weight", rank)
            assert table is not None
            buckets = distance_buckets(distance, position.buckets, position.max_distance)
            return table[buckets, local] * math.sqrt(width)
        return torch.zeros(length, length, dtype=torch.float64)


def _normalized(norm: Norm, inputs: Tensor, shape: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    """Normalize over the last dimensions, of this shape; RMS norms and norms with one number over one."""
    if NORM_FACTS[norm.kind].subtracts_mean:
        weight, bias, *_ = *weights, None, None
        return functional.layer_norm(inputs, list(shape), weight, bias, norm.epsilon)
    if norm.kind == "rmsnorm":
        return weights[0] * inputs / (inputs.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    return weights[0] * inputs / inputs.norm(dim=-1, keepdim=True).clamp(min=norm.epsilon)


def _of_parts(mixed: Tensor, head: int, *, width: int, sharing: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a head where each head stores a part of the shared key and value."""
    part = width // sharing
    first = head // sharing * sharing
    starts = [other * (width + 2 * part) for other in range(first, first + sharing)]
    own = starts[head - first]
    keys = [mixed[..., start + width : start + width + part] for start in starts]
    values = [mixed[..., start + width + part : start + width + 2 * part] for start in starts]
    return mixed[..., own : own + width], torch.cat(keys, dim=-1), torch.cat(values, dim=-1)
