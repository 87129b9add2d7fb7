"""Write metrics to Comet."""

from collections.abc import Mapping, Sequence
from typing import Any

from neox_model.errors import ModelError
from neox_model.optional import require

__all__ = ["CometWriter", "require_comet"]


class CometWriter:
    """Logs to one experiment.

    Args:
        name: name of the experiment; None: Comet chooses one.
        tags: tags of the experiment.
        others: other values to log, by name.
        settings: arguments of `comet_ml.start`: workspace, project, experiment key, mode, online.

    Raises:
        MissingPackageError: comet_ml is not installed.
        ModelError: Comet cannot start the experiment.
    """

    def __init__(
        self,
        *,
        name: str | None,
        tags: Sequence[str] | None = None,
        others: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        comet = _package()
        given = {key: value for key, value in settings.items() if value is not None}
        try:
            self._experiment = comet.start(**given)
            if name is not None:
                self._experiment.set_name(name)
            if tags:
                self._experiment.add_tags(list(tags))
            if others:
                self._experiment.log_others(dict(others))
        except Exception as error:
            raise ModelError(
                f"Comet cannot start an experiment: {error}; set comet.enabled: false to train without it, "
                "or comet.online: false to upload the experiment later"
            ) from error
        self.run_key: str = self._experiment.get_key()

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Log one step of the experiment."""
        self._experiment.log_metrics(dict(metrics), step=iteration)

    def flush(self) -> None:
        """Do nothing; comet sends metrics itself."""

    def close(self) -> None:
        """Send the remaining metrics and end the experiment."""
        self._experiment.end()


def require_comet(*, online: bool) -> None:
    """Raise an error if comet_ml is missing, or has no API key and would send metrics to the server.

    Raises:
        MissingPackageError: comet_ml is not installed.
        ModelError: no API key is configured.
    """
    comet = _package()
    if online and not comet.get_config("comet.api_key"):
        raise ModelError(
            "Comet has no API key on the host of rank 0; set COMET_API_KEY or comet.api_key, run "
            "`comet login` there, or set comet.online: false to upload the experiment later"
        )


def _package() -> Any:
    return require("comet_ml", because="comet.enabled: true", install="comet_ml")
