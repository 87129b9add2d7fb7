"""The update that DeepSpeed makes under ZeRO: its master weights, states and loss scale.

Each class of DeepSpeed's optimizers partitions and flattens the parameters differently:
`runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`, `runtime/bf16_optimizer.py`. Like `compat.py`, this
module uses DeepSpeed beyond its documented interface, with contracts in `contracts.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from neox_model.engine.contract import BeforeUpdate, Measure
from neox_model.engine.deepspeed.compat import measure_reduction
from neox_model.errors import ModelError
from neox_model.optim.mixed_precision import guard_loss
from neox_model.parallel.param_shard import ParamShard

__all__ = ["ZeroUpdate"]

_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

# Class -> its parameters by group, and this rank's flat partition of each group.
_GROUPS = {
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "DeepSpeedZeroOptimizer_Stage3": ("fp16_groups", "fp32_partitioned_groups_flat"),
}


class ZeroUpdate:
    """The update that DeepSpeed makes under ZeRO stages 1 to 3.

    Args:
        inner: DeepSpeed's engine.
        min_loss_scale: lower bound of the loss scale; None if the loss is not scaled.
    """

    splits_over_data = True

    def __init__(self, inner: Any, *, min_loss_scale: float | None) -> None:
        self.min_loss_scale = min_loss_scale
        self._inner = inner
        if min_loss_scale is not None:
            # The hook `guard` handles overflows there.
            inner.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def optimizer(self) -> Optimizer:
        """Return our optimizer, inside DeepSpeed's."""
        return self._inner.optimizer.optimizer

    @property
    def grad_norm(self) -> Tensor | float | None:
        """Return the norm of the last update's gradients before clipping."""
        return self._inner.get_global_grad_norm()

    @property
    def skipped(self) -> bool:
        """Return True if the last update was skipped."""
        return not self._inner.was_step_applied()

    @property
    def loss_scale(self) -> float | None:
        """Return the loss scale of the next backward pass."""
        return None if self.min_loss_scale is None else float(self._inner.optimizer.loss_scale)

    def guard(self, loss: Tensor) -> Tensor:
        """Return the loss with NaN gradients if it is not finite; DeepSpeed scales it."""
        return guard_loss(loss, None)

    def before(self, call: BeforeUpdate) -> None:
        """Refuse: DeepSpeed reduces, clips and applies gradients in one call.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "gradients cannot be read before the update under DeepSpeed's ZeRO; set engine: torch, or set "
            "zero_optimization.stage: 0"
        )

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield this rank's runs of the master weights, in the order of the optimizer.

        Raises:
            ModelError: the optimizer's class is not known.
        """
        optimizer, name = self._inner.optimizer, _known_class(self._inner.optimizer)
        groups, partitions = (getattr(optimizer, attribute) for attribute in _GROUPS[name])
        for index, (params, partition) in enumerate(zip(groups, partitions, strict=True)):
            if name == "DeepSpeedZeroOptimizer_Stage3":
                yield from _held_zero_3(optimizer, index, params, partition)
                continue
            # The runs given by DeepSpeed's fragment addresses, for parameters that this rank holds.
            for param in params:
                mapping = param._hp_mapping
                if mapping is not None:
                    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield ParamShard(
                        param, here.start, here.numel, partition, there.start, tuple(param.shape)
                    )

    @contextmanager
    def in_memory(self, *, changes: bool = False) -> Iterator[None]:
        """Read what is offloaded to NVMe for the block, and write it back if the block may change it.

        DeepSpeed's own buffers hold the states of one sub-group at a time, so that these are copies.
        """
        optimizer = self._inner.optimizer
        if not getattr(optimizer, "swap_optimizer", False):
            yield
            return
        # DeepSpeed keeps small sub-groups in memory.
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        offloaded = [flat for index, flat in flats if optimizer._swappable_optimizer_subgroup(index)]
        swapper = optimizer.optimizer_swapper
        try:
            for flat in offloaded:
                _read_states(swapper, flat)
            yield
            if changes:
                for flat in offloaded:
                    swapper.swap_out_optimizer_state(flat)
        finally:
            for flat in offloaded:
                swapper.release_swap_buffers(flat)

    def to_model(self) -> None:
        """Copy the master weights into the model's weights. Collective."""
        optimizer = self._inner.optimizer
        if _known_class(optimizer) != "DeepSpeedZeroOptimizer_Stage3":
            optimizer.update_lp_params()
            return
        optimizer.checkpoint_event_prologue()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()

    def with_shared_weights(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing: all replicas always have the same weights."""
        return nullcontext()

    def measure_reduction(self, measure: Measure) -> None:
        """Measure the reduction after each backward pass; what overlaps with it is not separate."""
        measure_reduction(self._inner, measure)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return the loss scale's state; empty if it does not change (in other precisions it is 1)."""
        scaler = _dynamic_scaler(self._inner.optimizer)
        return {} if scaler is None else {name: getattr(scaler, name) for name in _LOSS_SCALE}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `loss_scale_state`, of this or of another engine; keep what it lacks."""
        scaler = _dynamic_scaler(self._inner.optimizer)
        if scaler is None:
            return
        for name in _LOSS_SCALE:
            if state.get(name) is not None:
                setattr(scaler, name, state[name])
        # The configured hysteresis may have become smaller.
        scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


def _dynamic_scaler(optimizer: Any) -> Any:
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None


def _known_class(optimizer: Any) -> str:
    name = type(optimizer).__name__
    if name not in _GROUPS:
        raise ModelError(
            f"cannot checkpoint the engine's optimizer class {name}; supported: {', '.join(_GROUPS)}"
        )
    return name


def _held_zero_3(optimizer: Any, index: int, params: list[Any], flat: Tensor) -> Iterator[ParamShard]:
    """Yield this rank's runs: each parameter is padded and split into equal runs over data-parallel ranks."""
    if not flat.numel():
        raise ModelError("master weights offloaded to nvme are read outside Update.in_memory")
    rank, offset = optimizer._get_sub_group_partition_rank(index), 0
    for param in params:
        length = param.partition_numel()
        start = rank * length
        numel = min(length, param.ds_numel - start)
        if numel > 0:
            yield ParamShard(param, start, numel, flat, offset, tuple(param.ds_shape))
        offset += length


def _read_states(swapper: Any, flat: Tensor) -> None:
    """Replace the tensors of one sub-group, which are empty between updates, by copies of their files."""
    swapper.swap_in_optimizer_state(flat)
    # The last update's gradient was read along with them.
    flat.grad = None
    files = swapper.swap_params_info[swapper.parameter_id(flat)].tensors
    copies = [file.compute_tensor.data.clone() for file in files]
    swapper.release_swap_buffers(flat)
    for file, copy in zip(files, copies, strict=True):
        file.compute_tensor.data = copy
