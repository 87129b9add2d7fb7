"""Compare the stored tensors value by value, with the tables of the conversion.

Logits do not depend on everything that is stored: the bias of keys adds the same number to all scores of a
query, and positions beyond a long sequence are not computed. A tensor that was damaged on its way shows here.
"""

import logging
from functools import reduce

import torch

from neox_config.pluralize import first_few, pluralize
from neox_config.spec.model import ModelSpec
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import VOCABULARY
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.rounding import Roundings, compare_values
from neox_model.convert.proof.sides import Sides
from neox_model.convert.weights import WeightFiles, chunks_alike, chunks_of_ours

__all__ = ["compare_tensors"]

logger = logging.getLogger(__name__)


def compare_tensors(sides: Sides, model: ModelSpec, files: WeightFiles) -> list[str]:
    """Compare every tensor, ours rounded to the dtype of theirs; of the vocabulary, the rows of both.

    Returns:
        What is rounded, in sentences.
    """
    shapes = {
        name: (sides.rows, *shape[1:]) if name in VOCABULARY else shape
        for name, shape in sides.weights.shapes.items()
    }
    roundings = Roundings(("the checkpoint", "the model of transformers"))
    tensors = list(sides.family.tensors(model, shapes))
    logger.info("comparing %s", pluralize(len(tensors), "tensor"))
    with tracked(tensors, len(tensors), "tensors compared") as each:
        for tensor in each:
            stored = [files.find(sides.family, name) for name in tensor.theirs]
            names = [name for name in stored if name is not None]
            assert len(names) == len(stored), f"{stored} are there since check_keys"
            ours, others = chunks_alike(sides.weights, tensor), chunks_of_ours(files, tensor, names)
            # Of parts with several, the one that holds all: nothing is rounded before it is compared.
            theirs = reduce(torch.promote_types, (files.dtype(name) for name in names))
            found = compare_values(zip(ours, others, strict=True), (sides.weights.dtype(tensor.ours), theirs))
            roundings.add(found)
            if found.apart and found.rounded != 1:
                why = found.why(("the checkpoint", "the other"))
                where = f"of {first_few(names, 3)} in {sides.folder}"
                apart = pluralize(found.apart, f"value {where} is not that", f"values {where} are not those")
                raise ProofError(f"{apart} of {tensor.ours}{why}")
    return roundings.described()
