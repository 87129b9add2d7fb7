"""Notes on a configuration that can run: what a user may not expect of it."""

import shlex
from pathlib import Path

from neox_config import NeoXConfig
from neox_config.derive.problems import placed
from neox_config.facts.checkpoints import complete_checkpoints
from neox_config.facts.stores import is_url
from neox_config.problems import COMMAND_LINE, Problem, place_of
from neox_config.schema.config import section_of
from neox_config.schema.paths import written_paths
from neox_launcher.plan.usable_documents import skipped_evaluations

__all__ = ["is_noted", "notes_on_data", "notes_on_load", "notes_on_save", "unused_by_hand"]


# Sections whose notes other programs than a run print, besides those about their command line.
_THEIR_OWN = {
    "generate": ("generation",),
    "serve": ("generation", "serving"),
    "evaluate": ("generation",),
    "doctor": ("launch",),
}


def is_noted(note: Problem, program: str) -> bool:
    """Return whether a program prints a note about the configuration, whose files describe a run."""
    is_given = note.place is not None and note.place.file == COMMAND_LINE
    try:
        own = section_of(note.name.partition(".")[0]) in _THEIR_OWN.get(program, ())
    except KeyError:
        own = False
    return program == "train" or is_given or own


def unused_by_hand(config: NeoXConfig) -> list[Problem]:
    """Return notes about given hosts and devices, which a worker without the launcher does not use."""
    what = "has no effect: this is one worker, started without neox-launch"
    return [
        placed(config, Problem(name, what, "use neox-launch"))
        for name in ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
        if name in config.sources and config.value_of(name) not in (None, -1, 1)
    ]


def notes_on_data(config: NeoXConfig) -> list[Problem]:
    """Return notes about evaluations for which no document is left."""
    return [placed(config, note) for note in skipped_evaluations(config)]


def notes_on_save(config: NeoXConfig) -> list[Problem]:
    """Return a note if `save` has checkpoints that the run does not continue, and would replace."""
    section = config.checkpoint
    if section.save is None or config.checkpoint.checkpoint.use_node_local_storage:
        return []
    continues = section.load is not None and Path(section.load).resolve() == Path(section.save).resolve()
    saved = _checkpoints_in(section.save)
    if not saved or (continues and not section.finetune):
        return []
    note = Problem(
        "save",
        f"has checkpoints up to {saved[-1].name} that this run does not continue and may replace",
        f"use another folder, or set load: {section.save}" + " and finetune: false" * section.finetune,
    )
    return [placed(config, note)]


def notes_on_load(config: NeoXConfig) -> list[Problem]:
    """Return a note if a program reads `load`, and there are checkpoints in another folder, `save`."""
    section, place = config.checkpoint, place_of(config.sources, "load")
    is_chosen = place is not None and place.file == COMMAND_LINE
    if section.save is None or section.load is None or is_url(section.load):
        return []
    if is_chosen or config.checkpoint.checkpoint.use_node_local_storage:
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
