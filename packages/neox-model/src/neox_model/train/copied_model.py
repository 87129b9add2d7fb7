"""A copy of the weights in training, in the model that generates and scores texts.

That model computes like `neox-launch generate` and `neox-launch evaluate`, for every engine, ZeRO stage and
partition of a pipeline. The copy exists during an evaluation: the rank's part of the model, whole, in the
training's precision.
"""

import torch
from torch import distributed, nn

from neox_model.assembly.zero_sharding import whole_parameter
from neox_model.checkpoint.outcome import gather
from neox_model.errors import ModelError
from neox_model.generate.forward import Forward
from neox_model.generate.run import build_forward_pass
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.compression import copy_compression
from neox_model.train.training import Training

__all__ = ["copied_forward", "copy_weights"]


def copied_forward(training: Training) -> Forward:
    """Return the forward pass of a copy of the model in training. Collective over all ranks.

    It has the weights that a checkpoint of this moment contains.
    """
    resolved = training.resolved
    forward = build_forward_pass(resolved.model, resolved.run, training.groups, training.tokenizer)
    with training.engine.update.with_shared_weights():
        copy_weights(training.model, forward.model, training.groups)
        copy_compression(training.model, forward.model, training.state.iteration, training.groups)
    return forward


def copy_weights(source: nn.Module, target: nn.Module, groups: Groups) -> None:
    """Copy the parameters of a model to another one, by logical name. Collective over all ranks.

    Pipeline stages of the two may have different layers: each parameter is sent by the first stage that has
    it.

    Raises:
        ModelError: the source lacks a parameter of the target.
    """
    own, wanted = dict(named_logical_parameters(source)), dict(named_logical_parameters(target))
    missing, sent = set(wanted), set()
    for stage, held in enumerate(_stages(own, groups)):
        for name, shape, dtype in held:
            if name in sent:
                continue
            sent.add(name)
            value = _value(own.get(name) if stage == groups.pipe.rank else None, shape, dtype, stage, groups)
            if name in wanted:
                wanted[name].data.copy_(value)
                missing.remove(name)
    if missing:
        raise ModelError(f"the model in training has no {', '.join(sorted(missing))}; report this error")


def _stages(own: dict[str, nn.Parameter], groups: Groups) -> list[list[tuple[str, torch.Size, torch.dtype]]]:
    """Return names, shapes of this tensor-parallel rank, and dtypes of the parameters of each stage."""
    held = []
    for name, parameter in own.items():
        value = whole_parameter(parameter, groups)
        held.append((name, value.shape, value.dtype))
    if groups.pipe.size == 1:
        return [held]
    every = gather(groups.control, held)
    return [every[rank] for rank in groups.pipe.ranks]


def _value(
    parameter: nn.Parameter | None, shape: torch.Size, dtype: torch.dtype, stage: int, groups: Groups
) -> torch.Tensor:
    """Return the values of a parameter on every stage."""
    if groups.pipe.size == 1:
        assert parameter is not None, "the only stage has all parameters"
        return whole_parameter(parameter, groups)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    if parameter is None:
        value = torch.empty(shape, dtype=dtype, device=device)
    else:
        value = whole_parameter(parameter, groups)
    distributed.broadcast(value, groups.pipe.ranks[stage], group=groups.pipe.process_group)
    return value
