"""Metrics sent to Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from neox_model.optional import require

__all__ = ["WandbWriter"]


class WandbWriter:
    """Logs to one run.

    Args:
        settings: what `wandb.init` takes: project, group, entity, configuration.

    Raises:
        MissingPackageError: wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        wandb = require("wandb", because="sending metrics to Weights & Biases", install="wandb")
        self._run = wandb.init(**settings)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """One step of the run."""
        self._run.log(dict(metrics), step=iteration)

    def flush(self) -> None:
        """Nothing to do: wandb sends by itself."""

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()
