"""Notes on a configuration that can run: what a user may not expect of it."""

import os
import shlex
from contextlib import suppress
from pathlib import Path

from neox_config import NeoXConfig, finite_json
from neox_config.facts.checkpoints import complete_checkpoints
from neox_config.facts.records import RECORD
from neox_config.facts.splits import parts_without_share, shares_left_out
from neox_config.facts.stores import is_url
from neox_config.problems import COMMAND_LINE, Problem, in_words, place_of
from neox_config.schema.paths import written_paths
from neox_launcher.plan.checkpoint_files import continues_training, has_local_checkpoints
from neox_launcher.plan.preflight import empty_parts_of, problem_of_split
from neox_launcher.plan.unused_labels import notes_on_labels

__all__ = ["notes_on_data", "notes_on_load", "notes_on_record", "notes_on_save", "unused_by_hand"]


def unused_by_hand(config: NeoXConfig) -> list[Problem]:
    """Return notes about given hosts and devices, which a worker without the launcher does not use."""
    found = []
    for name in ("hostfile", "include", "exclude", "num_nodes", "num_gpus"):
        value, place = config.value_of(name), config.sources.get(name)
        if place is not None and value not in (None, -1, 1):
            what = "has no effect: this is one worker, started without neox-launch"
            found.append(Problem(name, what, "use neox-launch", value=in_words(value), place=place))
    return found


def notes_on_data(config: NeoXConfig) -> list[Problem]:
    """Return notes about labels that are not read, and about evaluations for which no document is left."""
    count, empty = empty_parts_of(config)
    words = {"valid": "validation", "test": "the test"}
    return [*notes_on_labels(config), *_notes_on_shares(config)] + [
        problem_of_split(
            config,
            f"leaves no document for {words[part]}, which is therefore skipped: {config.data.data_path} has "
            f"{count:,}",
            "give it a larger share, or set eval-iters: 0",
        )
        for part in empty
        if part in words and config.training.eval_iters
    ]


def _notes_on_shares(config: NeoXConfig) -> list[Problem]:
    """Return a note if the split has no share for validation, though it was requested or merely left out."""
    split = config.data.split
    without = parts_without_share(split)
    is_requested = not {"eval_iters", "eval_interval"}.isdisjoint(config.sources) or shares_left_out(split)
    if config.data.data_path is None or not config.training.eval_iters:
        return []
    if "valid" not in without or not is_requested:
        return []
    parts = "validation and the test, which are" if "test" in without else "validation, which is"
    what = f"has no share for {parts} therefore skipped"
    return [problem_of_split(config, what, "write three numbers, as in 969,30,1, or set eval-iters: 0")]


def notes_on_save(config: NeoXConfig) -> list[Problem]:
    """Return a note if `save` has checkpoints that the training does not continue, and would replace."""
    section = config.checkpoint
    if section.save is None or section.checkpoint.use_node_local_storage:
        return []
    save = Path(section.save)
    continues = section.load is not None and Path(section.load).resolve() == save.resolve()
    if continues and not section.finetune:
        return []
    try:
        saved = complete_checkpoints(save)
    except OSError:
        # The workers report a folder that cannot be read.
        return []
    if not saved:
        return []
    last, kept = saved[-1].name, section.keep_last_n_checkpoints
    deleted = f" until keep-last-n-checkpoints: {kept}, which counts them, deletes them" if kept else ""
    anew = " and finetune: false" if section.finetune else ""
    return [
        Problem(
            "save",
            f"has checkpoints, up to {last}, that this training does not continue\n"
            "its first save makes its own checkpoint the latest; old ones of the same iterations are "
            f"replaced, and the others stay{deleted}",
            f"to continue them, set load: {section.save}{anew}; to leave them as they are, use another "
            f"folder; to load an old one later, name it: load: {Path(section.save, last)}",
            value=section.save,
            place=place_of(config.sources, "save"),
        )
    ]


def notes_on_load(config: NeoXConfig) -> list[Problem]:
    """Return a note if a program reads `load`, and there are checkpoints in another folder, `save`."""
    section, place = config.checkpoint, place_of(config.sources, "load")
    is_chosen = place is not None and place.file == COMMAND_LINE
    if section.save is None or section.load is None or is_url(section.load):
        return []
    if is_chosen or has_local_checkpoints(config):
        return []
    save, load = Path(section.save), Path(section.load).resolve()
    if save.resolve() in (load, load.parent):
        return []
    try:
        saved = complete_checkpoints(save)
    except OSError:
        return []  # Only trainings require this folder.
    if not saved:
        return []
    what = f"is read, and not save: {save}, which has checkpoints up to {saved[-1].name}"
    remedy = f"for these, add --set load={shlex.quote(written_paths(str(save)))}"
    return [Problem("load", what, remedy, value=section.load, place=place)]


def notes_on_record(config: NeoXConfig) -> list[Problem]:
    """Return a note if `log_dir` has the record of another training, which this one renames or adds to."""
    folder, section = config.logging.log_dir, config.checkpoint
    if folder is None or not os.path.isfile(Path(folder, RECORD)):
        return []
    what = (
        f"has the record of an earlier training ({RECORD}), and this one starts from the beginning\n"
        "the earlier record is kept as metrics.1.jsonl, or the next free number"
    )
    if not section.finetune and continues_training(config):
        load = str(section.load)
        saved = _folders_of_saves(Path(folder, RECORD))
        is_same = saved is None or not saved.isdisjoint((Path(load).resolve(), Path(load).resolve().parent))
        if is_same or is_url(load):
            return []
        into = f", which saved to {', '.join(map(str, sorted(saved)))}" if saved else ""
        what = (
            f"has the record of another training ({RECORD}){into}\n"
            f"this one continues a checkpoint of {load}, and appends to the record"
        )
    return [
        Problem(
            "log_dir",
            what,
            "to keep both apart, set log-dir to another folder",
            value=folder,
            place=place_of(config.sources, "log_dir"),
        )
    ]


def _folders_of_saves(record: Path) -> set[Path] | None:
    """Return the folders in which the attempts of a record saved; None if none got as far as to name it.

    The set is empty for a record that another program wrote.
    """
    kinds, found = set(), set()
    with record.open("rb") as lines:
        # Parsing every line of a long run would take seconds.
        for line in (line for line in lines if b'"event": "start"' in line or b'"event": "attempt"' in line):
            with suppress(ValueError, RecursionError):  # A line that a kill cut short.
                event = finite_json.loads(line.decode())
                kinds.add(event.get("event"))
                found.add(event.get("save"))
    if kinds == {"attempt"} or not record.stat().st_size:
        return None
    return {Path(folder).resolve() for folder in found if folder}
