"""The number of kept tokens in each iteration."""

from collections.abc import Callable
from typing import Self

from torch import nn

from neox_model.extras.token_dropping.layer import kept_tokens, token_dropping_layers
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["DropTokens"]


class DropTokens(Callback):
    """Sets `kept_tokens` of this rank's token-dropping layers before each iteration.

    The number depends on the iteration only, so that a resumed run continues where it was.

    Args:
        model: the model with the token-dropping layers.
        kept: function of the iteration, counted from 0, that returns the number of tokens to keep.
    """

    def __init__(self, model: nn.Module, kept: Callable[[int], int]) -> None:
        self._layers = token_dropping_layers(model)
        self._kept = kept

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if layers drop tokens."""
        kept = kept_tokens(run.config.data_efficiency.data_efficiency)
        return None if kept is None else cls(run.model, kept.at)

    def on_start(self) -> None:
        """Set the number for the next iteration of this process."""
        for layer in self._layers:
            layer.kept_tokens = self._kept(self.run.state.iteration)

    def on_step(self, report: StepReport) -> None:
        """Set the number for the next iteration."""
        self.on_start()
