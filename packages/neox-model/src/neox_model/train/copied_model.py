"""A copy of the weights in training, in the model that generates and scores texts.

That model computes like `neox-launch generate` and `neox-launch evaluate`, for every engine, ZeRO stage and
partition of a pipeline. The copy exists during an evaluation: the rank's part of the model, whole, in the
run's precision.
"""

import torch
from torch import Tensor, distributed, nn

from neox_model.assembly.choices import computing_device
from neox_model.assembly.zero_sharding import whole_parameter
from neox_model.errors import ModelError
from neox_model.generate.forward import Forward
from neox_model.generate.run import build_forward_pass
from neox_model.parallel.collectives import all_gather
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import is_expert, named_logical_parameters
from neox_model.train.run import Run

__all__ = ["copied_forward", "copy_weights"]


def copied_forward(run: Run) -> Forward:
    """Return the forward pass of a copy of the model in training. Collective over all ranks.

    It has the weights that a checkpoint of this moment contains.
    """
    resolved = run.resolved
    forward = build_forward_pass(resolved.model, resolved.run, run.groups, run.tokenizer)
    with run.engine.update.with_shared_weights():
        copy_weights(run.model, forward.model, run.groups)
        run.on_copy(forward.model)
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
    held = []
    for name, parameter in own.items():
        value = _with_all_experts(parameter, groups)
        held.append((name, value.shape, value.dtype))
    # Names, shapes of this tensor-parallel rank, and dtypes of the parameters of each stage.
    everywhere = all_gather_object(groups.control, held) if groups.pipe.size > 1 else []
    stages = [everywhere[rank] for rank in groups.pipe.ranks] if everywhere else [held]
    for stage, names in enumerate(stages):
        for name, shape, dtype in names:
            if name in sent:
                continue
            sent.add(name)
            if stage == groups.pipe.rank:
                value = _with_all_experts(own[name], groups)
            else:
                value = torch.empty(shape, dtype=dtype, device=computing_device())
            if groups.pipe.size > 1:
                distributed.broadcast(value, groups.pipe.ranks[stage], group=groups.pipe.process_group)
            if name in wanted:
                wanted[name].data.copy_(value)
                missing.remove(name)
    if missing:
        raise ModelError(f"the model in training has no {', '.join(sorted(missing))}; report this error")


def _with_all_experts(parameter: nn.Parameter, groups: Groups) -> Tensor:
    value = whole_parameter(parameter, groups)
    return all_gather(value, groups.experts, dim=0) if is_expert(parameter) else value
