"""The base of adapters: a checkpoint of ours, and the same model of transformers."""

from pathlib import Path

from neox_model.convert.architecture import differences
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import family_of_config
from neox_model.convert.families.values import whole_number
from neox_model.convert.proof import Sides
from neox_model.convert.requests import read_config

__all__ = ["sides_of_base"]


def sides_of_base(
    base: Path, model: Path, *, vocab_file: Path | None = None, merge_file: Path | None = None
) -> Sides:
    """Return both sides of a base, whose options are the same.

    Args:
        base: its checkpoint.
        model: its folder as a model of transformers.
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
    found = [*checkpoint.obstacles, *differences(checkpoint.architecture, family.read(config))]
    if found:
        raise ConversionError(
            f"{model} is not the base of the adapters, {base}: {'; '.join(map(str, found))}; export the base "
            "with neox-convert to-hf, and pass that folder with --model"
        )
    rows = whole_number(config.get("vocab_size", checkpoint.vocab_size), "vocab_size")
    return Sides(checkpoint, model, family, tokenizer, rows=rows)
