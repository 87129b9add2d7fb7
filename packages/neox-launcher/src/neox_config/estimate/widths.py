"""Notes on widths that make matrix products in 16 bits slow, with the next good value of a parameter.

A GPU loads rows of matrices in units of 16 bytes. Where a row is not a multiple of that, cuBLAS uses kernels
that load fewer bytes at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path

from neox_config.derive.widths import MLP_SIZES
from neox_config.estimate.shapes import Shape, shape_of
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.widths import ALIGNED, BEST_ALIGNED, next_aligned
from neox_config.problems import Problem, in_words, place_of
from neox_config.schema.config import NeoXConfig
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
    config, ranks = resolved.config, resolved.derived.model_parallel_size
    if resolved.derived.computes_in == "fp32":
        return []
    shape = shape_of(resolved, vocab_size=vocab_size or 0)
    has_weights = _has_weights(config)
    return [
        _note(width, config)
        for width in _widths(shape, config, ranks)
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


def _widths(shape: Shape, config: NeoXConfig, ranks: int) -> Iterator[_Width]:
    """Yield the widths from which all dimensions of products follow."""
    facts = [ATTENTION_FACTS[kind] for kind in {*shape.attention_types}]
    has_gmlp = any(each.is_gmlp for each in facts)
    # What follows from an aligned head: the hidden size, and the parts of attention's matrices on each rank.
    aligned = -(-shape.hidden_size // (ALIGNED * shape.heads)) * ALIGNED * shape.heads
    if not all(each.is_gmlp for each in facts):
        yield _Width(
            name="num_attention_heads",
            gives=f"gives heads of width {shape.hidden_size // shape.heads} with hidden-size: "
            f"{shape.hidden_size}",
            numbers=shape.hidden_size // shape.heads,
            remedy=f"set hidden-size: {aligned}, or another num-attention-heads",
        )
        yield _mlp(shape, config, ranks)
    else:
        yield _Width(
            name="hidden_size",
            gives="is the width of all matrices",
            numbers=gcd(shape.hidden_size, 4 * shape.hidden_size // ranks),
            remedy=f"set hidden-size: {aligned}",
        )
    if has_gmlp or shape.keeps_scores:
        yield _Width(
            name="seq_length",
            gives=f"is the width of {'the matrices over positions' if has_gmlp else 'attention scores'}",
            numbers=shape.seq_length,
            remedy=f"set seq-length: {max(ALIGNED, shape.seq_length // ALIGNED * ALIGNED)}",
            is_of_weights=has_gmlp,
        )
    if shape.gmlp_attention_width is not None and any(each.has_inner_attention for each in facts):
        yield _Width(
            name="gmlp_attn_dim",
            gives="is the width of the attention head of amlp layers",
            numbers=shape.gmlp_attention_width,
            remedy=f"set gmlp-attn-dim: {next_aligned(shape.gmlp_attention_width)}",
        )
    if shape.adapter_rank:
        yield _Width(
            name="lora_rank",
            gives="is the width of the matrices of adapters",
            numbers=shape.adapter_rank,
            remedy=f"set lora-rank: {next_aligned(shape.adapter_rank)}",
            is_of_weights=False,
        )
    yield _head(shape, config, ranks)


def _mlp(shape: Shape, config: NeoXConfig, ranks: int) -> _Width:
    names = ("mlp_width", *MLP_SIZES)
    given = next((name for name in names if config.value_of(name) is not None), "hidden_size")
    instead = f" instead of {given.replace('_', '-')}" if given in MLP_SIZES else ""
    return _Width(
        name=given,
        gives=f"gives an MLP width of {shape.mlp_width:,} with activation: {shape.activation}",
        numbers=shape.mlp_width // ranks,
        ranks=ranks,
        remedy=f"set mlp-width: {next_aligned(shape.mlp_width, ranks=ranks)}{instead}",
    )


def _head(shape: Shape, config: NeoXConfig, ranks: int) -> _Width:
    """Return the width of the output: of embeddings in a retrieval model, else the vocabulary."""
    if shape.embedding_size is not None:
        return _Width(
            name="ict_head_size",
            gives="is the width of the embeddings",
            numbers=shape.embedding_size // ranks,
            ranks=ranks,
            remedy=f"set ict-head-size: {next_aligned(shape.embedding_size, ranks=ranks)}",
        )
    given, best = config.model.make_vocab_size_divisible_by, BEST_ALIGNED * ranks
    return _Width(
        name="make_vocab_size_divisible_by",
        gives=f"gives a vocabulary of {shape.vocab_size:,} entries",
        numbers=ceil(shape.vocab_size / ranks),
        ranks=ranks,
        remedy=f"set make-vocab-size-divisible-by: {-(-given // best) * best}",
    )
