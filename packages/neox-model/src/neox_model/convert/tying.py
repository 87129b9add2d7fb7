"""Whether a model of transformers ties its output projection to its embedding."""

from dataclasses import replace
from pathlib import Path

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.spec.model import ModelSpec, Vocabulary
from neox_model.convert.families import Family
from neox_model.convert.weights import WeightFiles

__all__ = ["HEAD", "open_weights"]

HEAD = "lm_head.weight"
"""Our name of the output projection."""


def open_weights(folder: Path, family: Family, stated: ModelSpec) -> tuple[WeightFiles, ModelSpec]:
    """Return the tensors of a model of transformers, and the model.

    As in transformers (5.0), an embedding and an output projection that are both stored are tied only if they
    are equal, and of tied ones either may be stored. The tensors contain tied ones once, as the embedding.

    Args:
        folder: with the weights.
        family: its class.
        stated: the model of `config.json`.

    Raises:
        ConversionError: there are no weights, or a file is missing or damaged.
    """
    files = WeightFiles(folder)
    embedding, head = (
        family.stored_name(family.weight_outside(name), files.tensors) for name in (TOKEN_EMBEDDING, HEAD)
    )
    if not stated.is_tied or head is None:
        return files, stated
    if embedding is not None and not _are_equal(files, embedding, head):
        return files, replace(stated, head=Vocabulary(tied=False))
    tensor = files.tensors.pop(head)
    files.tensors.setdefault(embedding or family.weight_outside(TOKEN_EMBEDDING), tensor)
    return files, stated


def _are_equal(files: WeightFiles, one: str, other: str) -> bool:
    if files.tensors[one].shape != files.tensors[other].shape:
        return False
    pairs = zip(files.row_chunks(one), files.row_chunks(other), strict=True)
    return all(bool((a == b).all()) for a, b in pairs)
