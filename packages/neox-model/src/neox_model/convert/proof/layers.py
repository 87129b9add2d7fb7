"""Compare one layer at a time, so that the memory is that of one layer of each side.

A model of one layer, without its vocabulary, is built once on each side and filled with the weights of each
layer in turn. Hidden states of two sizes are given to both: with small ones the constants of norms are as
large as what they are added to, so that a wrong one shows.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from neox_config.counted import counted
from neox_config.spec.model import ModelSpec, Pattern, Window
from neox_config.spec.run import RunSpec
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import build_sequential
from neox_model.convert.differences import patterns
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.sides import Sides, dtype_of
from neox_model.convert.reference import computed, one_layer_model
from neox_model.convert.weights import WeightFiles
from neox_model.layers.positions import RotaryPosition
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["Lengths", "compare_layers", "lengths_of", "one_layer"]

logger = logging.getLogger(__name__)

_LONGEST = 2048
_SHORT = 16
_SCALES = (1.0, 1e-3)
_TABLE = 2**17


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of sequences that are compared.

    Args:
        longest: that of the model, or what can be compared in minutes.
        beyond_windows: one at which all windows hide tokens; 0 without windows.
    """

    longest: int
    beyond_windows: int


def lengths_of(model: ModelSpec) -> Lengths:
    """Return the lengths of sequences to compare."""
    windows = [each.before for each in patterns(model) if isinstance(each, Window)]
    beyond = max((before + 9 for before in windows), default=0)
    return Lengths(min(model.max_positions, max(_LONGEST, beyond)), beyond)


def compare_layers(
    sides: Sides, model: ModelSpec, run: RunSpec, files: WeightFiles, figures: Figures
) -> None:
    """Compare every layer on short sequences, and the first of each kind on long ones; then rotary tables.

    Raises:
        ProofError: a layer differs.
    """
    windows, short = patterns(model), min(_SHORT, model.max_positions)
    dtype = dtype_of(sides, files)
    seen: set[Pattern | None] = set()
    pair = None
    logger.info("comparing %s", counted(len(windows), "layer"))
    with tracked(enumerate(windows), len(windows), "layers compared") as each:
        for layer, window in each:
            if pair is None or pair.window != window:
                pair = None  # Release one pair before the next is built.
                pair = _Pair(sides, model, run, layer)
            pair.fill(sides, files, layer, dtype)
            for length in sorted({short} if window in seen else {short, lengths_of(model).longest}):
                for scale in _SCALES:
                    where = f" {layer}, {length} tokens, hidden states of size {scale:g}"
                    figures.compare("layer", *pair.run(layer, length, scale), where=where)
            if window not in seen:
                pair.compare_rotary(figures)
            seen.add(window)


class _Pair:
    """One layer of each side with the final norm.

    Args:
        sides: both models.
        model: ours.
        run: how it runs.
        layer: a layer of the kind.
    """

    def __init__(self, sides: Sides, model: ModelSpec, run: RunSpec, layer: int) -> None:
        self.window, self._width, self._positions = patterns(model)[layer], model.width, model.max_positions
        self._ours = build_sequential(one_layer(model, layer), run, 1)
        self._theirs: Any = one_layer_model(sides.config, sides.family, layer)

    def fill(self, sides: Sides, files: WeightFiles, layer: int, dtype: torch.dtype) -> None:
        """Load the weights of a layer.

        Raises:
            ProofError: one of theirs is missing.
        """
        weights = sides.weights
        with torch.no_grad():
            for name, parameter in named_logical_parameters(self._ours):
                if parameter.shape[0] == 1 and weights.shapes.get(name, (1,))[0] != 1:
                    continue  # The vocabulary of one entry.
                stored = name.replace("layers.0.", f"layers.{layer}.", 1)
                parameter.copy_(weights.whole(stored).to(dtype))
            prefix = sides.family.base_prefix
            first, here = sides.family.layer.format(0), sides.family.layer.format(layer)
            for name, parameter in self._theirs.named_parameters():
                wanted = prefix + name
                if wanted.startswith(first):
                    wanted = here + wanted.removeprefix(first)
                elif parameter is self._theirs.get_input_embeddings().weight:
                    continue
                found = sides.family.stored_name(wanted, files.tensors)
                if found is None:
                    raise ProofError(f"{sides.folder} lacks {wanted}")
                parameter.copy_(files.whole(found))

    def run(self, layer: int, length: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return the results of both sides for the same random hidden states."""
        generator = torch.Generator().manual_seed(layer)
        hidden_BSD = torch.randn(1, length, self._width, generator=generator) * scale
        embedding, *stack, _ = self._ours.stack
        position: Any = embedding.position_embeddings
        with torch.no_grad():
            ours = hidden_BSD.transpose(0, 1)
            if position is not None:
                ours = ours + position(torch.arange(length).unsqueeze(1))
            for each in stack:
                ours = each(ours)
            theirs = computed(self._theirs, inputs_embeds=hidden_BSD, use_cache=False).last_hidden_state
        return ours.transpose(0, 1), theirs

    def compare_rotary(self, figures: Figures) -> None:
        """Compare sines and cosines at all positions."""
        position = next((each for each in self._ours.modules() if isinstance(each, RotaryPosition)), None)
        rotary = getattr(self._theirs, "rotary_emb", None)
        if (position is None) != (rotary is None):
            raise ProofError("one of the two models has rotary position embeddings, and the other has not")
        if position is None or rotary is None:
            return
        length = min(_TABLE, self._positions)
        ids = torch.arange(length).unsqueeze(0)
        theirs = rotary(torch.zeros(1, length, 1), ids)
        ours = position.tables(length, torch.device("cpu"), torch.float32)
        for what, mine, other in zip(("cosines", "sines"), ours, theirs, strict=True):
            half = other[0, :, : other.shape[-1] // 2]
            figures.compare("rotary tables", mine[:length], half, where=f" ({what})")


def one_layer(spec: ModelSpec, layer: int) -> ModelSpec:
    """Return a model with one layer, like layer `layer`."""
    return replace(spec, layers=(replace(spec.layers[layer], owner=None),))
