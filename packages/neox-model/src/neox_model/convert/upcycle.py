"""Write a dense checkpoint as one of a model with experts that computes the same.

Every expert is a copy of the feed-forward block, or with a granularity G one of its G slices of channels.
The router has one row for all slices of a copy, so that they have the same score, and the chosen experts are
whole copies. The weights of the chosen experts add up to 1, and each slice has 1 / G of them: its output
matrix is times G. With a power of two, that rounds nothing.

Sources: arXiv:2212.05055; arXiv:2410.07524, with the factor at one matrix, because that of a matrix before
the activation would change what it computes.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox_config import Resolved, Text, load_config, resolve
from neox_config.pluralize import pluralize
from neox_config.spec.model import MLP
from neox_model.assembly.choices import DTYPES
from neox_model.checkpoint.stream import StreamedTensor
from neox_model.convert.checkpoints import (
    Checkpoint,
    build_sequential,
    load_into,
    model_parameters,
    tensor_shapes,
)
from neox_model.convert.errors import ConversionError
from neox_model.convert.output import folder_written_aside
from neox_model.convert.proof import WHOLE_LIMIT, provenance
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.layers import OneLayer
from neox_model.convert.tokenizer_files import write_json
from neox_model.convert.written_checkpoint import recorded_config, write_checkpoint
from neox_model.convert.yaml_file import CONFIGURATION, write_settings
from neox_model.parallel.logical import named_logical_parameters
from neox_model.parallel.random import mixed_seed

__all__ = ["Split", "upcycle"]

logger = logging.getLogger(__name__)

_EXPERTS, _ROUTER = ".mlp.experts.", ".mlp.router.weight"
_BALANCE = 0.01
_TOKENS = (2, 64)
# Largest difference of results in the dtype of training, over the largest result.
_LIMITS = {torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How feed-forward blocks become experts.

    Args:
        experts: experts of a layer.
        top_k: experts of a token.
        granularity: slices of a block, each of which is an expert.
        layers: numbers of the layers that have experts; empty: all.
        seed: of the routers; None: that of the run.
    """

    experts: int
    top_k: int
    granularity: int = 1
    layers: Sequence[int] = ()
    seed: int | None = None

    def check(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Return the layers that have experts.

        Raises:
            ConversionError: the result would not compute the same, or could not be trained.
        """
        given, slices = checkpoint.model.layers, self.granularity
        layers = tuple(sorted(set(self.layers))) or tuple(range(len(given)))
        outside = [index for index in layers if not 0 <= index < len(given)]
        if outside:
            raise ConversionError(
                f"--layer {outside[0]}: the model has layers 0 to {len(given) - 1}; pass those"
            )
        if slices & (slices - 1) or self.experts % slices or self.top_k % slices:
            raise ConversionError(
                f"--granularity {slices} must be a power of two that divides --experts {self.experts} and "
                f"--top-k {self.top_k}: a token passes whole copies of the block, and output matrices are "
                "multiplied by it; change one of the three"
            )
        if not 2 <= self.top_k <= self.experts:
            raise ConversionError(
                f"--top-k {self.top_k} must be from 2 to --experts {self.experts}: weights that add up to 1 "
                "give the router of one expert per token no gradient; pass another number"
            )
        for index in layers:
            channel, refused = given[index].channel, ""
            if not isinstance(channel, MLP):
                refused = "has experts already, or no feed-forward block"
            elif channel.bias:
                refused = "has a feed-forward block with biases, which are not converted"
            elif channel.width % slices:
                refused = f"has a feed-forward block of width {channel.width}, which is not {slices} slices"
            if refused:
                raise ConversionError(
                    f"{checkpoint.folder}: layer {index} {refused}; pass the checkpoint of another model"
                )
        return layers

    def settings(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the parameters of experts, as in a file."""
        layers, given = self.check(checkpoint), checkpoint.model.layers
        block = given[layers[0]].channel
        assert isinstance(block, MLP)
        return {
            "moe-num-experts": self.experts,
            "moe-top-k": self.top_k,
            "moe-expert-width": block.width // self.granularity,
            "moe-router-type": "topk",
            "moe-scores": "softmax",
            "moe-normalize-weights": True,
            **({} if len(layers) == len(given) else {"moe-layers": list(layers)}),
        }


def upcycle(
    folder: Path,
    output: Path,
    *,
    vocab_file: Path | None = None,
    merge_file: Path | None = None,
    **split: Any,
) -> dict[str, Any]:
    """Write a dense checkpoint as one with experts, and prove that it computes the same.

    Args:
        folder: the checkpoint.
        output: the folder to create: `latest`, `global_step0` and `model.yml`.
        vocab_file: the tokenizer's file, if it is not where the checkpoint records it.
        merge_file: its second file.
        split: arguments of Split.

    Returns:
        The contents of `verification.json`.

    Raises:
        NeoXError: the checkpoint is damaged, its model cannot have experts, or the results differ.
    """
    logger.info("reading %s", folder)
    dense, chosen = Checkpoint(folder), Split(**split)
    dense.check_shapes()
    config, tokenizer = dense.resolved.config, dense.tokenizer(vocab_file=vocab_file, merge_file=merge_file)
    settings = {
        **model_parameters(config.model, config.attention),
        **chosen.settings(dense),
        # A start: without it, few experts get all tokens.
        "moe-balance-loss": _BALANCE,
        "precision": dense.precision,
        **dense.tokenizer_settings(vocab_file, merge_file),
        **({"stop-tokens": dense.stop_tokens} if dense.stop_tokens else {}),
    }
    with folder_written_aside(output) as aside:
        path = aside / CONFIGURATION
        write_settings(path, settings, source=folder, output=output.absolute(), command="upcycle")
        named = Text(path.read_text(encoding="utf-8"), str(folder), has_lines=False)
        resolved = resolve(load_config([], texts=[named]), devices=1)
        written = _write(aside, dense, chosen, resolved, recorded_config(resolved, tokenizer))
        result = _prove(dense, Checkpoint(written))
        result |= provenance(folder, written, packages=())
        write_json(aside / "verification.json", result)
    logger.info("%s trains the model (finetune: true)", output / CONFIGURATION)
    return result


def _write(aside: Path, dense: Checkpoint, split: Split, resolved: Resolved, config: dict[str, Any]) -> Path:
    shapes = tensor_shapes(resolved.model, resolved.run, dense.vocab_size)
    sources = {name: name if name in dense.shapes else _source(name) for name in shapes}
    tensors = [StreamedTensor(name, shape, dense.dtype(sources[name])) for name, shape in shapes.items()]
    model = build_sequential(resolved.model, resolved.run, dense.vocab_size, device="meta")
    logical: dict[str, Any] = dict(named_logical_parameters(model))
    seed = dense.resolved.config.training.seed if split.seed is None else split.seed

    def values(name: str) -> Iterable[Tensor]:
        source, dtype = sources[name], dense.dtype(sources[name])
        if name == source:
            return dense.row_chunks(name)
        if name.endswith(_ROUTER):
            generator = torch.Generator().manual_seed(mixed_seed("upcycle", seed, name))
            rows = torch.empty(split.experts // split.granularity, shapes[name][1])
            logical[name].logical.init(rows, generator)
            return [rows.repeat_interleave(split.granularity, dim=0).to(dtype)]
        matrix, is_down = dense.whole(source).t(), name.endswith("down")
        slices = (matrix * _factor(split) if is_down else matrix).chunk(split.granularity, 1 - is_down)
        return (slices[expert % split.granularity].contiguous() for expert in range(split.experts))

    return write_checkpoint(aside, tensors, values, config)


def _factor(split: Split) -> int:
    """Return the factor of output matrices: each of the slices of a copy has its part of the weight."""
    return split.granularity


def _source(name: str) -> str:
    """Return the dense weight from which one of a layer with experts is made, or whose dtype it has."""
    if name.endswith(_ROUTER):
        return name.replace(_ROUTER, ".mlp.up.weight")
    return f"{name.replace(_EXPERTS, '.mlp.')}.weight"


@torch.no_grad()
def _prove(dense: Checkpoint, written: Checkpoint) -> dict[str, Any]:
    """Compare each layer, and the logits of whole models that are not too large.

    Raises:
        ProofError: they differ by more than rounding.
    """
    written.check_shapes()
    figures, run = Figures(other="the dense model"), written.resolved.run
    length = min(_TOKENS[1], dense.model.max_positions)
    generator = torch.Generator().manual_seed(0)
    logger.info("comparing %s", pluralize(len(dense.model.layers), "layer"))
    for index in range(len(dense.model.layers)):
        hidden_BSD = torch.randn(_TOKENS[0], length, dense.model.width, generator=generator)
        results = []
        for side in (written, dense):
            layer = OneLayer(side, side.model, run, index)
            layer.fill(index, torch.float32)
            results.append(layer.run(hidden_BSD))
        figures.compare("layer", *results, where=f" {index}")
    parameters = sum(map(prod, written.shapes.values()))
    tokens_BS = torch.randint(dense.vocab_size, (_TOKENS[0], length), generator=generator)
    found = [figures]
    for dtype in (
        dict.fromkeys((torch.float32, DTYPES[written.precision])) if parameters <= WHOLE_LIMIT else ()
    ):
        logits = []
        for side in (written, dense):
            model = build_sequential(side.model, run, side.vocab_size)
            load_into(model, side, torch.float32)
            logits.append(model.to(dtype)(tokens_BS).double())
        if dtype in _LIMITS:
            found.append(Figures(_LIMITS[dtype], other="the dense model"))
        found[-1].compare("logits" if dtype == torch.float32 else f"logits in {dtype}", *logits)
    return {
        "verdict": "equal",
        "class": "a model with experts",
        "tensors": len(written.shapes),
        "parameters": parameters,
        "parameters_before": sum(map(prod, dense.shapes.values())),
        "largest_differences": figures.plain(),
        "limit": figures.limit,
        **({"in_16_bits": found[1].plain() | {"limit": found[1].limit}} if found[1:] else {}),
    }
