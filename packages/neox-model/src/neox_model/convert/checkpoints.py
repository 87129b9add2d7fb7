"""Our side of a conversion: a checkpoint that is read tensor by tensor, and its model."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from neox_config.derive.tokenizer import tokenizer_files
from neox_config.errors import ConfigError
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.schema.sections.attention import AttentionSection
from neox_config.schema.sections.checkpoint import CheckpointSection, HfFamily
from neox_config.schema.sections.generation import GenerationSection
from neox_config.schema.sections.model import ModelSection
from neox_config.spec.model import ModelSpec
from neox_config.spec.recorded import fusions_off, model_of
from neox_config.spec.resume import recorded_effects
from neox_config.spec.run import DataType, RunSpec
from neox_data.errors import TokenizerError
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.model import build_plan
from neox_model.checkpoint.errors import DamagedManifestError
from neox_model.checkpoint.names import in_model_order, model_state_name
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import lookup
from neox_model.convert.stored import StoredWeights
from neox_model.convert.weights import HEAD
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import model_states, named_logical_parameters

__all__ = [
    "VOCABULARY",
    "Checkpoint",
    "build_sequential",
    "load_into",
    "model_parameters",
    "tensor_shapes",
]

logger = logging.getLogger(__name__)

VOCABULARY = (TOKEN_EMBEDDING, HEAD)
"""Weights with one row per entry of the vocabulary."""


class Checkpoint(StoredWeights):
    """One checkpoint of ours: its model, its weights and its tokenizer.

    Args:
        folder: its folder (SAVE/global_step100).
        is_compressed: accept a run with `compression_training`, whose weights are not all that its model
            computes with.
        averages: read the averages of the weights instead.

    Attributes:
        resolved: the parameters of the model that it records; all others have their defaults.

    Raises:
        CheckpointError: it is damaged.
        ConversionError: its parameters are not those of a model of this version.
    """

    def __init__(self, folder: Path, *, is_compressed: bool = False, averages: bool = False) -> None:
        super().__init__(folder, averages=averages)
        if not is_compressed and _was_compressed(self.manifest.config):
            raise ConversionError(
                f"{folder} was trained with compression_training, and its model does not compute with these "
                "weights; write those with which it computes with neox-convert compress, and pass that folder"
            )
        if self.manifest.config.get("lora_rank"):
            raise ConversionError(
                f"{folder} contains low-rank adapters alone; export them with neox-convert to-peft, or merge "
                "them into their base with neox-checkpoint merge and pass the merged checkpoint"
            )
        try:
            self._in_effect = recorded_effects(self.manifest.config)
        except ConfigError as error:
            raise DamagedManifestError(f"config / {error}", folder) from error
        try:
            self.resolved = model_of(self.manifest.config)
        except (ValidationError, ConfigError) as error:
            raise _of_another_version(folder, error) from error

    @property
    def model(self) -> ModelSpec:
        """Return the model."""
        return self.resolved.model

    @property
    def precision(self) -> DataType:
        """Return the precision of the run's activations."""
        recorded: Any = self._in_effect.get("training", {}).get("precision")
        return recorded if recorded in get_args(DataType) else "fp32"

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the recorded `stop_tokens`: ids of tokens that end a text, as end-of-document does.

        Raises:
            ConversionError: the record is not a list of ids.
        """
        found: tuple[int, ...] = self._recorded(GenerationSection, "stop_tokens")
        return found

    @property
    def family(self) -> HfFamily | None:
        """Return the recorded `hf_family`, the `model_type` to export as; None if none is recorded.

        Raises:
            ConversionError: the record is none of our classes.
        """
        found: HfFamily | None = self._recorded(CheckpointSection, "hf_family")
        return found

    def _recorded(self, section: type[BaseModel], name: str) -> Any:
        """Return a recorded parameter; of a version that recorded none, its default."""
        config = self.manifest.config
        try:
            return getattr(section.model_validate({name: config[name]} if name in config else {}), name)
        except ValidationError as error:
            raise _of_another_version(self.folder, error) from error

    def check_shapes(self) -> None:
        """Check that the weights are those of the recorded model.

        Raises:
            ConversionError: a weight is missing, additional or of another shape.
        """
        expected, stored = tensor_shapes(self.model, self.resolved.run, self.vocab_size), self.shapes
        for name in in_model_order(expected.keys() | stored.keys()):
            there, here = (names.get(name, "none") for names in (stored, expected))
            if there != here:
                raise ConversionError(
                    f"{self.folder}: {name} has the shape {there}, and in the model that it records {here}; "
                    "save it again"
                )

    def tokenizer(
        self,
        *,
        vocab_file: Path | None = None,
        merge_file: Path | None = None,
        options: str = "--vocab-file (and --merge-file)",
    ) -> Tokenizer:
        """Load the tokenizer that the checkpoint was trained with.

        Args:
            vocab_file: replaces the recorded file.
            merge_file: replaces the recorded file.
            options: what these are called where they are given, for messages.

        Raises:
            ConversionError: its files are missing, or are not those of the run.
        """
        files = self.tokenizer_files(vocab_file=vocab_file, merge_file=merge_file)
        kind = self.resolved.config.tokenizer.tokenizer_type
        try:
            found = build_tokenizer(kind, **files)
        except TokenizerError as error:
            raise ConversionError(
                f"the tokenizer that {self.folder} records cannot be loaded: {error}; pass {options}"
            ) from error
        if self._fingerprint not in (None, f"sha256 {found.fingerprint[:16]}"):
            raise ConversionError(
                f"{files.get('vocab_file')} is not the tokenizer that {self.folder} was trained with; pass "
                f"that with {options}"
            )
        recorded = tokenizer_files(self.resolved.config.tokenizer).get("vocab_file")
        if vocab_file is None and recorded is not None and files["vocab_file"] != Path(recorded):
            logger.warning(
                "the tokenizer that the checkpoint records, %s, is not there; using the same tokenizer in %s",
                *(recorded, files["vocab_file"]),
            )
        return found

    def tokenizer_files(
        self, *, vocab_file: Path | None = None, merge_file: Path | None = None
    ) -> dict[str, Path]:
        """Return the tokenizer's files by parameter: those that are given, or recorded.

        Recorded files that do not exist are looked for with the checkpoint, because its folder may have been
        moved with them; they are used only if their fingerprint is recorded, so that it can be compared.

        Args:
            vocab_file: replaces the recorded file.
            merge_file: replaces the recorded file.
        """
        recorded = {
            name: Path(path) for name, path in tokenizer_files(self.resolved.config.tokenizer).items()
        }
        if self._fingerprint is not None:
            here = self.folder.absolute()
            for name, path in recorded.items():
                # `neox-launch init` writes it to the folder above that of the checkpoints.
                places = (path, *(folder / path.name for folder in (here.parent, here, here.parent.parent)))
                recorded[name] = next((place for place in places if os.path.exists(place)), path)
        given = {"vocab_file": vocab_file, "merge_file": merge_file}
        return recorded | {name: path for name, path in given.items() if path is not None}

    def tokenizer_settings(self, vocab_file: Path | None, merge_file: Path | None) -> dict[str, str]:
        """Return the parameters of the tokenizer, as in a file; the arguments are those of `tokenizer`."""
        given, section = {"vocab_file": vocab_file, "merge_file": merge_file}, self.resolved.config.tokenizer
        files = tokenizer_files(section) | {name: path for name, path in given.items() if path}
        paths = {name.replace("_", "-"): Path(path) for name, path in files.items()}
        # What is no file here is a name in the hub of models.
        found = {name: str(path.absolute() if path.exists() else path) for name, path in paths.items()}
        return {"tokenizer-type": section.tokenizer_type, **found}

    @property
    def _fingerprint(self) -> str | None:
        recorded: str | None = self._in_effect.get("model", {}).get("vocab_file")
        return recorded


def _was_compressed(recorded: Mapping[str, Any]) -> bool:
    """Return True if a run quantized or pruned weights, or quantized inputs."""
    parts = recorded.get("compression_training")
    names = parts if isinstance(parts, Mapping) else ()
    return any(lookup(recorded, f"compression_training.{name}.shared_parameters.enabled") for name in names)


def _of_another_version(folder: Path, error: Exception) -> ConversionError:
    return ConversionError(
        f"{folder} was written by another version, whose parameters this one cannot read: {error}; convert "
        "it with that version"
    )


def model_parameters(*sections: ModelSection | AttentionSection) -> dict[str, Any]:
    """Return the parameters of the model that have not their default, with their names in files."""
    found: dict[str, Any] = {}
    for section in sections:
        found |= section.model_dump(mode="json", exclude_defaults=True, exclude=set(fusions_off(section)))
    return {name.replace("_", "-"): value for name, value in found.items()}


def tensor_shapes(spec: ModelSpec, run: RunSpec, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights by name, in the order of the model.

    Args:
        spec: the model.
        run: how it runs.
        vocab_size: rows of the token embedding.
    """
    model = build_sequential(spec, run, vocab_size, device="meta")
    shapes = {
        name: tuple(parameter.logical.shape)  # type: ignore[attr-defined]
        for name, parameter in named_logical_parameters(model)
    }
    return {name: shapes[name] for name in in_model_order(shapes)}


def build_sequential(
    spec: ModelSpec, run: RunSpec, vocab_size: int, *, device: torch.device | str = "cpu"
) -> SequentialModel:
    """Return the whole model with uninitialized weights, for evaluation.

    Args:
        spec: the model.
        run: how it runs.
        vocab_size: rows of the token embedding.
        device: where its weights are.
    """
    plain = replace(spec, embedding=replace(spec.embedding, multiple=1))
    # Operators that compute in every data type, because callers choose one, or several.
    run = replace(run, precision=replace(run.precision, weights="fp64"))
    plan = build_plan(plain, run, SINGLE_PROCESS, vocab_size=vocab_size)
    with torch.device(device):
        model = SequentialModel(plan, loss_fn=_no_loss)
    return model.eval()


def _no_loss(*arguments: Any) -> Tensor:
    raise AssertionError("a converted model is not trained")


def load_into(model: nn.Module, weights: StoredWeights, dtype: torch.dtype) -> None:
    """Fill a model with the weights of a checkpoint, rounded to a dtype, and with its biases of experts."""
    for name, parameter in named_logical_parameters(model):
        parameter.data.copy_(weights.whole(name).to(dtype))
    for state in model_states(model):
        state.values.copy_(weights.whole(model_state_name(state.name)))
