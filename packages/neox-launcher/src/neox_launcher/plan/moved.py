"""Recognize a run folder that was moved: its configuration names files where the folder was before."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.facts.checkpoints import complete_checkpoints
from neox_config.facts.stores import is_url
from neox_config.problems import Problem
from neox_launcher.plan.dataset_files import index_path

__all__ = ["name_moved_folder"]


def name_moved_folder(config: NeoXConfig, problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem in place of those of all files that are below the folder of the configuration file.

    Args:
        config: the configuration.
        problems: those of its files. Without one about a moved file, they are returned as they are: a
            training may begin without a checkpoint in `load`.
    """
    found = {name: moved for name in _PRESENT if (moved := _moved(config, name)) is not None}
    first = next((problem for problem in problems if problem.name in found), None)
    if first is None:
        return list(problems)
    old, new, file = found[first.name]
    same = [name for name, moved in found.items() if moved == found[first.name]]
    names = ", ".join(name.replace("_", "-") for name in same)
    problem = Problem(
        first.name,
        f"does not exist, but the folder of {file} has what it names (found there: {names})",
        f"the folder was moved: write {new} in place of {old} in {file}",
        value=first.value,
    )
    return [problem, *(other for other in problems if other.name not in same)]


def _moved(config: NeoXConfig, name: str) -> tuple[Path, Path, str] | None:
    """Return the folder that a missing path begins with, the one to write instead, and the file to change."""
    place = config.sources.get(name)
    if place is None or place.file not in config.files:
        return None
    folder, exists = Path(place.file).parent, _PRESENT[name]
    for path in _paths(config, name):
        if is_url(path) or os.path.exists(path) or exists(Path(path)):
            continue
        parts = Path(path).parts
        for count in range(len(parts) - 1, 0, -1):
            if exists(folder.joinpath(*parts[-count:])):
                new = folder.absolute() if os.path.isabs(path) else folder
                return Path(*parts[:-count]), new, place.file
    return None


def _paths(config: NeoXConfig, name: str) -> Iterator[str]:
    value = config.value_of(name)
    yield from (value,) if isinstance(value, str) else value or ()


def _has_index(prefix: Path) -> bool:
    return os.path.isfile(index_path(str(prefix)))


def _has_checkpoints(folder: Path) -> bool:
    try:
        return bool(complete_checkpoints(folder))
    except OSError:
        return False  # The check of the parameter reports it.


# Parameters with paths -> whether such a file or folder is there.
_PRESENT: dict[str, Callable[[Path], bool]] = {
    "data_path": _has_index,
    **{f"{part}_data_paths": _has_index for part in ("train", "valid", "test")},
    "vocab_file": os.path.isfile,
    "merge_file": os.path.isfile,
    "load": _has_checkpoints,
}
