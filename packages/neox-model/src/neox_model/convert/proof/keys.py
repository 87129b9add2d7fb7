"""Compare the names, shapes and tying of stored tensors with the class of transformers, without its memory.

The embedding and the output projection, which the comparison of layers leaves out, are compared value by
value.
"""

from math import prod
from typing import Any

import torch

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.sides import Sides
from neox_model.convert.reference import meta_model
from neox_model.convert.weights import HEAD, WeightFiles

__all__ = ["check_keys"]


def check_keys(sides: Sides, files: WeightFiles) -> dict[str, int]:
    """Compare what is stored with what the class reads, and the rows of the vocabulary with ours.

    Returns:
        Numbers of tensors and parameters.
    """
    # transformers ties no output projection that is stored in addition to the embedding.
    if sides.family.stored_name(sides.family.weight_outside(HEAD), files.tensors) is not None:
        sides.config.tie_word_embeddings = False
    model, reads = meta_model(sides.config, sides.family), sides.family.class_name
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    # Matrices of experts, which are one tensor in memory.
    shapes = {
        part: (prod(shape[:-1]) // len(parts), *shape[-1:]) if len(parts) > 1 else shape
        for name, shape in shapes.items()
        for parts in [sides.family.in_files(name, sum(shape[:1]))]
        for part in parts
    }
    stored = {name: files.find(sides.family, name) for name in shapes}
    used = {files.whole_name(each) for each in stored.values() if each is not None}
    extra = {name for name in files.tensors if not sides.family.is_ignored(name)} - used
    found = {name: files.shape(each) if each else "none" for name, each in stored.items()}
    for name, there in (found | {name: files.shape(name) for name in sorted(extra)}).items():
        here = shapes.get(name, "none")
        if there != here:
            raise ProofError(f"{sides.folder}: {name} has the shape {there}, but {reads} reads {here}")
    _check_vocabulary(sides, files, model)
    return {"tensors": len(shapes), "parameters": sum(map(prod, shapes.values()))}


def _check_vocabulary(sides: Sides, files: WeightFiles, model: Any) -> None:
    model.tie_weights()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied = head is embedding
    if is_tied == (HEAD in sides.weights.shapes):
        raise ProofError(
            f"{sides.family.class_name} {'ties' if is_tied else 'does not tie'} the output projection to the "
            "embedding, and neox-model does the opposite"
        )
    pairs = {TOKEN_EMBEDDING: embedding} if is_tied else {TOKEN_EMBEDDING: embedding, HEAD: head}
    for ours, weight in pairs.items():
        named = model.named_parameters(remove_duplicate=False)
        name = next((name for name, each in named if each is weight), None)
        theirs = None if name is None else sides.family.stored_name(name, files.tensors)
        if theirs is None or not _are_rows(sides, files, ours, theirs):
            types = f"{sides.weights.dtype(ours)} in {sides.weights.folder}"
            if theirs is not None:
                types += f", {files.tensors[theirs].dtype} in {sides.folder}"
            raise ProofError(
                f"the rows of {theirs or name} in {sides.folder} are not those of {ours} ({types})"
            )


def _are_rows(sides: Sides, files: WeightFiles, ours: str, theirs: str) -> bool:
    """Return whether two tensors have the same rows, ours rounded to the dtype of theirs."""
    shape = files.tensors[theirs].shape
    mine = sides.weights.shapes[ours]
    if shape[1:] != mine[1:] or min(shape[0], mine[0]) < sides.rows:
        return False
    dtype = files.tensors[theirs].dtype
    pairs = zip(sides.weights.row_chunks(ours, sides.rows), files.row_chunks(theirs, sides.rows), strict=True)
    return all(torch.equal(one.to(dtype), other) for one, other in pairs)
