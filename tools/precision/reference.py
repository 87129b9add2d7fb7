"""The same updates by plain torch autograd on one process, without an engine."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_model
from neox_model.layers.experts import Router
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import named_logical_parameters
from neox_model.train.data.batch import Batch, weighted_by_micro_batch
from precision.run import (
    CLIPPING,
    PRECISIONS,
    SAMPLES,
    Cell,
    Observed,
    Training,
    batches_of,
    rounded_start,
)
from support.layouts import VOCAB, Layout, settings_of
from support.settings import resolved_from

__all__ = ["exact", "plain"]


def exact(cell: Cell, training: Training) -> Observed:
    """Compute the cell's updates in float32, all windows at once."""
    return _train(
        cell.architecture,
        is_wide=cell.shape.is_wide,
        tied=cell.tied,
        precision="fp32",
        micro_batch=SAMPLES,
        accumulation=1,
        clipping=cell.clipping,
        training=training,
        scale=1,
    )


def plain(cell: Cell, training: Training, *, scale: int = 128) -> Observed:
    """Compute the cell's updates in its precision, in micro-batches of its size."""
    return _train(
        cell.architecture,
        is_wide=cell.shape.is_wide,
        tied=cell.tied,
        precision=cell.precision,
        micro_batch=cell.micro_batch,
        accumulation=cell.accumulation,
        clipping=cell.clipping,
        training=training,
        scale=scale if cell.precision == "fp16" else 1,
    )


@lru_cache(maxsize=64)
def _train(
    architecture: str,
    *,
    is_wide: bool,
    tied: bool,
    precision: str,
    micro_batch: int,
    accumulation: int,
    clipping: str,
    training: Training,
    scale: int,
) -> Observed:
    settings = settings_of(architecture, Layout(1, {}, is_wide=is_wide), recomputes=False)
    settings |= {
        "no_weight_tying": not tied,
        "precision": _NAMES[precision],
        "train_batch_size": micro_batch * accumulation,
        "train_micro_batch_size_per_gpu": micro_batch,
    }
    resolved = resolved_from(settings)
    with rounded_start():
        model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=VOCAB)
    for module in model.modules():
        if isinstance(module, Router):
            module.by_position = True
            module.loss_scale = lambda: float(scale)
    masters = {name: parameter.detach().clone() for name, parameter in _trained(model)}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(PRECISIONS[precision])
    optimizer = _OPTIMIZERS[training.optimizer](masters.values(), **training.params)
    start = {name: master.clone() for name, master in masters.items()}
    observed = Observed()
    held = DTYPES[resolved.run.gradients.accumulate_in]
    for batches in batches_of(resolved, updates=training.updates, micro_batch=micro_batch):
        replicas = [batches[first : first + accumulation] for first in range(0, len(batches), accumulation)]
        losses = []
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for own in replicas:
            losses += _accumulate(model, masters, own, factor=scale / accumulation, dtype=held)
        _finish_gradients(observed, masters, divisor=scale * len(replicas), max_norm=CLIPPING[clipping])
        optimizer.step()
        observed.losses.append(sum(losses) / len(losses))
        for name, parameter in _trained(model):
            parameter.data.copy_(masters[name])
    observed.masters = masters
    observed.updates = {name: master - start[name] for name, master in masters.items()}
    _keep_states(observed, masters, optimizer)
    return observed


_NAMES = {"fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
_OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained, by logical name."""
    return [
        (name, parameter) for name, parameter in named_logical_parameters(model) if parameter.requires_grad
    ]


def _accumulate(
    model: nn.Module, masters: dict[str, Tensor], batches: list[Batch], *, factor: float, dtype: torch.dtype
) -> list[float]:
    """Sum one replica's gradients in `dtype`, then add them to the masters'; give its losses."""
    sums = {name: torch.zeros(master.shape, dtype=dtype) for name, master in masters.items()}
    losses = []
    for batch in weighted_by_micro_batch(iter(batches), len(batches), torch.device("cpu")):
        loss = model(batch.inputs, batch.targets)
        (loss * factor).backward()
        losses.append(float(loss.detach()))
        for name, parameter in _trained(model):
            assert parameter.grad is not None, f"{name} has no gradient"
            sums[name] += parameter.grad
            parameter.grad = None
    for name, master in masters.items():
        assert master.grad is not None
        master.grad += sums[name]
    return losses


def _finish_gradients(
    observed: Observed, masters: dict[str, Tensor], *, divisor: float, max_norm: float
) -> None:
    """Divide by scale and replicas, note the norm, and clip."""
    gradients = [master.grad for master in masters.values()]
    for gradient in gradients:
        gradient /= divisor
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).double().norm())
    observed.norms.append(norm)
    if 0 < max_norm < norm:
        for gradient in gradients:
            gradient *= max_norm / norm


def _keep_states(observed: Observed, masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    steps = set()
    for name, master in masters.items():
        for state, value in optimizer.state.get(master, {}).items():
            if state == "step":
                steps.add(int(value))
            elif isinstance(value, Tensor):
                observed.states[f"{name}/{state}"] = value
    observed.steps = sorted(steps)
