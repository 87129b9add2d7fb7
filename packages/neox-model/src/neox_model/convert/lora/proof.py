"""Prove that adapters of PEFT and of ours have the same base, and change it in the same way."""

import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neox_config.facts.adapters import adapter_scale
from neox_model.convert.checkpoints import Checkpoint, build_sequential
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import family_of_config
from neox_model.convert.families.values import whole_number
from neox_model.convert.lora.exported import PREFIX, WEIGHTS, A, B, Exported
from neox_model.convert.lora.options import Options, read_options
from neox_model.convert.proof import WHOLE_LIMIT, Sides
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.keys import check_keys
from neox_model.convert.proof.layers import compare_layers, lengths_of
from neox_model.convert.proof.rounding import PIECE
from neox_model.convert.proof.sides import dtype_of
from neox_model.convert.proof.tensors import compare_tensors
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.proof.whole import compare_logits
from neox_model.convert.reference import adapted_names, load_adapted_model, meta_model
from neox_model.convert.requests import read_config
from neox_model.convert.weights import WeightFiles, open_weights
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["Base", "compared_base", "prove_adapters"]

logger = logging.getLogger(__name__)

# Rounding of a sum in float64, relative to the sum of its absolute terms.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Base:
    """The base of adapters, whose two sides were compared.

    Args:
        sides: a checkpoint of ours and a model of transformers with the same options, tokenizer and values.
        checkpoint: ours.
        parameters: of the model of transformers.
        rounded: what it has in another dtype than the checkpoint, in sentences.
    """

    sides: Sides
    checkpoint: Checkpoint
    parameters: int
    rounded: list[str]


def compared_base(
    base: Path,
    model: Path,
    *,
    remedy: str,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> Base:
    """Return both sides of a base, after all values were compared.

    Args:
        base: its checkpoint.
        model: its folder as a model of transformers.
        remedy: which folders to pass if they differ.
        vocab_file: the tokenizer's file, if it is not where the base records it.
        merge_file: its second file.

    Raises:
        NeoXError: the checkpoint is damaged, or the model of transformers is not the same.
    """
    checkpoint = Checkpoint(base)
    checkpoint.check_shapes()
    tokenizer = checkpoint.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    config = read_config(model)
    family = family_of_config(config)
    files, theirs = open_weights(model, family, family.read(config))
    rows = whole_number(config.get("vocab_size", checkpoint.vocab_size), "vocab_size")
    sides = Sides(checkpoint, model, family, tokenizer, rows=rows)
    found = differences(checkpoint.model, theirs)
    if not found:
        logger.info("comparing the base with %s", model)
        try:
            counted = check_keys(sides, files)
            compare_tokenizers(tokenizer, model, rows=rows)
            rounded = compare_tensors(sides, checkpoint.model, files)
            return Base(sides, checkpoint, counted["parameters"], rounded)
        except ProofError as error:
            if error.__cause__ is not None:  # transformers cannot read the model.
                raise
            found = [str(error)]
    raise ConversionError(f"{base} is not the same model as {model}: {'; '.join(found)}; {remedy}")


def prove_adapters(exported: Exported, base: Base, folder: Path) -> dict[str, Any]:
    """Compare the adapters in a folder of PEFT, as peft reads them, with ours.

    Args:
        exported: ours.
        base: the base, and the same model of transformers.
        folder: theirs.

    Returns:
        What was seen, for `verification.json`.
    """
    sides, figures, files = base.sides, Figures(), WeightFiles(base.sides.folder)
    files.divide(sides.family)
    stored = WeightFiles(folder, single=WEIGHTS)
    names = adapted_names(meta_model(sides.config, sides.family), folder)
    if names != {name: found.shape for name, found in stored.tensors.items()}:
        apart = sorted(names.keys() ^ stored.tensors.keys()) or sorted(names)
        raise ProofError(f"peft reads other tensors from {folder} than are stored there: {apart[0]}")
    logger.info("comparing adapters")
    packing = exported.packing
    options = Options(packing.rank, packing.alpha, exported.adapters.section.lora_dropout)
    found = read_options(folder, is_transposed=exported.is_transposed)
    if found != options:
        raise ProofError(f"{folder} has {found}, but the checkpoint of the adapters {options}")
    for name, (values,) in exported.values():
        there = stored.whole(name)
        if there.dtype != values.dtype or not torch.equal(there, values):
            raise ProofError(f"{name} in {folder} differs from the adapter of the checkpoint")
    _compare_products(exported, stored)
    is_whole = base.parameters <= WHOLE_LIMIT
    if is_whole:
        theirs = load_adapted_model(sides.folder, sides.family, folder)
        ours = _our_model(exported, base.checkpoint, dtype_of(sides, files))
        compare_logits(sides, lengths_of(base.checkpoint.model), ours, theirs, figures)
    else:
        model, run = base.checkpoint.model, base.checkpoint.resolved.run
        compare_layers(sides, model, run, files, figures)
    return {
        "verdict": "equal",
        "base_rounded": base.rounded,
        "class": f"LoRA of {sides.family.class_name}",
        "tensors": len(stored.tensors),
        "parameters": sum(prod(each.shape) for each in stored.tensors.values()),
        "largest_differences": figures.plain(),
        "limit": figures.limit,
        "compared_as_a_whole": is_whole,
        "model": str(sides.folder.absolute()),
    }


def _compare_products(exported: Exported, stored: WeightFiles) -> None:
    """Compare every element of what is added to the weights of theirs, in float64, some columns at a time."""
    packing = exported.packing
    scale = adapter_scale(rank=packing.rank, alpha=packing.alpha)
    for matrix in exported.matrices:
        a, b = (side.double() for side in exported.adapters.pair(matrix.ours))
        modules = [f"{PREFIX}{name}" for name in matrix.theirs]
        pairs = {
            name: [stored.whole(f"{name}{side}").double() for side in (A, B)]
            for name in modules
            if f"{name}{A}" in stored.tensors
        }
        width = max(1, PIECE // len(b))
        for start in range(0, a.shape[1], width):
            columns = slice(start, start + width)
            ours = exported.adapters.scale * (b @ a[:, columns])
            # The outputs of a weight are moved, and so of each of its columns.
            expected = matrix.weight.split(ours)
            for name, mine in zip(modules, expected, strict=True):
                change = mine.t() if exported.is_transposed else mine
                product, bound = torch.zeros_like(change), torch.zeros_like(change)
                if name in pairs:
                    their_a, their_b = pairs[name][0][:, columns], pairs[name][1]
                    product = scale * (their_b @ their_a)
                    bound = _ROUNDING * scale * (their_b.abs() @ their_a.abs())
                if not bool(((change - product).abs() <= bound).all()):
                    raise ProofError(
                        f"the change of {name.removeprefix(PREFIX)} by {stored.folder} differs from that of "
                        f"{matrix.ours} by the adapters of the checkpoint; this is not the same model"
                    )


def _our_model(exported: Exported, base: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """Return the base, rounded to a dtype, with the adapters, in float32."""
    resolved = base.resolved.replaced(adapters=exported.adapters.section)
    model = build_sequential(resolved.model, resolved.run, base.vocab_size)
    pairs = {
        f"{name}.adapter.{side}": value
        for name in exported.adapters.matrices
        for side, value in zip("ab", exported.adapters.pair(name), strict=True)
    }
    with torch.no_grad():
        for name, parameter in named_logical_parameters(model):
            value = pairs.pop(name, None)
            parameter.copy_(base.whole(name).to(dtype) if value is None else value)
    assert not pairs, sorted(pairs)
    return model
