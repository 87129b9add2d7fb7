"""Record the runs of Weights & Biases and Comet, so that a resumed training continues them.

The file is in the folder of the checkpoints: a training that continues the checkpoints of another folder
starts new runs, because the other training may still write to its own.
"""

import json
import logging
from pathlib import Path

from neox_config.atomic import atomic_write

__all__ = ["RunKeys"]

logger = logging.getLogger(__name__)


class RunKeys:
    """The keys of a training's runs, by service.

    Args:
        folder: folder of the checkpoints; None: keys are not stored.
        is_resumed: continue the recorded runs. Otherwise all runs are new.
    """

    FILE = "monitor-runs.json"

    def __init__(self, folder: Path | None, *, is_resumed: bool) -> None:
        self._path = None if folder is None else folder / self.FILE
        self._keys = self._read() if is_resumed else {}

    def __getitem__(self, service: str) -> str | None:
        """Return the key of the run to continue; None starts a new run."""
        return self._keys.get(service)

    def record(self, service: str, key: str) -> None:
        """Store the key of a run."""
        if self._keys.get(service) == key:
            return
        self._keys[service] = key
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as file:
                file.write(json.dumps(self._keys, allow_nan=False) + "\n")

    def _read(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            keys = json.loads(self._path.read_bytes())
        except (ValueError, RecursionError):
            keys = None
        if isinstance(keys, dict) and all(isinstance(key, str) for key in keys.values()):
            return keys
        logger.warning("%s is damaged: metrics go to new runs of Weights & Biases and Comet", self._path)
        return {}
