"""A student from layers of a teacher: the weights it starts from, and the model that it is compared with."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from typing import Any

from torch import nn

from neox_config import Resolved
from neox_config.extras.compression.fields import LayerReduction
from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.facts.norms import NORM_FACTS
from neox_config.pluralize import pluralize
from neox_config.spec.resume import Change, Changes
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_stage
from neox_model.checkpoint.comparison import changes_since, log_unknown_changes
from neox_model.checkpoint.directory import find_latest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.logical import check_model_states, fill_model_states
from neox_model.checkpoint.names import is_score
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.shards import ShardReader
from neox_model.checkpoint.whole_weights import (
    WantedWeight,
    check_wanted,
    fill_wanted,
    is_continued,
    shape_problems,
    wanted_weight,
)
from neox_model.convert.checkpoints import VOCABULARY, Checkpoint
from neox_model.extras.distillation.loss import Distillation
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import Writable, model_states, named_logical_parameters

__all__ = ["add_distillation", "start_from_teacher", "teacher_names"]

logger = logging.getLogger(__name__)

_LAYERS = "layers"
# Settings of a model on which the weights of its norms depend.
_EPSILONS = {facts.epsilon for facts in NORM_FACTS.values()}
_OF_NORMS = {"norm", "use_bias_in_norms", "norm_zero_centered", *_EPSILONS}
# Settings of a model on which those of its layers do not depend; attention is compared layer by layer,
# experts and feed-forward blocks by their weights, and random blocks are drawn for the student's layers.
_NOT_OF_LAYERS = {
    *("num_layers", "attention_config", "moe_layers", "seed (of the random blocks of sparse layers)"),
    *("no_weight_tying", "max_position_embeddings", "tokenizer_type", "vocab_file"),
}


def teacher_names(names: Iterable[str], section: LayerReduction) -> dict[str, str]:
    """Return the name in the teacher of each weight of the student that is copied, by its name there.

    Scores of pruned matrices are the student's own.
    """
    found = {}
    layers = section.teacher_layer if section.module_name_prefix else None
    for name in filterfalse(is_score, names):
        first, _, rest = name.partition(".")
        if first == _LAYERS and layers:
            index, _, rest = rest.partition(".")
            found[name] = f"{_LAYERS}.{layers[int(index)]}.{rest}"
        elif any(f"{name}.".startswith(f"{other}.") for other in section.other_module_name or ()):
            found[name] = name
    return found


def start_from_teacher(
    section: LayerReduction,
    kinds: Sequence[str],
    model: nn.Module,
    *,
    load: Path | None,
    groups: Groups,
    recorded: Mapping[str, Any],
    writable: Writable,
) -> None:
    """Copy layers and modules of the teacher, unless a checkpoint of the student will be loaded. Collective.

    Args:
        section: what is copied, and from where.
        kinds: attention type of each layer of the student.
        model: this rank's part of the student, initialized.
        load: folder of the checkpoints to continue from.
        groups: this rank's process groups.
        recorded: values that this run would record in a checkpoint, compared with the teacher's.
        writable: context manager that returns the tensor to fill for a parameter; None: other ranks fill it.

    Raises:
        CheckpointError: the teacher is missing or damaged, does not have what the student copies, or
            computes something else with it.
    """
    copies = section.module_name_prefix or section.other_module_name
    if not (section.enabled and copies) or is_continued(load, groups):
        return
    folder, checkpoint = _open_teacher(section, groups)
    changes = changes_since(checkpoint.manifest, recorded)
    if groups.world.rank == 0:
        log_unknown_changes(changes)
    named = dict(named_logical_parameters(model))
    sources = teacher_names(named, section)
    every = {
        name: each for found in all_gather_object(groups.control, sources) for name, each in found.items()
    }
    wanted = [wanted_weight(sources[name], parameter) for name, parameter in named.items() if name in sources]
    # Not masks and ranges, which are the student's own, as scores are.
    own_states = [state for state in model_states(model) if ".compression." not in state.name]
    of_states = teacher_names([state.name for state in own_states], section)
    states = [replace(each, name=of_states[each.name]) for each in own_states if each.name in of_states]
    with shared_outcome(groups.control, f"reading the teacher {folder}", keeps_bugs=True):
        _check(section, kinds, checkpoint, wanted, every, changes)
        reader = ShardReader(folder, checkpoint.manifest)
        check_wanted(wanted, reader)
        check_model_states(states, checkpoint.manifest, reader)
    fill_wanted(wanted, reader, writable=writable)
    fill_model_states(states, reader)
    total = len(set().union(*all_gather_object(groups.control, set(named))))
    logger.info("%d of %d weights of the student are those of %s", len(every), total, folder)


def _open_teacher(section: LayerReduction, groups: Groups) -> tuple[Path, Checkpoint]:
    directory, folder = Path(str(section.teacher)), None
    with shared_outcome(groups.control, f"finding a checkpoint in {directory}", keeps_bugs=True):
        if groups.world.rank == 0:
            folder = find_latest(directory)
            if folder is None:
                raise CheckpointError(
                    f"{directory} contains no checkpoint; set compression_training.layer_reduction.teacher "
                    "to the folder of the teacher's"
                )
    found: Path = all_gather_object(groups.control, folder)[0]
    with shared_outcome(groups.control, f"reading the teacher {found}", keeps_bugs=True):
        return found, Checkpoint(found)


def _check(
    section: LayerReduction,
    kinds: Sequence[str],
    checkpoint: Checkpoint,
    wanted: Sequence[WantedWeight],
    every: dict[str, str],
    changes: Changes,
) -> None:
    """Require that both models have all weights of what is copied, and compute the same with them."""
    stored, sources = checkpoint.manifest.weight_names, set(every.values())
    copied = [f"{_LAYERS}.{layer}." for layer in section.teacher_layer or () if section.module_name_prefix]
    copied += [f"{other}." for other in section.other_module_name or ()]
    problems = [f"{name} is not in the checkpoint" for name in sorted(sources - stored)]
    problems += [
        f"{name} is in the checkpoint but the student has no such weight"
        for name in sorted(stored - sources)
        if name.startswith(tuple(copied))
    ]
    problems += [
        f"{other} in other_module_name is not a module with separate weights"
        for other in section.other_module_name or ()
        if not any(f"{name}.".startswith(f"{other}.") for name in every)
    ]
    problems += shape_problems(((weight.name, weight.shape) for weight in wanted), checkpoint.manifest)
    if sources & set(VOCABULARY):
        problems += _other_tokenizer(changes)
    problems += [str(change) for change in changes.model if _decides(change, sources)]
    if not problems:
        problems += _other_attention(kinds, checkpoint.model.kinds, every)
    if problems:
        raise CheckpointError(
            f"the teacher {checkpoint.folder} does not fit the student: {problems[0]}; set the architecture "
            "of the teacher, of which only the number of layers may differ, or do not copy what differs "
            "(module_name_prefix, other_module_name), and let the student learn from it with distill"
        )


def _decides(change: Change, copied: Collection[str]) -> bool:
    """Return True if copied weights compute something else with the other value of a setting."""
    if change.label == "no_weight_tying" and TOKEN_EMBEDDING in copied:
        # The student's embedding would be its head, which is another matrix of the teacher.
        return not change.here
    if any(name.startswith(f"{_LAYERS}.") for name in copied):
        return change.label not in _NOT_OF_LAYERS and not change.label.startswith("compression_training.")
    return change.label in _OF_NORMS and any(name.startswith("final_norm.") for name in copied)


def _other_attention(own: Sequence[str], theirs: Sequence[str], copied: Mapping[str, str]) -> list[str]:
    """Return a clause for each copied layer with another attention type than in the teacher."""
    pairs = {
        (int(name.split(".")[1]), int(source.split(".")[1]))
        for name, source in copied.items()
        if name.startswith(f"{_LAYERS}.")
    }
    return [
        f"attention-config: its layer {teacher} has {theirs[teacher]} attention, and layer {student} of the "
        f"student, which copies it, {own[student]} attention"
        for student, teacher in sorted(pairs)
        if own[student] != theirs[teacher]
    ]


def _other_tokenizer(changes: Changes) -> list[str]:
    problem = "its tokenizer is another one, whose tokens have other ids"
    return [problem for change in changes.model if change.label == "vocab_file"]


def add_distillation(
    resolved: Resolved, model: nn.Module, *, groups: Groups, recorded: Mapping[str, Any], vocab_size: int
) -> None:
    """Let a student in training compute the loss with its teacher, if it is configured. Collective.

    Args:
        resolved: the configuration.
        model: this rank's part of the student.
        groups: this rank's process groups.
        recorded: values that this run would record in a checkpoint, compared with the teacher's.
        vocab_size: the tokenizer's vocabulary size.

    Raises:
        CheckpointError: the teacher is missing or damaged, or its logits or hidden states cannot be compared
            with the student's.
    """
    section = resolved.config.compression.compression_training.layer_reduction
    options = section.distill
    if not (section.enabled and options.enabled):
        return
    assert isinstance(model, SequentialModel), "a rule refuses pipelines"
    folder, checkpoint = _open_teacher(section, groups)
    # The teacher's parameters in the student's layout.
    update = {"parallelism": resolved.config.parallelism, "precision": resolved.config.precision}
    like = Resolved.of(checkpoint.resolved.config.model_copy(update=update), resolved.sizes)
    teacher = build_stage(like.model, like.run, groups, vocab_size=vocab_size).eval()
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(DTYPES[resolved.run.precision.weights])
    wanted = [wanted_weight(*named) for named in named_logical_parameters(teacher)]
    own, theirs = resolved.config.model, checkpoint.resolved.config.model
    with shared_outcome(groups.control, f"reading the teacher {folder}", keeps_bugs=True):
        problems = _other_tokenizer(changes_since(checkpoint.manifest, recorded))
        stored = checkpoint.manifest.weight_names
        problems += [f"it contains no {weight.name}" for weight in wanted if weight.name not in stored]
        problems += shape_problems(((weight.name, weight.shape) for weight in wanted), checkpoint.manifest)
        if own.objective != theirs.objective:
            problems.append(f"its objective is {theirs.objective}, and the student's {own.objective}")
        if own.seq_length > theirs.max_position_embeddings:
            problems.append(
                f"it has {pluralize(theirs.max_position_embeddings, 'position')}, and seq-length is "
                f"{own.seq_length}"
            )
        if own.hidden_size != theirs.hidden_size and options.hidden_states_weight:
            problems.append(f"its hidden-size is {theirs.hidden_size}, and the student's {own.hidden_size}")
        last = max(section.teacher_layer or (0,))
        if last >= theirs.num_layers and options.hidden_states_weight:
            layers = pluralize(theirs.num_layers, "layer")
            problems.append(f"it has {layers}, and teacher_layer contains {last}")
        if problems:
            raise CheckpointError(f"the teacher {folder} does not fit: {problems[0]}; use another teacher")
        reader = ShardReader(folder, checkpoint.manifest)
        check_wanted(wanted, reader)
        check_model_states(model_states(teacher), checkpoint.manifest, reader)
    fill_wanted(wanted, reader, writable=nullcontext)
    fill_model_states(model_states(teacher), reader)
    pairs = list(enumerate(section.teacher_layer or ())) if options.hidden_states_weight else []
    model.distillation = Distillation(
        list(teacher.stack),
        layers=pairs,
        logits_share=options.logits_share,
        temperature=options.temperature,
        hidden_states_weight=options.hidden_states_weight,
        group=groups.model,
    )
    logger.info("the loss of the student is compared with that of the teacher %s", folder)
