"""Names in a folder of checkpoints: neox-model writes them, the launcher and neox-model read them."""

import os
import re
from pathlib import Path

__all__ = [
    "LATEST",
    "MANIFEST",
    "TOKEN_EMBEDDING",
    "checkpoint_name",
    "complete_checkpoints",
    "gpt_neox_checkpoint",
    "is_checkpoint",
    "is_gpt_neox",
    "iteration_of",
]

LATEST = "latest"
"""File with the name of the checkpoint that a run resumes from."""

MANIFEST = "manifest.json"
"""File in the folder of a checkpoint; a folder without it is not a complete checkpoint."""

TOKEN_EMBEDDING = "embedding.word_embeddings.weight"
"""Logical tensor with one row per entry of the vocabulary."""

_PREFIX = "global_step"
_NAME = re.compile(_PREFIX + r"(\d{1,18})")
# `layer_00-model_00-model_states.pt`, `mp_rank_00_model_states.pt`
_FILES_OF_GPT_NEOX = "*model_states.pt"


def checkpoint_name(iteration: int) -> str:
    """Return the folder name of the checkpoint after `iteration` updates."""
    return f"{_PREFIX}{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the iteration of the checkpoint with a folder name; None if it is not such a name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one complete checkpoint, under the name that a run gave it."""
    is_named = iteration_of(os.path.basename(os.path.abspath(folder))) is not None
    return is_named and (folder / MANIFEST).is_file()


def is_gpt_neox(folder: Path) -> bool:
    """Return whether a folder has the files of one of GPT-NeoX's checkpoints."""
    return next(folder.glob(_FILES_OF_GPT_NEOX), None) is not None


def gpt_neox_checkpoint(directory: Path) -> Path | None:
    """Return the latest checkpoint of GPT-NeoX in a folder, or the folder itself if it is one; else None."""
    if is_gpt_neox(directory):
        return directory
    latest = directory / LATEST
    if latest.is_file() and is_gpt_neox(named := directory / latest.read_text(errors="replace").strip()):
        return named
    others = (path for path in directory.glob("*") if iteration_of(path.name) is not None)
    return max(filter(is_gpt_neox, others), key=lambda path: iteration_of(path.name) or 0, default=None)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the folders of the complete checkpoints in a folder, lowest iteration first.

    Raises:
        OSError: the folder exists, but it or a checkpoint in it cannot be read.
    """
    paths = directory.iterdir() if directory.is_dir() else ()
    named = [(iteration_of(path.name), path) for path in paths]
    complete = [each for each in named if each[0] is not None and (each[1] / MANIFEST).is_file()]
    return [path for _, path in sorted(complete)]
