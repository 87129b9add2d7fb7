"""Write a checkpoint of ours as a model of transformers."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.model import ModelSpec
from neox_data.tokenizers import Tokenizer
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import VOCABULARY, Checkpoint
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family, fitting_family
from neox_model.convert.families.family import Tensors
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import Sides, prove
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.stored import StoredWeights
from neox_model.convert.tokenizer_files import (
    generation_settings,
    refuse_others,
    rows_to_keep,
    write_json,
    write_tokenizer,
)
from neox_model.convert.weights import chunks_alike, write_weights

__all__ = ["to_hf", "write_descriptions"]

logger = logging.getLogger(__name__)


def to_hf(
    folder: Path,
    output: Path,
    *,
    dtype: str | None = None,
    family: str | None = None,
    trim_vocab: bool = False,
    ema: bool = False,
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
        ema: write the averages of the weights instead.
        vocab_file: the tokenizer's file, if it is not where the checkpoint records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint is damaged, the model or its tokenizer does not exist in transformers, a
            value does not fit the dtype, or the written model differs.
    """
    logger.info("reading %s", folder)
    checkpoint = Checkpoint(folder, averages=ema)
    checkpoint.check_shapes()
    chosen = fitting_family(checkpoint.model, family or checkpoint.family)
    tokenizer = checkpoint.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    refuse_others(tokenizer)
    source = checkpoint.tokenizer_files(vocab_file=vocab_file).get("vocab_file")
    rows = rows_to_keep(tokenizer, checkpoint.vocab_size, trim_vocab=trim_vocab)
    shapes = {
        name: (rows, *shape[1:]) if name in VOCABULARY else shape for name, shape in checkpoint.shapes.items()
    }
    tensors = list(chosen.tensors(checkpoint.model, shapes))
    dtypes = {each.ours: checkpoint.dtype(each.ours) if dtype is None else DTYPES[dtype] for each in tensors}
    planned = _planned(chosen, tensors, dtypes)
    with folder_written_aside(output) as aside:
        write_descriptions(
            aside,
            checkpoint.model,
            checkpoint.resolved.config.model,
            chosen,
            tokenizer,
            source,
            rows=rows,
            dtype=dtypes[TOKEN_EMBEDDING],
            stops=checkpoint.stop_tokens,
        )
        sides = Sides(checkpoint, aside, chosen, tokenizer, rows=rows)
        # The proof compares them again; a difference is reported before the weights are read and written.
        compare_tokenizers(tokenizer, aside, rows=rows)
        write_weights(aside, planned, _values(checkpoint, chosen, tensors, dtypes))
        result = prove(sides, checkpoint.model, checkpoint.resolved.run, source=folder, output=aside)
        write_json(aside / "verification.json", result)
    return result


def _planned(
    family: Family, tensors: Iterable[Tensors], dtypes: Mapping[str, torch.dtype]
) -> list[StreamedTensor]:
    """Return the tensors to write, in the order of `_values`; `dtypes` are those of ours."""
    planned: dict[str, StreamedTensor] = {}
    for tensor in tensors:
        for name, (rows, *others) in tensor.theirs.items():
            whole, parts = family.joined_parts(name)
            shape = (rows * len(parts), *others)
            if family.has_columns_in_turn(whole):
                shape = (rows, *others[:-1], others[-1] * len(parts))
            planned.setdefault(whole, StreamedTensor(whole, shape, dtypes[tensor.ours]))
    return list(planned.values())


def _values(
    weights: StoredWeights,
    family: Family,
    tensors: Sequence[Tensors],
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the values of each tensor of theirs, in chunks; `dtypes` are what ours are converted to."""
    waiting: dict[str, Iterable[Tensor]] = {}
    for tensor in tensors:
        for name, chunks in zip(tensor.theirs, _chunks(weights, tensor, dtypes[tensor.ours]), strict=True):
            waiting[name] = chunks
            whole, parts = family.joined_parts(name)
            if all(part in waiting for part in parts):
                found = [waiting.pop(part) for part in parts]
                in_turn = family.has_columns_in_turn(whole)
                yield whole, _in_turn(found) if in_turn else chain.from_iterable(found)
    assert not waiting, f"parts of a tensor alone: {list(waiting)}"


def _in_turn(parts: Sequence[Iterable[Tensor]]) -> Iterator[Tensor]:
    """Yield the chunks of a tensor that has the columns of others in turn, given theirs."""
    for chunks in zip(*parts, strict=True):
        yield torch.stack(chunks, dim=-1)


def _chunks(weights: StoredWeights, tensor: Tensors, dtype: torch.dtype) -> Iterator[Iterable[Tensor]]:
    """Yield the values of each of theirs that a tensor of ours becomes, in chunks."""
    if tensor.form.is_same:
        chunks = weights.row_chunks(tensor.ours, tensor.shape[0])
        yield (_converted(weights, tensor.ours, each, dtype) for each in chunks)
        return
    for chunk in chunks_alike(weights, tensor):
        yield from ([part] for part in tensor.split(_converted(weights, tensor.ours, chunk, dtype)))


def _converted(weights: StoredWeights, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    converted = values.to(dtype)
    if bool(converted.isfinite().all()):
        return converted
    if bool(values.isfinite().all()):
        raise ConversionError(
            f"{name} has values up to {float(values.abs().max()):.3g}, which {dtype} cannot hold; pass "
            "--dtype bf16 or --dtype fp32"
        )
    raise ConversionError(
        f"{weights.folder}: {name} contains values that are not finite; export another checkpoint"
    )


def write_descriptions(
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
