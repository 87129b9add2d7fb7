"""Notes on widths that make matrix products in 16 bits slow, with the next good value of a parameter.

A GPU loads rows of matrices in units of 16 bytes. Where a row is not a multiple of that, cuBLAS uses kernels
that load fewer bytes at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path

from neox_config.derive.widths import MLP_SIZES
from neox_config.estimate.mixers import keeps_scores
from neox_config.facts.widths import ALIGNED, BEST_ALIGNED, next_aligned
from neox_config.problems import Problem, in_words, place_of
from neox_config.schema.config import NeoXConfig
from neox_config.spec.model import MLP, Attention, Retrieval, SpatialMLP
from neox_config.spec.recorded import recorded_model
from neox_config.spec.resolve import Resolved

__all__ = ["notes_on_widths"]

_REASON = "products in 16 bits are slow unless widths are multiples of 8"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Width:
    """A dimension of matrix products.

    Args:
        name: parameter that it follows from.
        gives: what the parameter gives, continuing a sentence that starts with its name and value.
        numbers: the width on one rank.
        ranks: number of tensor-parallel ranks that divide it.
        remedy: what to do if it is not aligned.
        is_of_weights: True if weights to load determine it.
    """

    name: str
    gives: str
    numbers: int
    ranks: int = 1
    remedy: str
    is_of_weights: bool = True


def notes_on_widths(resolved: Resolved, *, vocab_size: int | None) -> list[Problem]:
    """Return a note for each parameter that makes a width of products in 16 bits not a multiple of 8.

    Widths that follow from weights to load cannot be changed, so they have none.

    Args:
        resolved: the configuration.
        vocab_size: number of entries of the tokenizer; None: not known, without a note on it.
    """
    if resolved.run.precision.computes_in == "fp32":
        return []
    has_weights = _has_weights(resolved.config)
    return [
        _note(width, resolved.config)
        for width in (*_of_layers(resolved), _head(resolved, vocab_size or 0))
        if width.numbers % ALIGNED and not (width.is_of_weights and has_weights)
    ]


def _note(width: _Width, config: NeoXConfig) -> Problem:
    share = f", {width.numbers:,} on each of {width.ranks} tensor-parallel ranks" if width.ranks > 1 else ""
    note = Problem(width.name, f"{width.gives}{share}; {_REASON}", width.remedy)
    return note.located(place_of(config.sources, width.name), in_words(config.value_of(width.name)))


def _has_weights(config: NeoXConfig) -> bool:
    """Return True if the training starts from weights, whose widths are given."""
    section, reduction = config.checkpoint, config.compression.compression_training.layer_reduction
    starts = section.finetune or config.adapters.lora_rank > 0 or reduction.enabled
    if starts or config.objective.bert_load is not None:
        return True
    return section.load is not None and recorded_model(Path(section.load)) is not None


def _of_layers(resolved: Resolved) -> Iterator[_Width]:
    """Yield the widths from which all dimensions of products in layers follow."""
    model, config, ranks = resolved.model, resolved.config, resolved.run.layout.tensor
    heads, length = config.model.num_attention_heads, resolved.run.batch.length
    mixers = [layer.mixer for layer in model.layers]
    attention = next((each for each in mixers if isinstance(each, Attention)), None)
    gates = [each for each in mixers if isinstance(each, SpatialMLP)]
    # What follows from an aligned head: the hidden size, and the parts of attention's matrices on each rank.
    aligned = -(-model.width // (ALIGNED * heads)) * ALIGNED * heads
    if attention is not None:
        yield _Width(
            name="num_attention_heads",
            gives=f"gives heads of width {attention.head_width} with hidden-size: {model.width}",
            numbers=attention.head_width,
            remedy=f"set hidden-size: {aligned}, or another num-attention-heads",
        )
    else:
        yield _Width(
            name="hidden_size",
            gives="is the width of all matrices",
            numbers=gcd(model.width, gates[0].width // ranks),
            remedy=f"set hidden-size: {aligned}",
        )
    channel = next((layer.channel for layer in model.layers if layer.channel is not None), None)
    if channel is not None:
        yield _mlp(channel, config, ranks)
    if gates or (attention is not None and keeps_scores(attention, resolved.run)):
        yield _Width(
            name="seq_length",
            gives=f"is the width of {'the matrices over positions' if gates else 'attention scores'}",
            numbers=length,
            remedy=f"set seq-length: {max(ALIGNED, length // ALIGNED * ALIGNED)}",
            is_of_weights=bool(gates),
        )
    inner = next((each.attention_width for each in gates if each.attention_width is not None), None)
    if inner is not None:
        yield _Width(
            name="gmlp_attn_dim",
            gives="is the width of the attention head of amlp layers",
            numbers=inner,
            remedy=f"set gmlp-attn-dim: {next_aligned(inner)}",
        )
    if model.adapters is not None:
        yield _Width(
            name="lora_rank",
            gives="is the width of the matrices of adapters",
            numbers=model.adapters.rank,
            remedy=f"set lora-rank: {next_aligned(model.adapters.rank)}",
            is_of_weights=False,
        )


def _mlp(channel: MLP, config: NeoXConfig, ranks: int) -> _Width:
    names = ("mlp_width", *MLP_SIZES)
    given = next((name for name in names if config.value_of(name) is not None), "hidden_size")
    instead = f" instead of {given.replace('_', '-')}" if given in MLP_SIZES else ""
    return _Width(
        name=given,
        gives=f"gives an MLP width of {channel.width:,} with activation: {config.model.activation}",
        numbers=channel.width // ranks,
        ranks=ranks,
        remedy=f"set mlp-width: {next_aligned(channel.width, ranks=ranks)}{instead}",
    )


def _head(resolved: Resolved, vocab_size: int) -> _Width:
    """Return the width of the output: of embeddings in a retrieval model, else the vocabulary."""
    head, ranks = resolved.model.head, resolved.run.layout.tensor
    if isinstance(head, Retrieval):
        return _Width(
            name="ict_head_size",
            gives="is the width of the embeddings",
            numbers=head.size // ranks,
            ranks=ranks,
            remedy=f"set ict-head-size: {next_aligned(head.size, ranks=ranks)}",
        )
    embedding = resolved.model.embedding
    entries, best = embedding.entries(vocab_size), BEST_ALIGNED * ranks
    return _Width(
        name="make_vocab_size_divisible_by",
        gives=f"gives a vocabulary of {entries:,} entries",
        numbers=ceil(entries / ranks),
        ranks=ranks,
        remedy=f"set make-vocab-size-divisible-by: {-(-embedding.multiple // best) * best}",
    )
