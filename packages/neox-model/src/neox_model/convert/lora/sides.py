"""The base of adapters: a checkpoint of ours, and the same model of transformers."""

import logging
from dataclasses import dataclass
from pathlib import Path

from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import family_of_config
from neox_model.convert.families.values import whole_number
from neox_model.convert.proof import Sides
from neox_model.convert.proof.keys import check_keys
from neox_model.convert.proof.tensors import compare_tensors
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.requests import read_config
from neox_model.convert.tying import open_weights

__all__ = ["Base", "compared_base"]

logger = logging.getLogger(__name__)


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
    found = list(map(str, differences(checkpoint.model, theirs)))
    if not found:
        logger.info("comparing the base with %s", model)
        try:
            counted = check_keys(sides, files)
            compare_tokenizers(sides.tokenizers)
            rounded = compare_tensors(sides, checkpoint.model, files)
            return Base(sides, checkpoint, counted["parameters"], rounded)
        except ProofError as error:
            if error.__cause__ is not None:  # transformers cannot read the model.
                raise
            found = [str(error)]
    raise ConversionError(f"{base} is not the same model as {model}: {'; '.join(found)}; {remedy}")
