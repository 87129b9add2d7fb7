"""Compare one layer at a time, so that the memory is that of one layer of each side.

A model of one layer, without its vocabulary, is built once on each side and filled with the weights of each
layer in turn. Hidden states of two sizes are given to both: with small ones the constants of norms are as
large as what they are added to, so that a wrong one shows.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from neox_config import Resolved
from neox_config.counted import counted
from neox_data.amount_progress import tracked
from neox_model.convert.checkpoints import build_sequential
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.sides import Sides, dtype_of
from neox_model.convert.reference import computed, one_layer_model
from neox_model.convert.weights import WeightFiles
from neox_model.layers.positions import RotaryPosition
from neox_model.parallel.logical import named_logical_parameters

__all__ = ["compare_layers", "longest", "one_layer"]

logger = logging.getLogger(__name__)

_LONGEST = 2048
_SHORT = 16
_SCALES = (1.0, 1e-3)
_TABLE = 2**17


def longest(sides: Sides) -> int:
    """Return the length of long sequences: that of the model, or what can be compared in minutes."""
    architecture = sides.checkpoint.architecture
    beyond = max((window + 8 for window in architecture.windows if window is not None), default=0)
    return min(architecture.max_positions, max(_LONGEST, beyond))


def compare_layers(sides: Sides, files: WeightFiles, figures: Figures) -> None:
    """Compare every layer on short sequences, and the first of each kind on long ones; then rotary tables.

    Raises:
        ProofError: a layer differs.
    """
    windows = sides.checkpoint.architecture.windows
    dtype = dtype_of(sides, files)
    seen: set[int | None] = set()
    pair = None
    logger.info("comparing %s", counted(len(windows), "layer"))
    with tracked(enumerate(windows), len(windows), "layers compared") as each:
        for layer, window in each:
            if pair is None or pair.window != window:
                pair = None  # Release one pair before the next is built.
                pair = _Pair(sides, layer)
            pair.fill(sides, files, layer, dtype)
            for length in _lengths(sides, is_first=window not in seen):
                for scale in _SCALES:
                    where = f" {layer}, {length} tokens, hidden states of size {scale:g}"
                    figures.compare("layer", *pair.run(layer, length, scale), where=where)
            if window not in seen:
                pair.compare_rotary(sides, figures)
            seen.add(window)


def _lengths(sides: Sides, *, is_first: bool) -> list[int]:
    short = min(_SHORT, sides.checkpoint.architecture.max_positions)
    return sorted({short, longest(sides)}) if is_first else [short]


class _Pair:
    """One layer of each side with the final norm.

    Args:
        sides: both models.
        layer: a layer of the kind.
    """

    def __init__(self, sides: Sides, layer: int) -> None:
        self.window = sides.checkpoint.architecture.windows[layer]
        self._width = sides.checkpoint.architecture.hidden_size
        self._ours = build_sequential(one_layer(sides.checkpoint.resolved, layer), 1)
        self._theirs: Any = one_layer_model(sides.config, sides.family, layer)

    def fill(self, sides: Sides, files: WeightFiles, layer: int, dtype: torch.dtype) -> None:
        """Load the weights of a layer.

        Raises:
            ProofError: one of theirs is missing.
        """
        checkpoint = sides.checkpoint
        with torch.no_grad():
            for name, parameter in named_logical_parameters(self._ours):
                if parameter.shape[0] == 1 and checkpoint.shapes.get(name, (1,))[0] != 1:
                    continue  # The vocabulary of one entry.
                stored = name.replace("layers.0.", f"layers.{layer}.", 1)
                parameter.copy_(checkpoint.whole(stored).to(dtype))
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

    def compare_rotary(self, sides: Sides, figures: Figures) -> None:
        """Compare sines and cosines at all positions."""
        position = next((each for each in self._ours.modules() if isinstance(each, RotaryPosition)), None)
        rotary = getattr(self._theirs, "rotary_emb", None)
        if (position is None) != (rotary is None):
            raise ProofError("one of the two models has rotary position embeddings, and the other has not")
        if position is None or rotary is None:
            return
        length = min(_TABLE, sides.checkpoint.architecture.max_positions)
        ids = torch.arange(length).unsqueeze(0)
        theirs = rotary(torch.zeros(1, length, 1), ids)
        ours = position.tables(length, torch.device("cpu"), torch.float32)
        for what, mine, other in zip(("cosines", "sines"), ours, theirs, strict=True):
            half = other[0, :, : other.shape[-1] // 2]
            figures.compare("rotary tables", mine[:length], half, where=f" ({what})")


def one_layer(resolved: Resolved, layer: int) -> Resolved:
    """Return a model with one layer of the kind of layer `layer`."""
    kind = resolved.derived.attention_types[layer]
    config = resolved.config
    return resolved.replaced(
        model=config.model.replaced(num_layers=1, num_unique_layers=None),
        attention=config.attention.replaced(attention_config=(kind,)),
    )
