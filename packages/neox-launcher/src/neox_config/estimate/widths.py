"""Notes on widths that make matrix products in 16 bits slow, with the next good value of a parameter.

A GPU loads rows of matrices in units of 16 bytes. Where a row is not a multiple of that, cuBLAS uses kernels
that load fewer bytes at a time.
"""

from collections.abc import Iterator
from math import ceil, gcd
from pathlib import Path

from neox_config.derive.problems import placed
from neox_config.derive.widths import MLP_SIZES
from neox_config.estimate.mixers import keeps_scores
from neox_config.facts.widths import ALIGNED, BEST_ALIGNED, next_aligned
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig
from neox_config.spec.model import MLP, Attention, Experts, Retrieval, SpatialMLP
from neox_config.spec.recorded import recorded_model
from neox_config.spec.resolve import Resolved

__all__ = ["notes_on_widths"]

_REASON = "products in 16 bits are slow unless widths are multiples of 8"


def notes_on_widths(resolved: Resolved, *, vocab_size: int | None) -> list[Problem]:
    """Return a note for each parameter that makes a width of products in 16 bits not a multiple of 8.

    Widths that follow from weights to load cannot be changed, so they have none.

    Args:
        resolved: the configuration.
        vocab_size: number of entries of the tokenizer; None: not known, without a note on it.
    """
    if resolved.run.precision.computes_in == "fp32":
        return []
    notes = [*_of_layers(resolved), *_of_head(resolved, vocab_size or 0)]
    if _has_weights(resolved.config):
        has_gates = any(isinstance(layer.mixer, SpatialMLP) for layer in resolved.model.layers)
        free = ("lora_rank",) if has_gates else ("lora_rank", "seq_length")
        notes = [note for note in notes if note.name in free]
    return [placed(resolved.config, note) for note in notes]


def _note(name: str, gives: str, numbers: int, remedy: str, *, ranks: int = 1) -> Iterator[Problem]:
    """Yield a note on a width that is not aligned.

    Args:
        name: parameter that it follows from.
        gives: what the parameter gives, continuing a sentence that starts with its name and value.
        numbers: the width on one rank.
        remedy: what to do.
        ranks: number of tensor-parallel ranks that divide it.
    """
    if numbers % ALIGNED:
        share = f", {numbers:,} on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        yield Problem(name, f"{gives}{share}; {_REASON}", remedy)


def _has_weights(config: NeoXConfig) -> bool:
    """Return True if the run starts from weights, whose widths are given."""
    section, reduction = config.checkpoint, config.compression.compression_training.layer_reduction
    starts = section.finetune or config.adapters.lora_rank > 0 or reduction.enabled
    if starts or config.objective.bert_load is not None:
        return True
    return section.load is not None and recorded_model(Path(section.load)) is not None


def _of_layers(resolved: Resolved) -> Iterator[Problem]:
    """Yield notes on the widths from which all dimensions of products in layers follow."""
    model, config, ranks = resolved.model, resolved.config, resolved.run.layout.tensor
    heads, length = config.model.num_attention_heads, resolved.run.batch.length
    mixers = [layer.mixer for layer in model.layers]
    attention = next((each for each in mixers if isinstance(each, Attention)), None)
    gates = [each for each in mixers if isinstance(each, SpatialMLP)]
    # What follows from an aligned head: the hidden size, and the parts of attention's matrices on each rank.
    aligned = -(-model.width // (ALIGNED * heads)) * ALIGNED * heads
    if attention is not None:
        name, remedy = "num_attention_heads", f"set hidden-size: {aligned}, or another num-attention-heads"
        gives = f"gives heads of width {attention.head_width} with hidden-size: {model.width}"
        if config.model.head_dim is not None:
            name, remedy = "head_dim", f"set head-dim: {next_aligned(attention.head_width)}"
            gives = "is the width of heads"
        yield from _note(name, gives, attention.head_width, remedy)
    if attention is None or config.model.head_dim is not None:
        widths = [each.width if isinstance(each, SpatialMLP) else model.width for each in mixers]
        numbers = gcd(model.width, *(each // ranks for each in widths))
        remedy = f"set hidden-size: {aligned}"
        yield from _note("hidden_size", "is the width of all matrices", numbers, remedy)
    channel = next((layer.channel for layer in model.layers if isinstance(layer.channel, MLP)), None)
    if channel is not None:
        names = ("mlp_width", *MLP_SIZES)
        given = next((name for name in names if config.value_of(name) is not None), "hidden_size")
        gives = f"gives an MLP width of {channel.width:,} with activation: {config.model.activation}"
        remedy = f"set mlp-width: {next_aligned(channel.width, ranks=ranks)}"
        remedy += f" instead of {given.replace('_', '-')}" if given in MLP_SIZES else ""
        yield from _note(given, gives, channel.width // ranks, remedy, ranks=ranks)
    experts = next((layer.channel for layer in model.layers if isinstance(layer.channel, Experts)), None)
    if experts is not None:
        remedy = f"set moe-expert-width: {next_aligned(experts.width, ranks=ranks)}"
        gives = f"gives experts of width {experts.width:,}"
        yield from _note("moe_num_experts", gives, experts.width // ranks, remedy, ranks=ranks)
    if gates or (attention is not None and keeps_scores(attention, resolved.run)):
        gives = f"is the width of {'the matrices over positions' if gates else 'attention scores'}"
        remedy = f"set seq-length: {max(ALIGNED, length // ALIGNED * ALIGNED)}"
        yield from _note("seq_length", gives, length, remedy)
    inner = next((each.attention_width for each in gates if each.attention_width is not None), None)
    if inner is not None:
        gives = "is the width of the attention head of amlp layers"
        yield from _note("gmlp_attn_dim", gives, inner, f"set gmlp-attn-dim: {next_aligned(inner)}")
    if model.adapters is not None:
        remedy = f"set lora-rank: {next_aligned(model.adapters.rank)}"
        gives = "is the width of the matrices of adapters"
        yield from _note("lora_rank", gives, model.adapters.rank, remedy)


def _of_head(resolved: Resolved, vocab_size: int) -> Iterator[Problem]:
    """Yield a note on the width of the output: of embeddings in a retrieval model, else the vocabulary."""
    head, ranks = resolved.model.head, resolved.run.layout.tensor
    if isinstance(head, Retrieval):
        remedy = f"set ict-head-size: {next_aligned(head.size, ranks=ranks)}"
        gives = "is the width of the embeddings"
        yield from _note("ict_head_size", gives, head.size // ranks, remedy, ranks=ranks)
        return
    embedding = resolved.model.embedding
    entries, best = embedding.entries(vocab_size), BEST_ALIGNED * ranks
    remedy = f"set make-vocab-size-divisible-by: {-(-embedding.multiple // best) * best}"
    gives = f"gives a vocabulary of {entries:,} entries"
    yield from _note("make_vocab_size_divisible_by", gives, ceil(entries / ranks), remedy, ranks=ranks)
