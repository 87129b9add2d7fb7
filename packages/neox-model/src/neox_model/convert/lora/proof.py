"""Prove that adapters of PEFT and of ours change a model in the same way."""

import logging
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neox_config.facts.adapters import adapter_scale
from neox_model.convert.checkpoints import Checkpoint, build_sequential
from neox_model.convert.errors import ProofError
from neox_model.convert.lora.exported import PREFIX, WEIGHTS, A, B, Exported
from neox_model.convert.lora.options import Options, read_options
from neox_model.convert.lora.sides import Base
from neox_model.convert.proof import WHOLE_LIMIT
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.layers import compare_layers, lengths_of
from neox_model.convert.proof.rounding import PIECE
from neox_model.convert.proof.sides import dtype_of
from neox_model.convert.proof.whole import compare_logits
from neox_model.convert.reference import adapted_names, load_adapted_model, meta_model
from neox_model.convert.weights import WeightFiles
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["prove_adapters"]

logger = logging.getLogger(__name__)

# Rounding of a sum in float64, relative to the sum of its absolute terms.
_ROUNDING = 1e-12


def prove_adapters(exported: Exported, base: Base, folder: Path) -> dict[str, Any]:
    """Compare the adapters in a folder of PEFT, as peft reads them, with ours.

    Args:
        exported: ours.
        base: the base, and the same model of transformers.
        folder: theirs.

    Returns:
        What was seen, for `verification.json`.

    Raises:
        ProofError: they differ.
    """
    sides, figures, files = base.sides, Figures(), WeightFiles(base.sides.folder)
    stored = WeightFiles(folder, single=WEIGHTS)
    names = adapted_names(meta_model(sides.config, sides.family), folder)
    if names != {name: found.shape for name, found in stored.tensors.items()}:
        apart = sorted(names.keys() ^ stored.tensors.keys()) or sorted(names)
        raise ProofError(f"peft reads other tensors from {folder} than are stored there: {apart[0]}")
    logger.info("comparing adapters")
    _compare_options(exported, folder)
    _compare_values(exported, stored)
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


def _compare_options(exported: Exported, folder: Path) -> None:
    """Compare the options; `read_options` refuses those that ours do not have."""
    packing = exported.packing
    expected = Options(packing.rank, packing.alpha, exported.adapters.section.lora_dropout)
    found = read_options(folder, is_transposed=exported.is_transposed)
    if found != expected:
        raise ProofError(f"{folder} has {found}, but the checkpoint of the adapters {expected}")


def _compare_values(exported: Exported, stored: WeightFiles) -> None:
    """Compare every value of A and B."""
    for name, (values,) in exported.values():
        there = stored.whole(name)
        if there.dtype != values.dtype or not torch.equal(there, values):
            raise ProofError(f"{name} in {stored.folder} differs from the adapter of the checkpoint")


def _compare_products(exported: Exported, stored: WeightFiles) -> None:
    """Compare every element of what is added to the weights of theirs, in float64, some columns at a time."""
    packing = exported.packing
    scale = adapter_scale(rank=packing.rank, alpha=packing.alpha)
    for matrix in exported.matrices:
        a, b = (side.double() for side in exported.adapters.pair(matrix.ours))
        theirs = [_stored_pair(stored, name) for name in matrix.theirs]
        width = max(1, PIECE // len(b))
        for start in range(0, a.shape[1], width):
            columns = slice(start, start + width)
            ours = exported.adapters.scale * (b @ a[:, columns])
            # The outputs of a weight are moved, and so of each of its columns.
            expected = matrix.weight.split(ours)
            for name, mine, pair in zip(matrix.theirs, expected, theirs, strict=True):
                change = mine.t() if exported.is_transposed else mine
                if not _is_product(change, pair, columns, scale):
                    raise ProofError(
                        f"the change of {name} by {stored.folder} differs from that of {matrix.ours} by the "
                        "adapters of the checkpoint; this is not the same model"
                    )


def _stored_pair(stored: WeightFiles, name: str) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a module of theirs, in float64; None if it has no adapter."""
    if f"{PREFIX}{name}{A}" not in stored.tensors:
        return None
    a, b = (stored.whole(f"{PREFIX}{name}{side}").double() for side in (A, B))
    return a, b


def _is_product(change: Tensor, pair: tuple[Tensor, Tensor] | None, columns: slice, scale: float) -> bool:
    """Return whether a change is these columns of the product of a pair, up to rounding."""
    if pair is None:
        return not bool(change.any())
    a, b = pair[0][:, columns], pair[1]
    bound = _ROUNDING * scale * (b.abs() @ a.abs())
    return bool(((change - scale * (b @ a)).abs() <= bound).all())


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
