"""Metrics sent to Comet."""

from collections.abc import Mapping
from typing import Any

from neox_model.optional import require

__all__ = ["CometWriter"]


class CometWriter:
    """Logs to one experiment.

    Args:
        name: of the experiment; None lets Comet make one up.
        settings: what `comet_ml.start` takes: workspace, project, experiment key, mode, online.

    Raises:
        MissingPackageError: comet_ml is not installed.
    """

    def __init__(self, *, name: str | None, **settings: Any) -> None:
        comet = require("comet_ml", because="comet.enabled: true", install="comet_ml")
        self._experiment = comet.start(**{key: value for key, value in settings.items() if value is not None})
        if name is not None:
            self._experiment.set_name(name)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """One step of the experiment."""
        self._experiment.log_metrics(dict(metrics), step=iteration)

    def flush(self) -> None:
        """Nothing to do: comet sends by itself."""

    def close(self) -> None:
        """Send what is left and end the experiment."""
        self._experiment.end()
