"""Notes on a configuration that can run: what a user may not expect of it."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.objective import is_encoder
from neox_config.derive.problems import placed
from neox_config.facts.checkpoints import complete_checkpoints
from neox_config.facts.splits import parts_without_share, shares_left_out
from neox_config.facts.stores import is_url
from neox_config.problems import COMMAND_LINE, Problem, place_of
from neox_config.schema.paths import written_paths
from neox_launcher.plan.checkpoint_files import has_local_checkpoints
from neox_launcher.plan.dataset_files import data_path
from neox_launcher.plan.preflight import empty_parts_of, problem_of_split

__all__ = ["notes_on_data", "notes_on_load", "notes_on_save", "unused_by_hand"]


def unused_by_hand(config: NeoXConfig) -> list[Problem]:
    """Return notes about given hosts and devices, which a worker without the launcher does not use."""
    what = "has no effect: this is one worker, started without neox-launch"
    return [
        placed(config, Problem(name, what, "use neox-launch"))
        for name in ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
        if name in config.sources and config.value_of(name) not in (None, -1, 1)
    ]


def notes_on_data(config: NeoXConfig) -> list[Problem]:
    """Return notes about labels that are not read, and about evaluations for which no document is left."""
    return [placed(config, note) for note in (*_notes_on_labels(config), *_notes_on_split(config))]


def _notes_on_labels(config: NeoXConfig) -> Iterator[Problem]:
    """Note a dataset of labels next to one of tokens, as `--loss-mask` writes it, that is not read."""
    data = config.data
    if is_encoder(config) or data.train_label_data_paths is not None:
        return
    name, instead = "train_data_paths", ""
    if data.data_path is not None:
        name, instead = "data_path", ", in place of data-path,"
    for prefix in data.train_data_paths or (data.data_path or "",):
        stem = prefix.removesuffix("_document")
        for labels in (f"{stem}_label_document", f"{stem.removesuffix('_text')}_label_document"):
            if os.path.isfile(data_path(labels)):
                yield Problem(
                    name,
                    f"has labels next to it, {labels}, that are not used, so the loss counts all tokens",
                    f"to count only those with a label, name the datasets in train-data-paths{instead} and "
                    "their labels in train-label-data-paths, in the same order, and those for validation "
                    "likewise",
                    value=prefix,
                )
                return


def _notes_on_split(config: NeoXConfig) -> Iterator[Problem]:
    """Note a part of the split without a document, or without a share if that was requested or left out."""
    data = config.data
    if data.data_path is None or not config.training.eval_iters:
        return
    without = parts_without_share(data.split)
    is_requested = "eval_iters" in config.sources or "eval_interval" in config.sources
    if "valid" in without and (is_requested or shares_left_out(data.split)):
        parts = "validation and the test, which are" if "test" in without else "validation, which is"
        what = f"has no share for {parts} therefore skipped"
        yield problem_of_split(config, what, "write three numbers, as in 969,30,1, or set eval-iters: 0")
    count, empty = empty_parts_of(config)
    for part, called in (("valid", "validation"), ("test", "the test")):
        if part in empty:
            what = (
                f"leaves no document for {called}, which is therefore skipped: {data.data_path} has {count:,}"
            )
            yield problem_of_split(config, what, "give it a larger share, or set eval-iters: 0")


def notes_on_save(config: NeoXConfig) -> list[Problem]:
    """Return a note if `save` has checkpoints that the training does not continue, and would replace."""
    section = config.checkpoint
    if section.save is None or has_local_checkpoints(config):
        return []
    continues = section.load is not None and Path(section.load).resolve() == Path(section.save).resolve()
    saved = _checkpoints_in(section.save)
    if not saved or (continues and not section.finetune):
        return []
    note = Problem(
        "save",
        f"has checkpoints, up to {saved[-1].name}, that this training does not continue; it replaces those "
        "of the iterations that it saves",
        f"to continue them, set load: {section.save} and finetune: false; to keep them, use another folder",
    )
    return [placed(config, note)]


def notes_on_load(config: NeoXConfig) -> list[Problem]:
    """Return a note if a program reads `load`, and there are checkpoints in another folder, `save`."""
    section, place = config.checkpoint, place_of(config.sources, "load")
    is_chosen = place is not None and place.file == COMMAND_LINE
    if section.save is None or section.load is None or is_url(section.load):
        return []
    if is_chosen or has_local_checkpoints(config):
        return []
    save, load = Path(section.save), Path(section.load).resolve()
    saved = _checkpoints_in(section.save)
    if not saved or save.resolve() in (load, load.parent):
        return []
    what = f"is read, and not save: {save}, which has checkpoints up to {saved[-1].name}"
    remedy = f"for these, add --set load={shlex.quote(written_paths(str(save)))}"
    return [placed(config, Problem("load", what, remedy))]


def _checkpoints_in(folder: str) -> list[Path]:
    """Return the checkpoints in a folder; none if it cannot be read, which the workers report."""
    try:
        return complete_checkpoints(Path(folder))
    except OSError:
        return []
