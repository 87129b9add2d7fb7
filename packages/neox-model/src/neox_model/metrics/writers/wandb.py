"""Write metrics to Weights & Biases."""

import os
from collections.abc import Mapping
from typing import Any

from neox_model.errors import ModelError
from neox_model.optional import require

__all__ = ["WandbWriter", "require_wandb"]


class WandbWriter:
    """Logs to one run.

    Args:
        run_key: id of the run to continue; steps that it already has are not sent again. None starts a new
            run. WANDB_RUN_ID in the environment has precedence.
        settings: arguments of `wandb.init`: project, group, entity, configuration.

    Raises:
        MissingPackageError: wandb is not installed.
        ModelError: wandb cannot start the run.
    """

    def __init__(self, *, run_key: str | None = None, **settings: Any) -> None:
        wandb = _package()
        is_continued = run_key is not None and "WANDB_RUN_ID" not in os.environ
        if is_continued:
            settings |= {"id": run_key, "resume": "allow"}
        try:
            self._run = wandb.init(**settings)
        except Exception as error:
            new_run = ", or delete monitor-runs.json in the folder of checkpoints to start a new run"
            raise ModelError(
                f"Weights & Biases cannot start a run: {error}; set use-wandb: false (or wandb.enabled: "
                "false) to train without it, or WANDB_MODE=offline to upload the run later"
                f"{new_run if is_continued else ''}"
            ) from error
        self._first_step = self._run.starting_step if is_continued else 0
        self.run_key: str = self._run.id

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Log one step of the run."""
        if iteration >= self._first_step:
            self._run.log(dict(metrics), step=iteration)

    def flush(self) -> None:
        """Do nothing; wandb sends metrics itself."""

    def close(self) -> None:
        """Send the remaining metrics and end the run."""
        self._run.finish()


def require_wandb(host: str | None = None) -> None:
    """Raise an error if wandb is missing, or has no API key and would send metrics to a server.

    Args:
        host: URL of the server; None: wandb's own settings.

    Raises:
        MissingPackageError: wandb is not installed.
        ModelError: no API key is configured, or it or the URL is not valid.
    """
    wandb = _package()
    if wandb.setup().settings.mode != "online":
        return
    try:
        has_key = _has_key(wandb, host)
    except Exception as error:
        raise ModelError(
            f"Weights & Biases cannot be used: {error}; correct its API key or server, or set "
            "WANDB_MODE=offline to upload the run later"
        ) from error
    if not has_key:
        raise ModelError(
            "Weights & Biases has no API key on the host of rank 0; run `wandb login` there, "
            "set WANDB_API_KEY, or set WANDB_MODE=offline to upload the run later"
        )


def _has_key(wandb: Any, host: str | None) -> bool:
    """Return whether there is an API key for a server; None: that of wandb's own settings."""
    settings = wandb.setup().settings
    own = settings.base_url
    # `login(host=...)` would write the host to the user's settings file.
    settings.base_url = host or own
    try:
        return bool(wandb.login(prompt=False, verify=False))
    finally:
        wandb.setup().settings.base_url = own


def _package() -> Any:
    return require("wandb", because="sending metrics to Weights & Biases", install="wandb")
