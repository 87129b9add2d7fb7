"""Write a model with quantized weights for transformers, with packed integers in place of weights.

The format is `pack-quantized` of compressed-tensors: a matrix is a `weight_packed` of whole numbers with the
bits of training, next to each other in int32, a `weight_scale` per row or per run of a row, and a
`weight_shape`. Masked weights are 0.
"""

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import Checkpoint
from neox_model.convert.errors import ConversionError
from neox_model.convert.families import Family, fitting_family
from neox_model.convert.families.family import Tensors
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import provenance
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.reference import computed, linear_names, load_model, pack_integers, require_packing
from neox_model.convert.to_hf import to_hf
from neox_model.convert.tokenizer_files import read_json, write_json
from neox_model.convert.weights import WeightFiles, write_weights
from neox_model.extras.compression.compress import Compression, write_plain
from neox_model.extras.compression.matrices import Compressed

__all__ = ["write_packed"]

logger = logging.getLogger(__name__)

# One bit has the three numbers -1, 0 and 1.
_FEWEST_BITS = 2
_MOST_BITS = 8


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed matrix of transformers; `columns` share a scale (0: one scale for each row)."""

    bits: int
    columns: int
    numbers: Tensor
    scales: Tensor

    def tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what is stored, given the name of the weight."""
        yield f"{name}_packed", pack_integers(self.numbers.to(torch.int8), self.bits)
        yield f"{name}_scale", self.scales
        yield f"{name}_shape", torch.tensor(self.numbers.shape, dtype=torch.int64)


def write_packed(
    folder: Path,
    output: Path,
    *,
    exact_inputs: bool = False,
    family: str | None = None,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
) -> dict[str, Any]:
    """Write the model of a compressed run for transformers, with packed weights, and prove it.

    Args:
        folder: the checkpoint of the run.
        output: the folder to create.
        exact_inputs: leave out the quantization of inputs.
        family: `model_type`; None: the recorded one, or the first that fits.
        vocab_file: the tokenizer's file, if it is not where the checkpoint records it.
        merge_file: its second file.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint cannot be written as a plain model of transformers, its weights are not
            quantized in a form that can be packed, or the logits differ.
    """
    require_packing("neox-convert compress --packed")
    logger.info("reading %s", folder)
    source = Compression(folder, exact_inputs=exact_inputs)
    Checkpoint(folder, is_compressed=True).tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    with folder_written_aside(output) as aside:
        with tempfile.TemporaryDirectory(dir=aside) as scratch:
            plain_folder, exported = Path(scratch) / "plain", Path(scratch) / "exported"
            plain_folder.mkdir()
            latest, sizes = write_plain(source, plain_folder)
            to_hf(latest, exported, family=family, vocab_file=vocab_file, merge_file=merge_file)
            plain = Checkpoint(latest)
            chosen = fitting_family(plain.model, family or plain.family)
            tensors, linear = chosen.tensors(plain.model, plain.shapes), linear_names(exported, chosen)
            packed = dict(_packed_matrices(source, tensors, linear, chosen))
            _write(exported, aside, packed)
        files, numbers = WeightFiles(aside), [matrix.numbers.numel() for matrix in packed.values()]
        parts = [name for name in files.tensors if name.rpartition("_")[0] in packed]
        result = _compare(source, aside, chosen) | {
            "bytes_before": sizes["bytes_before"],
            "bytes_after": sum(file.stat().st_size for file in aside.glob("*.safetensors")),
            "packed_matrices": len(packed),
            "bytes_of_packed_matrices": [
                sum(numbers) * torch.float32.itemsize,
                sum(files.whole(name).nbytes for name in parts),
            ],
        }
        same = ("tensors", "parameters", "sparsity_of_compressed_matrices")
        result |= {name: sizes[name] for name in same}
        result |= provenance(folder, aside, packages=("transformers", "compressed_tensors"))
        write_json(aside / "verification.json", result)
    return result


def _packed_matrices(
    source: Compression, tensors: Iterable[Tensors], linear: set[str], family: Family
) -> Iterator[tuple[str, _Packed]]:
    """Yield the packed matrices by the name of the weight in transformers."""
    for tensor in tensors:
        matrix = source.matrices.get(tensor.ours.removesuffix(".weight"))
        if matrix is None or matrix.compression.quantizer is None or not tensor.ours.endswith(".weight"):
            continue
        bits, columns, numbers, steps = _numbers(source, matrix)
        forms = [tensor.split(values) for values in (numbers, steps)]
        for name, part, step in zip(tensor.theirs, *forms, strict=True):
            if name not in linear:
                raise ConversionError(
                    f"{name} is not a Linear in {family.class_name}, and compressed-tensors packs these "
                    "alone; choose another class with --family, or leave --packed out"
                )
            scales = step[:, ::columns] if columns else step[:, :1]
            if not torch.equal(scales.repeat_interleave(step.shape[1] // scales.shape[1], dim=1), step):
                raise ConversionError(f"the scales of {name} do not follow its rows; leave --packed out")
            yield name, _Packed(bits, columns, part.contiguous(), scales.contiguous())


def _numbers(source: Compression, matrix: Compressed) -> tuple[int, int, Tensor, Tensor]:
    """Return the bits and columns of a matrix's packing, its whole numbers, and the step of each."""
    compression, name = matrix.compression, matrix.name
    quantizer = compression.quantizer
    assert quantizer is not None
    bits = quantizer.bits
    if bits is None or bits > _MOST_BITS or quantizer.share < 1.0 or not quantizer.is_symmetric:
        raise ConversionError(
            f"the weights of {name} cannot be packed: in this iteration they must all be quantized, with "
            f"symmetric levels of at most {_MOST_BITS} bits; leave --packed out"
        )
    columns, size = matrix.logical.shape[1], quantizer.group_size
    numbers, steps = quantizer.levels(matrix.module.weight.detach())
    with torch.no_grad():
        for _, pruning in compression.masks():
            numbers = pruning(numbers)
    numbers, steps = (source.without_rows(f"{name}.weight", values) for values in (numbers, steps))
    if numbers.shape[1] != columns and size % columns:
        raise ConversionError(
            f"columns of {name} are removed, and its groups are parts of rows; leave --packed out"
        )
    # The longest runs of a row that are in one group each.
    run = gcd(size, columns)
    return max(_FEWEST_BITS, bits), 0 if run == columns else run, numbers, steps


def _write(exported: Path, aside: Path, packed: Mapping[str, _Packed]) -> None:
    """Write the exported model with packed matrices in place of theirs."""
    files = WeightFiles(exported)
    stored = {name: dict(matrix.tensors(name)) for name, matrix in packed.items()}
    planned = [
        StreamedTensor(part, tuple(value.shape), value.dtype)
        for name, whole in files.tensors.items()
        for part, value in stored.get(name, {name: whole}).items()
    ]
    contents = (
        (part, [value])
        for name in files.tensors
        for part, value in (stored[name] if name in stored else {name: files.whole(name)}).items()
    )
    write_weights(aside, planned, contents)
    for file in sorted(exported.iterdir()):
        if not file.name.startswith(("model.safetensors", "model-", "verification")):
            (aside / file.name).write_bytes(file.read_bytes())
    config = read_json(aside / "config.json")
    write_json(aside / "config.json", config | {"quantization_config": _description(packed)})


def _description(packed: Mapping[str, _Packed]) -> dict[str, Any]:
    """Return what config.json states of the packed matrices."""
    members: dict[tuple[int, int], list[str]] = {}
    for name, matrix in packed.items():
        members.setdefault((matrix.bits, matrix.columns), []).append(name.removesuffix(".weight"))
    groups = {
        f"group_{number}": {
            "targets": names,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": True,
                "strategy": "group" if columns else "channel",
                "group_size": columns or None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
        for number, ((bits, columns), names) in enumerate(members.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


@torch.no_grad()
def _compare(source: Compression, folder: Path, family: Family) -> dict[str, Any]:
    """Compare the logits that transformers computes with those of the run's numbers, in float32."""
    logger.info("comparing logits")
    tokens_BS = source.tokens()
    expected = source.in_float32()(tokens_BS)
    found = computed(load_model(folder, family), tokens_BS, use_cache=False).logits
    figures = Figures()
    figures.compare("logits", expected, found)
    return {
        "class": f"{family.class_name} with packed weights",
        "largest_differences": figures.plain(),
        "limit": figures.limit,
    }
