"""Write a model of transformers as a checkpoint of ours, with a configuration."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config import Text, load_config, resolve
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.pluralize import pluralize
from neox_config.spec.write_model import settings_of
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import VOCABULARY, Checkpoint, tensor_shapes
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family, family_of_config
from neox_model.convert.families.family import Tensors
from neox_model.convert.families.values import number
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import Sides, prove
from neox_model.convert.proof.tokens import compare_tokenizers
from neox_model.convert.requests import check_model
from neox_model.convert.tokenizer_files import (
    TOKENIZER,
    FoundTokenizer,
    copy_tokenizer,
    find_tokenizer,
    padding_multiple,
    rows_to_keep,
    stop_tokens,
    write_json,
)
from neox_model.convert.weights import HEAD, PRECISIONS, WeightFiles, chunks_of_ours, open_weights
from neox_model.convert.written_checkpoint import recorded_config, write_checkpoint
from neox_model.convert.yaml_file import CONFIGURATION, write_settings

__all__ = ["HuggingFaceModel", "Reader", "from_hf", "open_hf"]

logger = logging.getLogger(__name__)


def from_hf(
    folder: Path, output: Path, *, trim_vocab: bool = False, tokenizer_as_stored: bool = False
) -> dict[str, Any]:
    """Write a model of transformers as a checkpoint, and prove that it is the same model.

    Args:
        folder: with `config.json`, weights and tokenizer.
        output: the folder to create: `latest`, `global_step0`, `model.yml` and the tokenizer's files.
        trim_vocab: leave out rows of the embedding without an entry in the tokenizer.
        tokenizer_as_stored: use tokenizer.json even if transformers replaces parts of it.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the model cannot be read or built, or the written one differs.
    """
    logger.info("reading %s", folder)
    found = open_hf(folder, trim_vocab=trim_vocab)
    if tokenizer_as_stored and TOKENIZER not in [path.name for path in found.tokenizer.files.values()]:
        raise ConversionError(
            f"{folder} contains no {TOKENIZER}, which --tokenizer-as-stored uses; leave it out"
        )
    settings, tokenizer = found.settings(output.absolute()), found.tokenizer.tokenizer
    stops = [f"{tokenizer.decode([token])!r} ({token})" for token in settings.get("stop-tokens", [])]
    others = f"; generated texts also end at {', '.join(stops)} (stop-tokens)" if stops else ""
    end = tokenizer.end_of_document
    logger.info("end-of-document is %r (%d)%s", tokenizer.decode([end]), end, others)
    # The proof compares them again; a difference is reported before the weights are read and written.
    compare_tokenizers(tokenizer, folder, rows=found.rows, as_stored=tokenizer_as_stored)
    with folder_written_aside(output) as aside:
        copy_tokenizer(folder, aside, with_generation=True)
        write_settings(aside / CONFIGURATION, settings, source=folder, output=output.absolute())
        checkpoint = Checkpoint(_write_checkpoint(aside, found))
        sides = Sides(
            checkpoint, folder, found.family, tokenizer, rows=found.rows, as_stored=tokenizer_as_stored
        )
        result = prove(
            sides, checkpoint.model, checkpoint.resolved.run, source=folder, output=checkpoint.folder
        )
        write_json(aside / "verification.json", result)
    logger.info("%s trains the model", output / CONFIGURATION)
    return result


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A model of transformers in a folder, whose weights are read later.

    Args:
        folder: its folder.
        config: the contents of `config.json`.
        family: its class.
        parameters: ours of the model.
        tokenizer: its tokenizer.
        reader: reads its weights as ours.
        rows: rows of our token embedding.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    parameters: Mapping[str, Any]
    tokenizer: FoundTokenizer
    reader: "Reader"
    rows: int

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return our parameters of the model, its class, its dropouts and its tokenizer.

        Args:
            folder: has the tokenizer's files.
        """
        values = {name: number(self.config.get(name) or 0.0, name) for name in self.family.dropouts.values()}
        dropouts = {"hidden-dropout": 0.0, "attention-dropout": 0.0}
        dropouts |= {ours: values[theirs] for ours, theirs in self.family.dropouts.items()}
        tokenizer = self.tokenizer.tokenizer
        entries = tokenizer.vocab_size
        stops = stop_tokens(self.folder, self.config, tokenizer)
        return {
            **self.parameters,
            # The class has no other choice in training.
            **({"moe-router-type": "topk"} if "moe-num-experts" in self.parameters else {}),
            **dropouts,
            "precision": self.reader.precision,
            "make-vocab-size-divisible-by": padding_multiple(entries, self.rows),
            "hf-family": self.family.name,
            **self.tokenizer.settings(folder),
            **({"stop-tokens": stops} if stops else {}),
        }


def open_hf(folder: Path, *, trim_vocab: bool = False) -> HuggingFaceModel:
    """Read the descriptions of a model of transformers, and compare its output projection with its embedding.

    Args:
        folder: with `config.json`, weights and tokenizer.
        trim_vocab: leave out rows of the embedding without an entry in the tokenizer.

    Raises:
        NeoXError: the model cannot be read.
    """
    config = check_model(folder)
    family = family_of_config(config)
    stated, tokenizer = family.read(config), find_tokenizer(folder)
    files, model = open_weights(folder, family, stated)
    if model.is_tied != stated.is_tied:
        logger.warning(
            "%s has tie_word_embeddings: true, but %s is stored with other values than %s, so the model is "
            "not tied (no-weight-tying: true), as in transformers",
            folder / "config.json",
            family.weight_outside(HEAD),
            family.weight_outside(TOKEN_EMBEDDING),
        )
    reader = Reader(family, files)
    rows = rows_to_keep(tokenizer.tokenizer, reader.rows_of_vocabulary, trim_vocab=trim_vocab)
    return HuggingFaceModel(folder, config, family, settings_of(model), tokenizer, reader, rows)


class Reader:
    """The tensors of a folder, as ours.

    Args:
        family: the class.
        files: the stored tensors.
    """

    def __init__(self, family: Family, files: WeightFiles) -> None:
        self._family, self._files = family, files

    @property
    def rows_of_vocabulary(self) -> int:
        """Return the rows of the stored token embedding.

        Raises:
            ConversionError: there is none.
        """
        name = self._stored(self._family.weight_outside(TOKEN_EMBEDDING))
        return sum(self._files.tensors[name].shape[:1])

    @property
    def precision(self) -> str:
        """Return the precision to train in: that of most stored elements."""
        dtypes = [stored.dtype for stored in self._files.tensors.values()]
        return PRECISIONS.get(max(set(dtypes), key=dtypes.count), "fp32")

    def plan(self, tensors: Iterable[Tensors]) -> list[Tensors]:
        """Return our tensors with theirs; each of theirs is stored with the shape that ours requires.

        Raises:
            ConversionError: one is missing or has another shape or dtypes, or one would not be used.
        """
        stored = [replace(tensor, theirs=self._stored_parts(tensor)) for tensor in tensors]
        used = {self._files.whole_name(name) for tensor in stored for name in tensor.theirs}
        unused = self._files.tensors.keys() - used
        extra = sorted(name for name in unused if not self._family.is_ignored(name))
        if extra:
            raise ConversionError(
                f"{self._files.folder} contains {', '.join(extra[:5])} (of "
                f"{pluralize(len(extra), 'tensor')}) that {self._family.class_name} with this config.json "
                "does not have; use the config.json of these weights, or load the model with transformers "
                "and save it again, which leaves them out"
            )
        return stored

    def _stored(self, name: str) -> str:
        found = self._files.find(self._family, name)
        if found is None:
            raise ConversionError(
                f"{self._files.folder} does not contain {name}; copy the folder again, or save the model "
                "itself, if its names begin with that of a module around it "
                "(model.module.save_pretrained(DIR))"
            )
        return found

    def _stored_parts(self, tensor: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the stored names of a tensor's parts, with the shapes that are read."""
        names = {self._stored(name): shape for name, shape in tensor.theirs.items()}
        for name, shape in names.items():
            there = self._files.shape(name)
            is_longer = tensor.ours in VOCABULARY and there[1:] == shape[1:] and there[0] >= shape[0]
            if there != shape and not is_longer:
                raise ConversionError(
                    f"{self._files.folder}: {name} has the shape {there}, but config.json requires {shape}; "
                    "copy the folder again"
                )
        return names

    def dtype(self, tensor: Tensors) -> torch.dtype:
        """Return the dtype that holds all values of a tensor's parts, which may have several."""
        return reduce(torch.promote_types, (self._files.dtype(name) for name in tensor.theirs))

    def chunks(self, tensor: Tensors) -> Iterator[Tensor]:
        """Yield the values of a tensor of ours, in row-major order.

        Raises:
            ConversionError: a value is not finite.
        """
        for chunk in chunks_of_ours(self._files, tensor, list(tensor.theirs)):
            yield self._finite(tensor, chunk)

    def _finite(self, tensor: Tensors, values: Tensor) -> Tensor:
        if bool(values.isfinite().all()):
            return values
        raise ConversionError(
            f"{self._files.folder}: {', '.join(tensor.theirs)} contains values that are not finite, as after "
            "a run that diverged; pass another checkpoint of the model"
        )


def _write_checkpoint(aside: Path, found: HuggingFaceModel) -> Path:
    """Write `global_step0` and `latest` for the written configuration, and return the checkpoint's folder."""
    # Problems of the written configuration are those of config.json, because it is removed.
    text = (aside / CONFIGURATION).read_text(encoding="utf-8")
    named = Text(text, str(found.folder / "config.json"), has_lines=False)
    resolved, reader = resolve(load_config([], texts=[named]), devices=1), found.reader
    shapes = tensor_shapes(resolved.model, resolved.run, found.rows)
    tensors = found.family.tensors(resolved.model, shapes)
    plan = {tensor.ours: tensor for tensor in reader.plan(tensors)}
    streamed = [StreamedTensor(name, tensor.shape, reader.dtype(tensor)) for name, tensor in plan.items()]
    config = recorded_config(resolved, found.tokenizer.tokenizer)
    return write_checkpoint(aside, streamed, lambda name: reader.chunks(plan[name]), config)
