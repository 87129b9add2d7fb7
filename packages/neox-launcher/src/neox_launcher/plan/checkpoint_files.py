"""Finds why a program cannot load the checkpoints that its configuration names, with only their manifests."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from neox_config import NeoXConfig, Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.objective import is_retrieval
from neox_config.derive.problems import placed
from neox_config.facts.checkpoints import (
    complete_checkpoints,
    gpt_neox_checkpoint,
    is_checkpoint,
    iteration_of,
)
from neox_config.facts.stores import is_url
from neox_config.problems import Problem
from neox_config.spec.recorded import contents_of, latest_checkpoint
from neox_config.spec.refusals import refusals_of

__all__ = [
    "base_for_adapters",
    "check_loaded",
    "checkpoint_to_load",
    "checkpoint_to_resume_from",
    "continues_training",
    "has_local_checkpoints",
    "masked_model",
    "required_checkpoint",
    "teacher_to_load",
]

_NO_CHECKPOINT = "contains no checkpoint"
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
    return [
        placed(config, Problem("load", f"{checkpoint.name}: {refusal.what}", refusal.remedy))
        for refusal in refusals
    ]


def checkpoint_to_load(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint in `load`."""
    section = config.checkpoint
    if section.load is None:
        remedy = "add load: FOLDER, the folder in which the training saved checkpoints"
        yield Problem("load", "is missing", remedy, value="")
        return
    reason = _why_not_loadable(config)
    if reason == _NO_CHECKPOINT and not section.finetune and _loads_what_it_saves(config):
        remedy = "train first: start neox-launch with the same configuration"
        yield Problem("load", "contains no checkpoint yet", remedy)
    elif reason is not None:
        yield Problem("load", reason, _remedy(section.load, reason, name="load"))


def checkpoint_to_resume_from(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint in `load`, unless `load` is `save`: then the first launch finds none yet."""
    section = config.checkpoint
    if section.finetune:
        yield from checkpoint_to_load(config)
        return
    reason = None if section.load is None else _why_not_loadable(config)
    if section.load is None or reason is None or (reason == _NO_CHECKPOINT and _loads_what_it_saves(config)):
        return
    remedy = _remedy(section.load, reason, name="load")
    if reason == _NO_CHECKPOINT:
        remedy += "; to start from new weights, leave load out or set it to the same folder as save"
    yield Problem("load", reason, remedy)


def _loads_what_it_saves(config: NeoXConfig) -> bool:
    load, save = config.checkpoint.load, config.checkpoint.save
    return load is not None and save is not None and Path(load).absolute() == Path(save).absolute()


def has_local_checkpoints(config: NeoXConfig) -> bool:
    """Return whether checkpoints are on the disks of the hosts that train, which may not be this host."""
    return config.checkpoint.checkpoint.use_node_local_storage


def _why_not_loadable(config: NeoXConfig) -> str | None:
    """Return why `load` has no checkpoint; None if it contains or is a complete one, or other hosts know."""
    load = config.checkpoint.load or ""
    if has_local_checkpoints(config) or (not is_url(load) and is_checkpoint(Path(load))):
        return None
    return _why_no_checkpoint(load)


def _why_no_checkpoint(folder: str) -> str | None:
    """Return why no checkpoint can be loaded from a folder, or None if it contains a complete one.

    The launch host may not reach object stores: the workers report what they find there.
    """
    path = Path(folder)
    try:
        if is_url(folder) or complete_checkpoints(path):
            return None
        theirs = gpt_neox_checkpoint(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return _NO_CHECKPOINT if theirs is None else _GPT_NEOX[theirs != path]


def base_for_adapters(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the model that adapters are added to; the workers check which one it is."""
    base = base_of_adapters(config)
    if base is not None:
        yield from required_checkpoint("lora_base", base)


def teacher_to_load(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the teacher, unless a student that has started continues without it."""
    section = config.compression.compression_training.layer_reduction
    is_read = section.enabled and (section.distill.enabled or not continues_training(config))
    if section.teacher is not None and is_read:
        yield from required_checkpoint("compression_training.layer_reduction.teacher", section.teacher)


def masked_model(config: NeoXConfig) -> Iterator[Problem]:
    """Require a checkpoint of the model that towers start from, unless a training continues."""
    folder = config.objective.bert_load
    if is_retrieval(config) and folder is not None and not continues_training(config):
        yield from required_checkpoint("bert_load", folder)


def continues_training(config: NeoXConfig) -> bool:
    """Return whether a training would find a checkpoint in `load`."""
    return config.checkpoint.load is not None and _why_not_loadable(config) is None


def required_checkpoint(name: str, folder: str) -> Iterator[Problem]:
    """Require a complete checkpoint in the folder that a parameter names."""
    reason = _why_no_checkpoint(folder)
    if reason is not None:
        last = name.rpartition(".")[2]
        yield Problem(name, reason, _remedy(folder, reason, name=last.replace("_", "-")))


def _remedy(folder: str, reason: str, *, name: str) -> str:
    """Return what to do about a folder from which no checkpoint can be loaded, for this reason."""
    if reason in _GPT_NEOX:
        theirs = shlex.quote(str(gpt_neox_checkpoint(Path(folder))))
        return f"convert it with neox-convert from-neox {theirs} --output imported, then set {name}: imported"
    if reason != _NO_CHECKPOINT:
        return "check the path and the permissions of its folders"
    if Path(folder, "config.json").is_file():
        return (
            f"it contains a model of Hugging Face's transformers; run: neox-convert from-hf {folder} "
            f"--output FOLDER, and set {name} to that folder, or launch with its model.yml"
        )
    if _why_no_checkpoint(str(Path(folder).absolute().parent)) is None:
        return f"write {name}: {Path(folder).parent}, the folder of all checkpoints"
    return "set it to the folder in which a training saved checkpoints"
