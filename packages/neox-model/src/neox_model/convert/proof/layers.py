"""Compare one layer at a time, so that the memory is that of one layer of each side.

A model of one layer, without its vocabulary, is built once on each side and filled with the weights of each
layer in turn. Hidden states of two sizes are given to both: with small ones the constants of norms are as
large as what they are added to, so that a wrong one shows.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neox_config.pluralize import pluralize
from neox_config.spec.model import Layer, ModelSpec, Window
from neox_config.spec.run import RunSpec
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import VOCABULARY, build_sequential
from neox_model.convert.differences import mixers, simplest
from neox_model.convert.proof.choices import clear_choices
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.sides import Sides, dtype_of
from neox_model.convert.reference import computed, one_layer_model
from neox_model.convert.stored import StoredWeights
from neox_model.convert.weights import WeightFiles
from neox_model.layers.positions import RotaryPosition, lengths_of_requests
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["OneLayer", "compare_layers", "kinds_of_layers", "lengths_of", "one_layer"]

logger = logging.getLogger(__name__)

_LONGEST = 2048
_SHORT = 16
_SCALES = (1.0, 1e-3)
_TABLE = 2**17


def lengths_of(model: ModelSpec) -> tuple[int, int]:
    """Return lengths of sequences to compare.

    Returns:
        The longest: that of the model, or what can be compared in minutes; and one at which all windows hide
        tokens, 0 without windows.
    """
    patterns = [getattr(mixer, "pattern", None) for mixer in mixers(model)]
    beyond = max((each.before + 9 for each in patterns if isinstance(each, Window)), default=0)
    return min(model.max_positions, max(_LONGEST, beyond)), beyond


def compare_layers(
    sides: Sides, model: ModelSpec, run: RunSpec, files: WeightFiles, figures: Figures
) -> None:
    """Compare every layer on short sequences, and the first of each kind on long ones; then rotary tables."""
    kinds, short = kinds_of_layers(model), min(_SHORT, model.max_positions)
    dtype = dtype_of(sides, files)
    seen: set[Layer] = set()
    ours, theirs = None, None
    logger.info("comparing %s", pluralize(len(kinds), "layer"))
    with tracked(enumerate(kinds), len(kinds), "layers compared") as each:
        for layer, kind in each:
            if ours is None or ours.kind != kind:
                ours, theirs = None, None  # Release one pair before the next is built.
                ours = OneLayer(sides.weights, model, run, layer)
                theirs = one_layer_model(sides.config, sides.family, layer)
            ours.fill(layer, dtype)
            _fill(theirs, sides, files, layer)
            for length in sorted({short} if kind in seen else {short, lengths_of(model)[0]}):
                generator = torch.Generator().manual_seed(layer)
                hidden_BSD = torch.randn(1, length, model.width, generator=generator)
                for scale in _SCALES:
                    where = f" {layer}, {length} tokens, hidden states of size {scale:g}"
                    inputs = {"inputs_embeds": hidden_BSD * scale, "use_cache": False}
                    with torch.no_grad():
                        found = computed(theirs, **inputs).last_hidden_state
                    compute = partial(ours.run, hidden_BSD * scale, adds_positions=True)
                    clear = clear_choices(ours.model, compute)
                    figures.compare("layer", compute(), found, where=where, where_clear=clear)
            if kind not in seen:
                _compare_rotary(ours, theirs, figures)
            seen.add(kind)


def kinds_of_layers(model: ModelSpec) -> list[Layer]:
    """Return the layers, which are equal if they compute the same with the same weights."""
    return [replace(layer, owner=None) for layer in simplest(model).layers]


class OneLayer:
    """A model of ours with one layer and the final norm, without its vocabulary.

    Args:
        weights: those of the whole model.
        model: ours.
        run: how it runs.
        layer: a layer of the kind.
    """

    def __init__(self, weights: StoredWeights, model: ModelSpec, run: RunSpec, layer: int) -> None:
        self.kind, self.length = kinds_of_layers(model)[layer], model.max_positions
        self.model = build_sequential(one_layer(model, layer), run, 1)
        self._weights = weights

    def fill(self, layer: int, dtype: torch.dtype) -> None:
        """Load the weights of a layer, rounded to a dtype."""
        with torch.no_grad():
            for name, parameter in named_logical_parameters(self.model):
                if name not in VOCABULARY:
                    stored = name.replace("layers.0.", f"layers.{layer}.", 1)
                    parameter.copy_(self._weights.whole(stored).to(dtype))

    def run(self, hidden_BSD: Tensor, *, adds_positions: bool = False) -> Tensor:
        """Return the results for hidden states, to which the embedding's positions may be added first."""
        embedding, *stack, _ = self.model.stack
        position: Any = embedding.position_embeddings
        hidden_SBD = hidden_BSD.transpose(0, 1)
        lengths_B = torch.full((hidden_SBD.shape[1],), len(hidden_SBD))
        with torch.no_grad(), lengths_of_requests(self.model, lengths_B):
            if adds_positions and position is not None:
                hidden_SBD = hidden_SBD + position(torch.arange(len(hidden_SBD)).unsqueeze(1))
            for each in stack:
                hidden_SBD = each(hidden_SBD)
        return hidden_SBD.transpose(0, 1)


def _fill(theirs: Any, sides: Sides, files: WeightFiles, layer: int) -> None:
    """Load the weights of a layer into a model of transformers with one."""
    first, here = sides.family.layer.format(0), sides.family.layer.format(layer)
    for name, parameter in theirs.named_parameters():
        wanted = sides.family.base_prefix + name
        if wanted.startswith(first):
            wanted = here + wanted.removeprefix(first)
        elif parameter is theirs.get_input_embeddings().weight:
            continue
        parts = sides.family.in_files(wanted, sum(parameter.shape[:1]))
        stored = [each for part in parts if (each := files.find(sides.family, part)) is not None]
        assert len(stored) == len(parts), f"{wanted} is there since check_keys"
        with torch.no_grad():
            parameter.copy_(torch.cat([files.whole(each) for each in stored]).view_as(parameter))


def _compare_rotary(ours: OneLayer, theirs: Any, figures: Figures) -> None:
    """Compare sines and cosines at all positions."""
    position = next((each for each in ours.model.modules() if isinstance(each, RotaryPosition)), None)
    rotary = getattr(theirs, "rotary_emb", None)
    if position is None or rotary is None:  # If one of the two rotates, the layers differ.
        return
    length = min(_TABLE, ours.length)
    tables = position.tables(length, torch.device("cpu"), torch.float32)
    kinds = {"layer_type": theirs.config.layer_types[0]} if hasattr(rotary, "layer_types") else {}
    found = rotary(torch.zeros(1, length, 1), torch.arange(length).unsqueeze(0), **kinds)
    for what, mine, other in zip(("cosines", "sines"), tables, found, strict=True):
        # Most classes repeat the columns for both halves of a head.
        half = other[0, :, : mine.shape[-1]]
        figures.compare("rotary tables", mine[:length], half, where=f" ({what})")


def one_layer(spec: ModelSpec, layer: int) -> ModelSpec:
    """Return a model with one layer, like layer `layer`."""
    return replace(spec, layers=(replace(spec.layers[layer], owner=None),))
