"""Finds why a program cannot load the checkpoints that its configuration names, with only their manifests."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from neox_config import NeoXConfig, Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.objective import is_retrieval
from neox_config.facts.checkpoints import (
    LATEST,
    MANIFEST,
    checkpoint_name,
    complete_checkpoints,
    gpt_neox_checkpoint,
    is_checkpoint,
    is_gpt_neox,
    iteration_of,
)
from neox_config.facts.stores import is_url
from neox_config.problems import COMMAND_LINE, Problem, place_of
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_config.spec.refusals import refusals_of

__all__ = [
    "base_for_adapters",
    "check_loaded",
    "checkpoint_to_load",
    "checkpoint_to_resume_from",
    "continues_training",
    "has_local_checkpoints",
    "load_remedy",
    "masked_model",
    "teacher_to_load",
    "why_no_checkpoint",
]

_NO_CHECKPOINT = "contains no checkpoint"
_WRONG_LATEST = "has a file latest that names "
_GPT_NEOX = ("is a checkpoint of GPT-NeoX", "contains a checkpoint of GPT-NeoX")
# Programs that load the whole model in `load`.
_LOADING = ("train", "generate", "serve", "evaluate")


def check_loaded(resolved: Resolved, *, program: str) -> list[Problem]:
    """Return why a program cannot load the checkpoint that it would load, as far as its manifest shows.

    A checkpoint that cannot be read here, or is damaged, is left to the workers.
    """
    config = resolved.config
    load = config.checkpoint.load
    if load is None or is_url(load) or has_local_checkpoints(config):
        return []
    if program not in _LOADING or (program == "train" and config.checkpoint.finetune):
        return []
    try:
        checkpoint = latest_checkpoint(Path(load))
    except OSError:
        return []
    if checkpoint is None:
        return []
    refusals = refusals_of(
        contents_of(checkpoint),
        resolved,
        trains=program == "train",
        iteration=iteration_of(checkpoint.name),
    )
    place = place_of(config.sources, "load")
    return [
        Problem("load", f"{checkpoint.name}: {refusal.what}", refusal.remedy, value=load, place=place)
        for refusal in refusals
    ]


def checkpoint_to_load(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint in `load`."""
    load = config.checkpoint.load
    if load is None:
        yield Problem(
            "load",
            "is missing",
            "add load: FOLDER, the folder in which the training saved checkpoints",
            value="",
        )
    elif has_local_checkpoints(config):
        return
    elif (reason := _why_not_loadable(load)) is not None:
        if reason == _NO_CHECKPOINT and _trains_from_the_start(config):
            yield Problem("load", "contains no checkpoint yet", _train_first(config))
        else:
            yield Problem("load", reason, load_remedy(load, reason))


def checkpoint_to_resume_from(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint in `load`, unless `load` is `save`: then the first launch finds none yet."""
    section = config.checkpoint
    if section.finetune:
        yield from checkpoint_to_load(config)
        return
    reason = None if section.load is None else _why_not_loadable(section.load)
    if section.load is None or reason is None or has_local_checkpoints(config):
        return
    if reason != _NO_CHECKPOINT:
        yield Problem("load", reason, load_remedy(section.load, reason))
    elif section.save is None or not _is_same_folder(section.load, section.save):
        remedy = "to start from new weights, leave load out or set it to the same folder as save"
        yield Problem("load", reason, f"{load_remedy(section.load, reason)}; {remedy}")


def _train_first(config: NeoXConfig) -> str:
    """Return the remedy for a model that is not trained yet, with the command if files describe it."""
    if not config.files or not all(map(os.path.isfile, config.files)):
        return "train first"
    words = [word for file in config.files for word in ("--config", file)]
    for name in ("save", "load"):
        place = place_of(config.sources, name)
        if place is not None and place.file == COMMAND_LINE:
            words += ["--set", f"{name}={config.value_of(name)}"]
    return f"train first: {shlex.join(['neox-launch', *words])}"


def _trains_from_the_start(config: NeoXConfig) -> bool:
    """Return whether a training with this configuration would save the first checkpoint to `load`."""
    section = config.checkpoint
    if section.load is None or section.save is None or section.finetune:
        return False
    return _is_same_folder(section.load, section.save)


def _is_same_folder(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def has_local_checkpoints(config: NeoXConfig) -> bool:
    """Return whether checkpoints are on the disks of the hosts that train, which may not be this host."""
    return config.checkpoint.checkpoint.use_node_local_storage


def _why_not_loadable(load: str) -> str | None:
    """Return why `load` has no checkpoint, or None if it contains or is a complete one."""
    is_one = not is_url(load) and is_checkpoint(Path(load))
    return None if is_one else why_no_checkpoint(load)


def why_no_checkpoint(folder: str) -> str | None:
    """Return why no checkpoint can be loaded from a folder, or None if it contains a complete one.

    The launch host may not reach object stores: the workers report what they find there.
    """
    if is_url(folder):
        return None
    try:
        if complete_checkpoints(Path(folder)):
            return _why_latest_is_wrong(Path(folder))
        theirs = gpt_neox_checkpoint(Path(folder))
        return _NO_CHECKPOINT if theirs is None else _GPT_NEOX[theirs != Path(folder)]
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _why_latest_is_wrong(folder: Path) -> str | None:
    """Return why the file `latest` names no checkpoint; None if it does, is missing, or cannot be read."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None  # The workers report a file that cannot be read.
    if latest_checkpoint(folder) is not None or (name and is_gpt_neox(folder / name)):
        return None
    # The old folder, if the machine stopped while a new one was replacing it.
    if (folder / f".{name}.replaced" / MANIFEST).is_file():
        return None
    return f"{_WRONG_LATEST}{name!r}, which is not a checkpoint in it"


def base_for_adapters(config: NeoXConfig) -> Iterator[Problem]:
    """Require a complete checkpoint of the model that adapters are added to.

    That is the one on which the adapters to load were trained, and without these the latest.
    """
    base = base_of_adapters(config)
    if base is None or is_url(base):
        return
    recorded, reason = _base_of_loaded(config, Path(base)), why_no_checkpoint(base)
    # Adapters record the checkpoint that they belong to, whatever `latest` names.
    if reason is not None and not (recorded is not None and reason.startswith(_WRONG_LATEST)):
        moved = "" if os.path.isdir(base) else "; if that was moved or renamed, write its new path"
        yield Problem("lora_base", reason, f"{load_remedy(base, reason, name='lora-base')}{moved}")
        return
    read = recorded or latest_checkpoint(Path(base))
    if read is None:
        return  # The workers report a file `latest` that cannot be read.
    if not (read / MANIFEST).is_file():
        what = f"does not contain {read.name}, on which the adapters in {config.checkpoint.load} were trained"
        remedy = "set it to a folder with it (keep-last-n-checkpoints deletes earlier ones)"
        yield Problem("lora_base", what, remedy)
        return
    yield from _whole_model("lora_base", read)


def _whole_model(name: str, checkpoint: Path) -> Iterator[Problem]:
    """Require that a checkpoint, whose folder a parameter names, has all files of a model."""
    contents = contents_of(checkpoint)
    if "base" in contents.get("config", {}):
        remedy = "merge them with neox-checkpoint merge, or name the folder of a whole model"
        yield Problem(name, "contains checkpoints of adapters, and no model", remedy)
    files = sorted(contents.get("files", {}))
    lacking = next((file for file in files if not (checkpoint / file).is_file()), None)
    if lacking is not None:
        yield Problem(
            name,
            f"contains {checkpoint.name} without its file {lacking}",
            "copy it again; of a checkpoint on the disks of several hosts, copy the files of all hosts into "
            "one folder",
        )


def teacher_to_load(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the teacher, unless a student that has started continues without it."""
    section = config.compression.compression_training.layer_reduction
    if not section.enabled or section.teacher is None:
        return
    if section.distill.enabled or not continues_training(config):
        yield from _start("compression_training.layer_reduction.teacher", section.teacher, called="teacher")


def masked_model(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the model that towers start from, unless a training continues."""
    folder = config.objective.bert_load
    if is_retrieval(config) and folder is not None and not continues_training(config):
        yield from _start("bert_load", folder, called="bert-load")


def continues_training(config: NeoXConfig) -> bool:
    """Return whether a training would find a checkpoint in `load`."""
    load = config.checkpoint.load
    return load is not None and (has_local_checkpoints(config) or _why_not_loadable(load) is None)


def _start(name: str, folder: str, *, called: str) -> Iterator[Problem]:
    """Require a complete checkpoint of a model in a folder that a parameter names."""
    reason = why_no_checkpoint(folder)
    if reason is not None:
        yield Problem(name, reason, load_remedy(folder, reason, name=called))
        return
    read = latest_checkpoint(Path(folder))
    if read is not None:  # The workers report a file `latest` that names none.
        yield from _whole_model(name, read)


def _base_of_loaded(config: NeoXConfig, base: Path) -> Path | None:
    """Return the checkpoint of the base on which the adapters to load were trained; None without these."""
    load = config.checkpoint.load
    if load is None or is_url(load) or has_local_checkpoints(config) or _why_not_loadable(load):
        return None
    latest = latest_checkpoint(Path(load))
    recorded = {} if latest is None else contents_of(latest).get("config", {}).get("base")
    iteration = recorded.get("iteration") if isinstance(recorded, dict) else None
    return base / checkpoint_name(iteration) if isinstance(iteration, int) else None


def load_remedy(load: str, reason: str, *, name: str = "load") -> str:
    """Return what to do about a folder from which no checkpoint can be loaded, for this reason."""
    if reason in _GPT_NEOX:
        theirs = shlex.quote(str(gpt_neox_checkpoint(Path(load))))
        return f"convert it with neox-convert from-neox {theirs} --output imported, then set {name}: imported"
    if reason.startswith(_WRONG_LATEST):
        newest = complete_checkpoints(Path(load))[-1].name
        path = shlex.quote(str(Path(load, LATEST)))
        return f"to load the complete checkpoint of the highest iteration, run: echo {newest} > {path}"
    if reason != _NO_CHECKPOINT:
        return "check the path and the permissions of its folders"
    if (Path(load) / MANIFEST).is_file() and not is_checkpoint(Path(load)):
        example = checkpoint_name(1000)
        return f"it is one, with another name: rename it to global_step and its iteration, as in {example}"
    if _is_hugging_face(Path(load)):
        return (
            f"it contains a model of Hugging Face's transformers; run: neox-convert from-hf {load} --output "
            f"FOLDER, and set {name} to that folder, or launch with its model.yml"
        )
    parent = Path(load).absolute().parent
    if why_no_checkpoint(str(parent)) is None:
        return f"write {name}: {Path(load).parent}, the folder of all checkpoints"
    return "set it to the folder in which a training saved checkpoints"


def _is_hugging_face(folder: Path) -> bool:
    """Return whether a folder looks like a model of transformers."""
    if not (folder / "config.json").is_file():
        return False
    weights = ("model.safetensors", "pytorch_model.bin")
    return any((folder / f"{name}{end}").is_file() for name in weights for end in ("", ".index.json"))
