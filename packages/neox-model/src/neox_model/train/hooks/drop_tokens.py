"""Set how many tokens the token-dropping layers keep in the next iteration."""

from collections.abc import Callable

from torch import nn

from neox_model.assembly.token_dropping import token_dropping_layers
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["DropTokensHook"]


class DropTokensHook(Hook):
    """Sets `kept_tokens` of this rank's layers before each iteration.

    The number depends on the iteration only, so that a resumed training continues where it was.

    Args:
        model: the model with the token-dropping layers.
        kept: function of the iteration, counted from 0, that returns the number of tokens to keep.
    """

    def __init__(self, model: nn.Module, kept: Callable[[int], int]) -> None:
        self._layers = token_dropping_layers(model)
        self._kept = kept

    def on_start(self, state: TrainState) -> None:
        """Set the number for the first iteration of this process."""
        self._set(state.iteration)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Set the number for the next iteration."""
        self._set(state.iteration)

    def _set(self, iteration: int) -> None:
        for layer in self._layers:
            layer.kept_tokens = self._kept(iteration)
