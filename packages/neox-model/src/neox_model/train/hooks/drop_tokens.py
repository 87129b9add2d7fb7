"""Tells the layers that drop tokens how many they keep in the next iteration."""

from collections.abc import Callable

from torch import nn

from neox_model.build.token_dropping import token_dropping_layers
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["DropTokensHook"]


class DropTokensHook(Hook):
    """Sets `kept_tokens` of this rank's layers before each iteration.

    The number follows from the iteration alone, so that a resumed training goes on where it was.

    Args:
        model: whose layers that drop tokens are told.
        kept: tokens kept in an iteration, counted from 0.
    """

    def __init__(self, model: nn.Module, kept: Callable[[int], int]) -> None:
        self._layers = token_dropping_layers(model)
        self._kept = kept

    def on_start(self, state: TrainState) -> None:
        """Before the first iteration of this process."""
        self._set(state.iteration)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """For the iteration that comes."""
        self._set(state.iteration)

    def _set(self, iteration: int) -> None:
        for layer in self._layers:
            layer.kept_tokens = self._kept(iteration)
