"""Faults planted into the engine, each with a cell that shows it and what the check must say of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, distributed

from neox_config.spec.run import RunSpec
from neox_model.engine import build_updater, updater
from neox_model.engine.deepspeed import build as build_deepspeed
from neox_model.engine.deepspeed import pipeline
from neox_model.engine.updater import Updater
from neox_model.optim import mixed_precision
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel import sharding
from neox_model.parallel.gradient_reduction import EarlyReduction, GradientReduction
from neox_model.parallel.groups import SINGLE_RANK, Groups
from neox_model.parallel.param_shard import ParamShard
from neox_model.parallel.sharding import MeanReduceScatter, ShardedModel
from precision.run import Cell

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """A mistake in the run.

    Args:
        cell: what is trained with it.
        plant: gives a context within which the mistake is made.
        says: a pattern that one of the findings matches.
    """

    cell: Cell
    plant: Callable[[], AbstractContextManager[None]]
    says: str


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what `make` gives for it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _plants(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[None]]:
    return partial(_replaced, owner, name, make)


def _without_gradient_of_the_head(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss_of_hidden(loss: Any, head: Any, autocast: Any, hidden_SBD: Tensor, targets: Any) -> Tensor:
        holder = getattr(head, "word_embeddings", head)
        holder.weight.requires_grad_(False)
        try:
            return original(loss, head, autocast, hidden_SBD, targets)
        finally:
            holder.weight.requires_grad_(True)

    return loss_of_hidden


def _with_an_empty_step(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: MixedPrecisionOptimizer, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    return init


def _of_this_tensor_rank(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm(parameters: Any, gradients: Any, groups: Groups, **options: Any) -> Tensor:
        return original(parameters, gradients, replace(groups, model=SINGLE_RANK), **options)

    return norm


def _before_unscaling(original: Callable[..., None]) -> Callable[..., None]:
    def scale(self: MixedPrecisionOptimizer, gradients: list[Tensor], scaled_norm: Tensor) -> None:
        assert self.loss_scale is not None
        original(self, gradients, scaled_norm * self.loss_scale.value)

    return scale


def _without_immediate_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def settings(run: RunSpec) -> dict[str, Any]:
        found = original(run)
        return found | {"bf16": found["bf16"] | {"immediate_grad_update": False}}

    return settings


def _with_sums_in_bf16(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: original(
        *arguments, **options | {"accumulation_dtype": torch.bfloat16}
    )


def _into_the_masters(original: Callable[..., None]) -> Callable[..., None]:
    def copy(self: MixedPrecisionOptimizer) -> None:
        original(self)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.data.copy_(parameter.data)

    return copy


def _twice(original: Callable[..., None]) -> Callable[..., None]:
    def reduce(self: MeanReduceScatter, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        named["output_tensor"].mul_(2)

    return reduce


def _own_gradients(original: Callable[..., None]) -> Callable[..., None]:
    def reduce(self: MeanReduceScatter, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(2)[distributed.get_rank()])

    return reduce


def _of_this_part(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def norm(*arguments: Any, are_sharded: bool) -> Tensor:
        return original(*arguments, are_sharded=False)

    return norm


def _without_earlier_gradients(original: Callable[..., None]) -> Callable[..., None]:
    def begin(self: ShardedModel, *, is_last: bool) -> None:
        original(self, is_last=is_last)
        for held in self._held.values() if is_last else ():
            held.param.grad = None

    return begin


def _of_a_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    def held(parameter: Any) -> tuple[Any, ParamShard]:
        holder, found = original(parameter)
        holder.data = holder.data.clone()
        return holder, found

    return held


def _nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *arguments: None


_PLAIN = Cell("half rotary, parallel residual, untied", "one process", "bf16", clipping="off")
_OPTIMIZER = MixedPrecisionOptimizer

FAULTS: dict[str, Fault] = {
    "head without gradient in a pipeline": Fault(
        replace(_PLAIN, layout="pipeline 2"),
        _plants(pipeline, "_loss_of_hidden", _without_gradient_of_the_head),
        r"^lm_head.weight: update projected on float32's is 0.0000",
    ),
    "head without gradient in DeepSpeed's pipeline": Fault(
        replace(_PLAIN, layout="pipeline 1 x data 2, ZeRO 1"),
        _plants(build_deepspeed, "_settings", _without_immediate_update),
        r"^lm_head.weight: update projected on float32's is 0.0000",
    ),
    "unscaled loss": Fault(
        replace(_PLAIN, precision="fp16"),
        _plants(updater, "guard_loss", lambda original: lambda loss, scale: original(loss, None)),
        r"^every update is 0.00781 times what it must be",
    ),
    "one optimizer step too many": Fault(
        _PLAIN,
        _plants(_OPTIMIZER, "__init__", _with_an_empty_step),
        r"^the optimizer's `step` is \[4\], must be \[3\]",
    ),
    "clipping by the norm of one tensor-parallel rank": Fault(
        replace(_PLAIN, layout="tensor 2", precision="fp32", clipping="active"),
        _plants(mixed_precision, "global_gradient_norm", _of_this_tensor_rank),
        r"^the gradient norm of update 1 is reported as",
    ),
    "clipping before the loss scale is undone": Fault(
        replace(_PLAIN, precision="fp16", clipping="active"),
        _plants(_OPTIMIZER, "_scale", _before_unscaling),
        r"^every update is 0.00781 times what it must be",
    ),
    "sum over replicas in place of the mean": Fault(
        replace(_PLAIN, layout="data 2", precision="fp32"),
        _plants(GradientReduction, "finish", lambda original: lambda *given: 2 * original(*given)),
        r"^every update is 2 times what it must be",
    ),
    "gradients not averaged over replicas": Fault(
        replace(_PLAIN, layout="data 2", precision="fp32"),
        _plants(EarlyReduction, "_send", _nothing),
        r"^ranks hold copies of one weight that differ",
    ),
    "tied gradient counted once": Fault(
        replace(_PLAIN, layout="pipeline 2", tied=True),
        _plants(_OPTIMIZER, "_sum_over_stages", _nothing),
        r"^embedding.word_embeddings.weight: update (projected|has a cosine)",
    ),
    "gradients not summed over parts of the sequence": Fault(
        replace(_PLAIN, layout="sequence 2"),
        _plants(mixed_precision, "sum_partial_gradients", _nothing),
        r"^layers.0.norm1.weight: update (projected|has a cosine)",
    ),
    "accumulation not divided": Fault(
        replace(_PLAIN, accumulation=3),
        _plants(Updater, "guard", lambda original: lambda self, loss: 3 * original(self, loss)),
        r"^every update is 3 times what it must be",
    ),
    "accumulation not divided by DeepSpeed": Fault(
        replace(_PLAIN, layout="ZeRO 1", accumulation=3),
        _plants(DeepSpeedEngine, "backward", lambda original: partialmethod(original, scale_wrt_gas=False)),
        r"^every update is 3 times what it must be",
    ),
    "gradients accumulated in bf16": Fault(
        replace(_PLAIN, accumulation=3),
        _plants(build_updater, "MixedPrecisionOptimizer", _with_sums_in_bf16),
        r"update differs from plain autograd's by 0.00",
    ),
    "masters rounded to 16 bit": Fault(
        _PLAIN,
        _plants(_OPTIMIZER, "_copy_to_model", _into_the_masters),
        r"^the master weights are rounded to bf16",
    ),
    "weights not renewed from the masters": Fault(
        _PLAIN,
        _plants(_OPTIMIZER, "_copy_to_model", _nothing),
        r"^the model's weights are not the masters, rounded",
    ),
    "sum over parts in place of the mean": Fault(
        replace(_PLAIN, layout="torch, ZeRO 2", precision="fp32"),
        _plants(MeanReduceScatter, "__call__", _twice),
        r"^every update is 2 times what it must be",
    ),
    "parts not averaged over replicas": Fault(
        replace(_PLAIN, layout="torch, ZeRO 1", precision="fp32"),
        _plants(MeanReduceScatter, "__call__", _own_gradients),
        r"update (projected|has a cosine)",
    ),
    "clipping by the norm of one part": Fault(
        replace(_PLAIN, layout="torch, ZeRO 3", precision="fp32", clipping="active"),
        _plants(mixed_precision, "global_gradient_norm", _of_this_part),
        r"^the gradient norm of update 1 is reported as",
    ),
    "parts not clipped": Fault(
        replace(_PLAIN, layout="torch, ZeRO 2", precision="fp32", clipping="active"),
        _plants(mixed_precision, "foreach_mul_", _nothing),
        r"^every update is [\d.]+ times what it must be",
    ),
    "gradients of earlier micro-batches lost": Fault(
        replace(_PLAIN, layout="torch, ZeRO 2", accumulation=3),
        _plants(ShardedModel, "begin", _without_earlier_gradients),
        r"update (projected|has a cosine)",
    ),
    "parts updated apart from the model": Fault(
        replace(_PLAIN, layout="torch, ZeRO 3"),
        _plants(sharding, "_held", _of_a_copy),
        r"^the model's weights are not the masters, rounded",
    ),
    "parts' gradients not summed over parts of the sequence": Fault(
        replace(_PLAIN, layout="torch, sequence 2 x ZeRO 3"),
        _plants(mixed_precision, "sum_partial_gradients", _nothing),
        r"^layers.0.norm1.weight: update (projected|has a cosine)",
    ),
}
