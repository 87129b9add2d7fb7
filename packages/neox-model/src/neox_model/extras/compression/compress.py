"""Make the compression of a run real: a checkpoint of a plain model that computes the same.

Its weights are those with which the run computes in the checkpoint's iteration: quantized values, and
zeros where weights and heads are pruned. Rows of the MLP are removed if every layer prunes as many, and
`related_modules` names all matrices that lose rows or columns with them. Heads stay, as zeros: the width of a
head follows from their number. The whole model is in memory.
"""

import logging
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from neox_config import Resolved
from neox_config.errors import ConfigError
from neox_config.extras.compression.fields import CompressionSection, PruningGroup
from neox_config.extras.compression.matrices import compressed_matrices as configured_matrices
from neox_config.extras.compression.matrices import compresses, matching
from neox_config.spec.model import ModelSpec
from neox_config.spec.resume import IN_EFFECT
from neox_config.spec.run import RunSpec
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import DamagedManifestError
from neox_model.checkpoint.logical import check_model_states, fill_model_states
from neox_model.checkpoint.names import is_score
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import Checkpoint, build_sequential
from neox_model.convert.errors import ConversionError
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import provenance
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.stored import StoredWeights
from neox_model.convert.tokenizer_files import write_json
from neox_model.convert.written_checkpoint import write_checkpoint
from neox_model.extras.compression.attach import attach_compression
from neox_model.extras.compression.matrices import Compressed, compressed_matrices
from neox_model.parallel.logical import begin_iteration, model_states, named_logical_parameters

__all__ = ["Compression", "compress", "write_plain"]

logger = logging.getLogger(__name__)

_PART = "compression_training"
# Limits of the largest difference of logits over the largest logit, by dtype of training.
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
_TOKENS = (2, 64)


def compress(folder: Path, output: Path, *, exact_inputs: bool = False) -> dict[str, Any]:
    """Write the model of a compressed run as a checkpoint of a plain one, and compare their logits.

    Args:
        folder: the checkpoint of the run.
        output: the folder to create, with `global_stepN`.
        exact_inputs: leave out the quantization of inputs, which a checkpoint cannot contain; the result then
            computes otherwise, which is not proven.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint is damaged or not compressed, has quantized inputs, or the results differ.
    """
    logger.info("reading %s", folder)
    source = Compression(folder, exact_inputs=exact_inputs)
    with folder_written_aside(output) as aside:
        written, result = write_plain(source, aside)
        result |= provenance(folder, written, packages=())
        write_json(aside / "verification.json", result)
    return result


def write_plain(source: "Compression", folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the plain model, with a checkpoint in a folder, and compare the logits of both.

    Returns:
        The checkpoint, and the figures of `verification.json`.

    Raises:
        ProofError: they differ by more than rounding.
    """
    weights, width = source.weights()
    tensors = [StreamedTensor(name, tuple(value.shape), value.dtype) for name, value in weights.items()]
    written = write_checkpoint(
        folder,
        tensors,
        lambda name: [weights[name]],
        source.recorded(width),
        iteration=source.manifest.iteration,
    )
    stored = {name: record for name, record in source.manifest.tensors.items() if name in weights}
    compressed = [weights[f"{name}.weight"] for name in source.matrices]
    zeros, numel = sum(int((value == 0).sum()) for value in compressed), sum(map(Tensor.numel, compressed))
    return written, source.compare(Checkpoint(written), width) | {
        "parameters": sum(value.numel() for value in weights.values()),
        "tensors": len(weights),
        "bytes_before": sum(
            prod(record.shape) * source.stored.dtype(name).itemsize for name, record in stored.items()
        ),
        "bytes_after": sum(value.nbytes for value in weights.values()),
        "sparsity_of_compressed_matrices": zeros / numel if numel else 0.0,
    }


class Compression:
    """A checkpoint of a compressed run, with its model, which computes as in training.

    Attributes:
        model: the whole model.
        matrices: its compressed matrices by name.
        kept: the rows of the MLP that stay, by layer; empty if all do.
    """

    def __init__(self, folder: Path, *, exact_inputs: bool) -> None:
        checkpoint = Checkpoint(folder, is_compressed=True)
        self.stored: StoredWeights = checkpoint
        self.manifest: Manifest = checkpoint.manifest
        resolved = _with_compression(checkpoint)
        if not compresses(resolved.config):
            raise ConversionError(f"{folder} was not compressed in training: {_PART} enables no part")
        self._length = min(_TOKENS[1], resolved.model.max_positions)
        self._num_layers = len(resolved.model.layers)
        self._section, self._compressible = resolved.run.compression, resolved.run.compressible
        shared = self._section.activation_quantization.shared_parameters
        if shared.enabled and not exact_inputs and self.manifest.iteration >= shared.schedule_offset:
            raise ConversionError(
                f"the model in {folder} computes with quantized inputs of matrices, which weights cannot "
                "contain; pass --exact-inputs to leave their quantization out"
            )
        self.dtype = DTYPES[checkpoint.precision]
        self.model = self._model(resolved.model, resolved.run)
        self.matrices = {matrix.name: matrix for matrix in compressed_matrices(self.model)}
        self.kept = self._kept_rows()

    def tokens(self) -> Tensor:
        """Return random tokens_BS for a comparison of logits, the same in every call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.stored.vocab_size, (_TOKENS[0], self._length), generator=generator)

    @torch.no_grad()
    def in_float32(self) -> SequentialModel:
        """Return a model with the same numbers that computes in float32.

        Quantized matrices have the levels of training, which are those of weights in its dtype. All other
        weights are as precise as the checkpoint.
        """
        model = deepcopy(self.model).float()
        for name, parameter in named_logical_parameters(model):
            if name.rpartition(".")[0] not in self.matrices and not is_score(name):
                parameter.data = self.stored.whole(name).float()
        return model

    def _model(self, spec: ModelSpec, run: RunSpec) -> SequentialModel:
        model = build_sequential(spec, run, self.stored.vocab_size)
        attach_compression(model, run, trains=False)
        for matrix in compressed_matrices(model):
            matrix.compression.inputs = None
        _fill(model, self.stored)
        model.to(self.dtype)
        states, reader = model_states(model), ShardReader(self.stored.folder, self.manifest)
        check_model_states(states, self.manifest, reader)
        fill_model_states(states, reader)
        begin_iteration(model, self.manifest.iteration)
        return model.eval()

    @torch.no_grad()
    def weights(self) -> tuple[dict[str, Tensor], int | None]:
        """Return the weights of the plain model by name, and its MLP's width if rows were removed."""
        found: dict[str, Tensor] = {}
        for name, parameter in named_logical_parameters(self.model):
            if is_score(name):
                continue
            matrix = self.matrices.get(name.rpartition(".")[0])
            values: Tensor | None
            if matrix is None:
                # Not rounded to the dtype of the computation: it is trained on.
                values = self.stored.whole(name)
            elif name.endswith(".bias"):
                values = matrix.compression.of_bias(parameter)
            else:
                values = matrix.compression.of_weight(parameter)
            assert values is not None, name
            found[name] = values.to(self.stored.dtype(name))
        width = int(next(iter(self.kept.values())).sum()) if self.kept else None
        return {name: self.without_rows(name, value) for name, value in found.items()}, width

    def without_rows(self, name: str, values: Tensor) -> Tensor:
        """Return a weight, or what belongs to each element of it, without the rows of the MLP to remove."""
        parts = name.split(".")
        keep = self.kept.get(int(parts[1])) if name.startswith("layers.") and parts[2] == "mlp" else None
        if keep is None:
            return values
        if parts[3] != "down":
            return values[keep].contiguous()
        return values[:, keep].contiguous() if parts[4] == "weight" else values

    def _kept_rows(self) -> dict[int, Tensor]:
        """Return the rows of the MLP that each layer needs; empty if not all layers can lose as many."""
        groups = configured_matrices(self._section, self._compressible)
        kept = {}
        for layer in range(self._num_layers):
            keeps = [
                self._removable(matrix, groups[name]["row_pruning"][1])
                for name, matrix in self.matrices.items()
                if name.startswith(f"layers.{layer}.mlp.") and "rows" in matrix.compression.prunings
            ]
            rows = [keep for keep in keeps if keep is not None]
            if not rows:
                return {}
            kept[layer] = torch.stack(rows).all(dim=0)
        counts = {int(keep.sum()) for keep in kept.values()}
        return {} if len(counts) != 1 or counts == {0} else kept

    def _removable(self, matrix: Compressed, group: Any) -> Tensor | None:
        """Return the rows of a matrix that are kept; None if the others must stay as zeros."""
        assert isinstance(group, PruningGroup)
        pruning = dict(matrix.compression.masks())["rows"]
        layer, kind = matrix.name.rpartition(".")[0], matrix.name.rpartition(".")[2]
        mlp = self.model.get_submodule(f"stack.{int(layer.split('.')[1]) + 1}.mlp")
        others = {"up", "gate", "down"} & {name for name, _ in mlp.named_children()}
        names = [f"{layer}.{other}" for other in sorted(others - {kind})]
        related = [pattern for listed in group.related_modules or () for pattern in listed]
        # The activation of a pruned row is that of 0; a product with a pruned row is 0.
        is_factor = kind == "up" and "gate" in others
        activation: Any = mlp.activation
        vanishes = is_factor or float(activation(torch.zeros(1))) == 0.0
        if not pruning.is_on or not vanishes or matching(related, names) != names:
            return None
        return pruning.keep[:, 0]

    def recorded(self, width: int | None) -> dict[str, Any]:
        """Return what the manifest of the plain model records."""
        config = dict(self.manifest.config)
        plain = CompressionSection()
        config[_PART] = plain.model_dump(mode="json")[_PART]
        effects = {kind: dict(values) for kind, values in config.get(IN_EFFECT, {}).items()}
        for values in effects.values():
            for label in [label for label in values if label.startswith(_PART)]:
                del values[label]
        if width is not None:
            config |= {"mlp_width": width, "intermediate_size": None, "expansion_factor": None}
            effects.setdefault("model", {})["mlp_width"] = width
        return config | {IN_EFFECT: effects}

    @torch.no_grad()
    def compare(self, plain: Checkpoint, width: int | None) -> dict[str, Any]:
        """Compare the logits of both models, computed as in training.

        Raises:
            ProofError: they differ by more than rounding.
        """
        logger.info("comparing logits")
        model = build_sequential(plain.model, plain.resolved.run, plain.vocab_size)
        _fill(model, plain)
        model.to(self.dtype).eval()
        tokens = self.tokens()
        figures = Figures(_LIMITS[self.dtype], other="the run")
        figures.compare("logits", model(tokens).double(), self.model(tokens).double())
        return {
            "class": "plain model" if width is None else f"plain model with mlp-width {width}",
            "largest_differences": figures.plain(),
            "limit": figures.limit,
        }


def _fill(model: nn.Module, weights: StoredWeights) -> None:
    for name, parameter in named_logical_parameters(model):
        parameter.data = weights.whole(name)


def _with_compression(checkpoint: Checkpoint) -> Resolved:
    """Return the recorded parameters of the model, its compression and its seed."""
    recorded, resolved = checkpoint.manifest.config, checkpoint.resolved
    try:
        section = CompressionSection.model_validate({_PART: recorded[_PART]})
        training = resolved.config.training.replaced(seed=int(recorded["seed"]))
        engine = resolved.config.engine
        if isinstance(recorded.get("eigenvalue"), dict):
            engine = engine.model_validate({"eigenvalue": recorded["eigenvalue"]})
    except (KeyError, ValidationError, ConfigError, TypeError, ValueError) as error:
        raise DamagedManifestError(f"config / {_PART}: {error}", checkpoint.folder) from error
    return resolved.replaced(compression=section, training=training, engine=engine)
