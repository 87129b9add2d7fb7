"""Write adapters of ours in the format of PEFT, for a model of transformers.

B of a matrix that they store in several parts (query, key and value) has the rows of these parts in the order
of ours; each part gets its rows of B, and the same A.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.checkpoint.adapters import Adapters
from neox_model.checkpoint.base import recorded_base
from neox_model.convert.architecture import differences
from neox_model.convert.checkpoints import Checkpoint, build_sequential
from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import Family, family_of_config
from neox_model.convert.families.family import Tensors
from neox_model.convert.families.values import whole_number
from neox_model.convert.output import folder_written_aside, refuse_existing
from neox_model.convert.proof import WHOLE_LIMIT, Sides, provenance
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.keys import check_keys
from neox_model.convert.proof.layers import compare_layers
from neox_model.convert.proof.sides import dtype_of
from neox_model.convert.proof.whole import compare_logits
from neox_model.convert.reference import (
    adapted_names,
    load_adapted_model,
    meta_model,
    require_peft,
    require_transformers,
)
from neox_model.convert.tokenizer_files import read_json, write_json
from neox_model.convert.weights import WeightFiles, Written, write_weights
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["to_peft"]

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def to_peft(
    folder: Path,
    model: Path,
    output: Path,
    *,
    base: Path | None = None,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write a checkpoint of adapters for PEFT, and prove that they change a model in the same way.

    Args:
        folder: the checkpoint of adapters.
        model: the same base as a model of transformers, in a folder.
        output: the folder to create.
        base: folder of the checkpoints of the base, if it is not where the adapters record it.
        vocab_file: the tokenizer's file, if it is not where the base records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: a checkpoint is damaged, the adapters or their base do not exist in transformers, peft is
            not installed, or the results differ.
    """
    require_transformers("neox-convert to-peft")
    require_peft("neox-convert to-peft")
    refuse_existing(output)
    adapters = Adapters(folder)
    checkpoint = Checkpoint(recorded_base(adapters.manifest, base))
    checkpoint.check_shapes()
    tokenizer = checkpoint.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    config = read_json(model / "config.json")
    family = family_of_config(config)
    _check_architecture(checkpoint, family, config, model)
    rows = whole_number(config.get("vocab_size", checkpoint.vocab_size), "vocab_size")
    exported = _Exported(adapters, checkpoint, family)
    with folder_written_aside(output) as aside:
        write_weights(aside, exported.planned(), exported.values(), single=_WEIGHTS)
        write_json(aside / _CONFIG, exported.settings(model))
        figures = Figures()
        sides = Sides(checkpoint, model, family, tokenizer, rows=rows)
        parameters = _prove(exported, sides, aside, figures)
        result = {
            "verdict": "equal",
            "class": f"LoRA of {family.class_name}",
            "tensors": len(exported.planned()),
            "parameters": sum(written.num_bytes // 4 for written in exported.planned()),
            "largest_differences": figures.plain(),
            "limit": figures.limit,
            "compared_as_a_whole": parameters <= WHOLE_LIMIT,
            "model": str(model.absolute()),
            **provenance(folder, aside, packages=("transformers", "peft")),
        }
        write_json(aside / "verification.json", result)
    return result


def _check_architecture(
    checkpoint: Checkpoint, family: Family, config: Mapping[str, Any], model: Path
) -> None:
    """Refuse a model of transformers that is not the base."""
    found = [*checkpoint.obstacles, *differences(checkpoint.architecture, family.read(config))]
    if found:
        raise ConversionError(
            f"{model} is not the base of the adapters, {checkpoint.folder}: {'; '.join(map(str, found))}; "
            "export the base with neox-convert to-hf, and pass that folder with --model"
        )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """An adapted matrix of ours, and theirs."""

    ours: str
    weight: Tensors

    @property
    def theirs(self) -> list[str]:
        """Return the names of their modules."""
        return [name.removesuffix(".weight") for name in self.weight.theirs]


class _Exported:
    """The adapters as PEFT stores them.

    Args:
        adapters: ours.
        base: their base.
        family: the class of transformers.
    """

    def __init__(self, adapters: Adapters, base: Checkpoint, family: Family) -> None:
        self.adapters, self.base, self._family = adapters, base, family
        shapes = {name: shape for name, shape in base.shapes.items() if self._is_adapted(name)}
        if len(shapes) != len(adapters.matrices):
            raise ConversionError(
                f"{adapters.folder} has adapters of matrices that {base.folder} does not have; restore it "
                "from a copy"
            )
        tensors = family.tensors(base.architecture, shapes)
        self.matrices = [_Matrix(each.ours.removesuffix(".weight"), each) for each in tensors]

    def _is_adapted(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.adapters.matrices

    @cached_property
    def is_transposed(self) -> bool:
        """Return whether their matrices are stored as input by output."""
        return any(matrix.weight.form.is_transposed for matrix in self.matrices)

    def planned(self) -> list[Written]:
        """Return names, shapes and dtypes."""
        rank = self.adapters.manifest.config["lora_rank"]
        found = []
        for matrix in self.matrices:
            for name, shape in zip(matrix.theirs, matrix.weight.theirs.values(), strict=True):
                outputs, inputs = reversed(shape) if self.is_transposed else shape
                found.append(Written(f"{_PREFIX}{name}{_A}", (rank, inputs), torch.float32))
                found.append(Written(f"{_PREFIX}{name}{_B}", (outputs, rank), torch.float32))
        return found

    def values(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the values of each tensor."""
        for matrix in self.matrices:
            a, b = self.adapters.pair(matrix.ours)
            if not bool(a.isfinite().all() and b.isfinite().all()):
                raise ConversionError(
                    f"{self.adapters.folder}: the adapter of {matrix.ours} contains values that are not "
                    "finite; export another checkpoint"
                )
            parts = matrix.weight.form.rows_to_theirs(b, self.base.architecture)
            for name, part in zip(matrix.theirs, parts, strict=True):
                yield f"{_PREFIX}{name}{_A}", [a]
                yield f"{_PREFIX}{name}{_B}", [part.contiguous()]

    def settings(self, model: Path) -> dict[str, Any]:
        """Return the contents of `adapter_config.json`."""
        recorded = self.adapters.manifest.config
        alpha = recorded["lora_alpha"]
        adapted = {matrix.ours.split(".", 2)[2] for matrix in self.matrices}
        modules = [name for row in self._family.in_layer if row.ours in adapted for name in row.theirs]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(model.absolute()),
            "inference_mode": True,
            "r": recorded["lora_rank"],
            "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
            "lora_dropout": recorded["lora_dropout"],
            # With the name of the part of the layer, because others may end with the same word.
            "target_modules": modules,
            "fan_in_fan_out": self.is_transposed,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "modules_to_save": None,
            "layers_to_transform": None,
            "init_lora_weights": True,
        }


def _prove(exported: _Exported, sides: Sides, folder: Path, figures: Figures) -> int:
    """Compare the adapters as PEFT reads them with ours; return the number of parameters of the base."""
    files = WeightFiles(sides.folder)
    counted = check_keys(sides, files)
    stored = WeightFiles(folder, single=_WEIGHTS)
    names = adapted_names(meta_model(sides.config, sides.family), folder)
    if names != {name: found.shape for name, found in stored.tensors.items()}:
        apart = sorted(names.keys() ^ stored.tensors.keys()) or sorted(names)
        raise ProofError(f"peft reads other tensors from {folder} than are stored there: {apart[0]}")
    _compare_products(exported, stored, figures)
    if counted["parameters"] <= WHOLE_LIMIT:
        theirs = load_adapted_model(sides.folder, sides.family, folder)
        compare_logits(sides, _our_model(exported, dtype_of(sides, files)), theirs, figures)
    else:
        compare_layers(sides, files, figures)
    return counted["parameters"]


def _compare_products(exported: _Exported, stored: WeightFiles, figures: Figures) -> None:
    """Compare what is added to each weight of theirs."""
    scale = exported.adapters.scale
    for matrix in exported.matrices:
        ours = exported.adapters.product(matrix.ours)
        expected = matrix.weight.form.to_theirs(ours, exported.base.architecture)
        for name, mine in zip(matrix.theirs, expected, strict=True):
            a, b = (stored.whole(f"{_PREFIX}{name}{side}").double() for side in (_A, _B))
            product = scale * (b @ a)
            there = product.t() if exported.is_transposed else product
            figures.compare("change of weights", mine, there, where=f" {name}")


def _our_model(exported: _Exported, dtype: torch.dtype) -> nn.Module:
    """Return the base, rounded to a dtype, with the adapters, in float32."""
    base, recorded = exported.base, exported.adapters.manifest.config
    config = base.resolved.config
    section = config.adapters.replaced(
        lora_rank=recorded["lora_rank"],
        lora_alpha=recorded["lora_alpha"],
        lora_target_modules=tuple(recorded["lora_target_modules"]),
    )
    model = build_sequential(base.resolved_with({"adapters": section}), base.vocab_size)
    pairs = {
        f"{name}.adapter.{side}": value
        for name in exported.adapters.matrices
        for side, value in zip("ab", exported.adapters.pair(name), strict=True)
    }
    with torch.no_grad():
        for name, parameter in named_logical_parameters(model):
            value = pairs.pop(name, None)
            parameter.copy_(base.whole(name).to(dtype) if value is None else value)
    assert not pairs, sorted(pairs)
    return model
