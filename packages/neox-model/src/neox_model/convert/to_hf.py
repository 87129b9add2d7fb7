"""Write a checkpoint of ours as a model of transformers."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from neox_config import Resolved
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.model import ModelSpec
from neox_config.spec.run import DataType
from neox_data.tokenizers import Tokenizer
from neox_model.assembly.choices import DTYPES
from neox_model.convert.checkpoints import VOCABULARY, Checkpoint
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family, fitting_family
from neox_model.convert.families.family import Tensors
from neox_model.convert.output import folder_written_aside, refuse_existing
from neox_model.convert.proof import Sides, prove
from neox_model.convert.proof.sides import TokenizerSides
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.reference import require_transformers
from neox_model.convert.stored import StoredWeights
from neox_model.convert.tokenizer_files import (
    generation_settings,
    refuse_others,
    rows_to_keep,
    write_json,
    write_tokenizer,
)
from neox_model.convert.weights import Written, write_weights

__all__ = ["check_exportable", "to_hf"]

logger = logging.getLogger(__name__)


def to_hf(
    folder: Path,
    output: Path,
    *,
    dtype: str | None = None,
    family: str | None = None,
    trim_vocab: bool = False,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint as a model of transformers, and prove that it is the same model.

    Args:
        folder: the checkpoint.
        output: the folder to create.
        dtype: "fp32", "bf16" or "fp16"; None keeps the stored dtypes.
        family: `model_type`; None: the recorded one, or the first that fits.
        trim_vocab: leave out rows of the embedding that are padding.
        vocab_file: the tokenizer's file, if it is not where the checkpoint records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint is damaged, the model or its tokenizer does not exist in transformers, a
            value does not fit the dtype, or the written model differs.
    """
    refuse_existing(output)
    require_transformers("neox-convert to-hf")
    logger.info("reading %s", folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check_shapes()
    chosen = fitting_family(checkpoint.model, family or checkpoint.family)
    tokenizer = checkpoint.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    refuse_others(tokenizer)
    source = checkpoint.tokenizer_files(vocab_file=vocab_file).get("vocab_file")
    rows = rows_to_keep(tokenizer, checkpoint.vocab_size, trim_vocab=trim_vocab)
    if dtype is None:
        _log_stored_dtype(checkpoint.dtype(TOKEN_EMBEDDING), checkpoint.precision)
    shapes = {
        name: (rows, *shape[1:]) if name in VOCABULARY else shape for name, shape in checkpoint.shapes.items()
    }
    tensors = list(chosen.tensors(checkpoint.model, shapes))
    writer = _Writer(checkpoint, tensors, dtype=None if dtype is None else DTYPES[dtype])
    stored = checkpoint.dtype(TOKEN_EMBEDDING) if dtype is None else DTYPES[dtype]
    with folder_written_aside(output) as aside:
        _write_descriptions(
            aside,
            checkpoint.model,
            checkpoint.resolved.config.model,
            chosen,
            tokenizer,
            source,
            rows=rows,
            dtype=stored,
            stops=checkpoint.stop_tokens,
        )
        sides = Sides(checkpoint, aside, chosen, tokenizer, rows=rows)
        # The proof compares them again; a difference is reported before the weights are read and written.
        compare_tokenizers(sides.tokenizers)
        write_weights(aside, writer.planned(), writer.values())
        result = prove(sides, checkpoint.model, checkpoint.resolved.run, source=folder, output=aside)
        write_json(aside / "verification.json", result)
    return result


def _log_stored_dtype(stored: torch.dtype, precision: DataType) -> None:
    """Say which type is written if it is larger than the one that the training computed in."""
    computed = DTYPES[precision]
    if stored.itemsize > computed.itemsize:
        logger.info(
            "writing %s, in which the checkpoint stores the weights; the training computed in %s, which "
            "--dtype %s writes, in half the bytes",
            *(str(each).removeprefix("torch.") for each in (stored, computed)),
            precision,
        )


class _Writer:
    """The tensors to write, in the order of the model.

    Args:
        weights: the source.
        tensors: ours with theirs.
        dtype: dtype to convert to; None keeps each.
    """

    def __init__(
        self, weights: StoredWeights, tensors: Sequence[Tensors], *, dtype: torch.dtype | None
    ) -> None:
        self._weights, self._tensors, self._dtype = weights, tensors, dtype

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        return self._dtype or self._weights.dtype(name)

    def planned(self) -> list[Written]:
        """Return names, shapes and dtypes."""
        return [
            Written(name, shape, self.dtype_of(tensor.ours))
            for tensor in self._tensors
            for name, shape in tensor.theirs.items()
        ]

    def values(self) -> Iterator[tuple[str, Iterable[Tensor]]]:
        """Yield the values of each tensor, in chunks."""
        for tensor in self._tensors:
            if tensor.form.is_same:
                (name,) = tensor.theirs
                yield name, self._chunks(tensor)
                continue
            whole = self._converted(tensor.ours, self._weights.whole(tensor.ours))
            parts = tensor.split(whole)
            del whole
            for name, part in zip(tensor.theirs, parts, strict=True):
                yield name, [part]

    def _chunks(self, tensor: Tensors) -> Iterator[Tensor]:
        for chunk in self._weights.row_chunks(tensor.ours, tensor.shape[0]):
            yield self._converted(tensor.ours, chunk)

    def _converted(self, name: str, values: Tensor) -> Tensor:
        converted = values.to(self.dtype_of(name))
        if bool(converted.isfinite().all()):
            return converted
        if bool(values.isfinite().all()):
            raise ConversionError(
                f"{name} has values up to {float(values.abs().max()):.3g}, which {converted.dtype} cannot "
                "hold; pass --dtype bf16 or --dtype fp32"
            )
        raise ConversionError(
            f"{self._weights.folder}: {name} contains values that are not finite; export another checkpoint"
        )


def check_exportable(resolved: Resolved, tokenizer: Tokenizer) -> None:
    """Check that a model can be exported after its training: its class, and its tokenizer.

    Raises:
        NeoXError: transformers has no such model or tokenizer.
    """
    family = fitting_family(resolved.model, resolved.config.checkpoint.hf_family)
    refuse_others(tokenizer)
    rows = resolved.model.embedding.entries(tokenizer.vocab_size)
    source = resolved.config.tokenizer.vocab_file
    with TemporaryDirectory() as folder:
        _write_descriptions(
            Path(folder),
            resolved.model,
            resolved.config.model,
            family,
            tokenizer,
            None if source is None else Path(source),
            rows=rows,
            dtype=torch.float32,
            stops=resolved.config.generation.stop_tokens,
        )
        compare_tokenizers(TokenizerSides(tokenizer, Path(folder), rows))


def _write_descriptions(
    folder: Path,
    spec: ModelSpec,
    section: ModelSection,
    family: Family,
    tokenizer: Tokenizer,
    vocab_file: Path | None,
    *,
    rows: int,
    dtype: torch.dtype,
    stops: Sequence[int],
) -> None:
    """Write all of a model of transformers but its weights.

    Args:
        folder: the folder to write to.
        spec: the model.
        section: its parameters, for the dropouts.
        family: its class.
        tokenizer: its tokenizer.
        vocab_file: the tokenizer's file.
        rows: entries of the vocabulary.
        dtype: of the weights.
        stops: the tokens that end a text, as end-of-document does.
    """
    generation = generation_settings(tokenizer, vocab_file, stops)
    dropouts = {theirs: getattr(section, ours.replace("-", "_")) for ours, theirs in family.dropouts.items()}
    config = {
        **family.write(spec),
        **dropouts,
        "vocab_size": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": generation.get("bos_token_id"),
        "eos_token_id": generation["eos_token_id"],
        "pad_token_id": generation.get("pad_token_id"),
        "use_cache": True,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(tokenizer, vocab_file, folder, max_positions=spec.max_positions)
