"""How a run continues from a folder of checkpoints with all its states, and what such a folder holds."""

from contextlib import suppress
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.facts.checkpoints import LATEST, MANIFEST, complete_checkpoints

__all__ = ["PARTIAL_LOADS", "latest_in", "resumed_from", "written_checkpoints"]

PARTIAL_LOADS = ("finetune", "no_load_optim", "no_load_rng")
"""Parameters that load a part of a checkpoint's states; all are false in a run that resumes."""


def resumed_from(config: NeoXConfig, load: str | None) -> NeoXConfig:
    """Return the configuration that continues from the latest checkpoint in `load` with all its states."""
    checkpoint = config.checkpoint.replaced(load=load, **dict.fromkeys(PARTIAL_LOADS, False))
    return config.model_copy(update={"checkpoint": checkpoint})


def latest_in(folder: Path) -> str | None:
    """Return the name of the checkpoint that a run resumes from; None if there is none."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None  # The run itself refuses a file that cannot be read.
    return name or None


def written_checkpoints(folder: Path) -> set[tuple[str, float]]:
    """Return the name and the time of every complete checkpoint in a folder.

    Raises:
        OSError: the folder exists, but it or a checkpoint in it cannot be read.
    """
    found = set()
    for path in complete_checkpoints(folder):
        with suppress(FileNotFoundError):  # Old checkpoints are deleted.
            found.add((path.name, (path / MANIFEST).stat().st_mtime))
    return found
