"""Recognize a run folder that was moved or copied: its configuration still names its former place."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.facts.checkpoints import complete_checkpoints
from neox_config.facts.stores import is_url
from neox_config.problems import Problem
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_launcher.plan.dataset_files import index_path

__all__ = ["name_moved_folder", "refuse_copied_folder", "refuse_moved_checkpoints"]


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
        f"the folder was moved: write {new} in place of {old} everywhere in {file}{_sed(old, new, file)}",
        value=first.value,
    )
    return [problem, *(other for other in problems if other.name not in same)]


def refuse_moved_checkpoints(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to start anew with `load` where this training saved before its folder was moved.

    The checkpoints next to the configuration file have recorded that `save`.
    """
    section, moved = config.checkpoint, _moved(config, "load")
    if moved is None or section.load is None or section.save != section.load:
        return
    old, new, _ = moved
    checkpoint = latest_checkpoint(new / Path(section.load).relative_to(old))
    if checkpoint is not None and contents_of(checkpoint).get("config", {}).get("save") == section.save:
        yield Problem("load", "does not exist", "", value=section.load)


def refuse_copied_folder(config: NeoXConfig) -> Iterator[Problem]:
    """Refuse to train with the configuration of a copied folder, which still names the original folder.

    The training would continue in the original, and may delete its old checkpoints. A folder is a copy if the
    configuration file of the same name in the original is another file, and the copy has a file or folder of
    its own under a name that the configuration names in the original.
    """
    for name in _WRITTEN:
        place, path = config.sources.get(name), config.value_of(name)
        if place is None or place.file not in config.files or path is None or not os.path.isabs(path):
            continue
        file = Path(place.file).absolute()
        if Path(path).is_relative_to(file.parent):
            continue
        original = next((each for each in (Path(path), *Path(path).parents) if _is_other(file, each)), None)
        if original is None or not (common := list(dict.fromkeys(_copied(config, place.file, original)))):
            continue
        yield Problem(
            name,
            f"is in {original}, but {place.file} is in {file.parent}, which looks like a copy of that folder "
            f"(both have {', '.join(common)}): the training would write to the original",
            f"write {file.parent} in place of {original} in {place.file}"
            f"{_sed(original, file.parent, place.file)}; or, to train in the original, use "
            f"{original / file.name}",
            value=path,
        )
        return


def _is_other(file: Path, folder: Path) -> bool:
    """Return whether a folder has another file of the same name."""
    there = folder / file.name
    return os.path.isfile(there) and not os.path.samefile(there, file)


def _copied(config: NeoXConfig, file: str, original: Path) -> Iterator[str]:
    """Yield what a configuration file names in the original, as far as the folder of the file has it, too."""
    for name in (*_PRESENT, *_WRITTEN):
        place = config.sources.get(name)
        for path in _paths(config, name) if place is not None and place.file == file else ():
            if not Path(path).is_relative_to(original) or Path(path) == original:
                continue
            relative = Path(path).relative_to(original)
            here = Path(file).parent / relative
            # Not a link to the original, which a training that shares it may have.
            is_there = os.path.exists(here) or _has_index(here)
            if is_there and here.resolve() != Path(path).resolve():
                yield str(relative)


def _sed(old: Path, new: Path, file: str) -> str:
    """Return the command that does so, in parentheses; empty for names that sed would read as patterns."""
    if set(f"{old}{new}") & set("#&\\[]*^$\n"):
        return ""
    # A longer name that begins like the old one is another folder.
    change = shlex.quote(rf's#{old}\([/", ]\|$\)#{new}\1#g')
    return f" (sed -i {change} {shlex.quote(file)})"


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


# Parameters with folders to which a training writes.
_WRITTEN = ("save", "log_dir")
# Parameters with paths -> whether such a file or folder is there.
_PRESENT: dict[str, Callable[[Path], bool]] = {
    "data_path": _has_index,
    **{f"{part}_data_paths": _has_index for part in ("train", "valid", "test")},
    "vocab_file": os.path.isfile,
    "merge_file": os.path.isfile,
    "load": _has_checkpoints,
}
