"""Results of compilations, stored by the content that they follow from."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_config.atomic import atomic_write

__all__ = ["Cache", "digest"]


def digest(*parts: bytes) -> str:
    """Return a name for this content."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:32]


@dataclass(frozen=True)
class Cache:
    """A folder with one JSON file per result. Several processes may use it."""

    folder: Path

    def get(self, key: str, compute: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Return the stored result; if there is none, compute and store it.

        Args:
            key: a digest of everything that the result depends on.
            compute: called with a temporary folder for its files.
        """
        path = self.folder / f"{key}.json"
        if path.exists():
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return stored
        with tempfile.TemporaryDirectory(prefix="gpu-gate-") as folder:
            result = compute(Path(folder))
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            json.dump(result, file, allow_nan=False)
        return result
