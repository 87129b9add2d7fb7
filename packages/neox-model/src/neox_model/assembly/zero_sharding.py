"""Parameters that the engine partitions over data-parallel ranks (ZeRO stage 3), gathered one at a time."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from neox_config import Resolved, engine_json
from neox_config.derive.engine import chosen_engine
from neox_model.parallel.groups import Groups
from neox_model.parallel.sharding import whole_tensor

__all__ = ["gathered_parameter", "partitioned_as_built", "whole_parameter", "without_zero"]

# Imported by name: DeepSpeed takes seconds to import, and is not used with the torch engine.
_DEEPSPEEDS = "neox_model.assembly.deepspeed_sharding"


def without_zero(resolved: Resolved) -> Resolved:
    """Return the configuration with ZeRO stage 0, for programs without an optimizer."""
    zero = resolved.config.zero
    plain = zero.replaced(zero_optimization=zero.zero_optimization.replaced(stage=0))
    return replace(resolved, config=resolved.config.model_copy(update={"zero": plain}))


def partitioned_as_built(resolved: Resolved, groups: Groups) -> AbstractContextManager[Any]:
    """Return a context manager in which DeepSpeed's stage 3 partitions parameters; else it does nothing.

    Raises:
        NeoXError: DeepSpeed was installed without an operator that the configuration requires.
    """
    is_partitioned = resolved.config.zero.zero_optimization.stage == 3
    if not is_partitioned or chosen_engine(resolved.config).name != "deepspeed":
        return nullcontext()
    partitioning: AbstractContextManager[Any] = importlib.import_module(_DEEPSPEEDS).partitioning(
        groups, engine_json(resolved)
    )
    return partitioning


@contextmanager
def gathered_parameter(parameter: nn.Parameter, groups: Groups) -> Iterator[bool]:
    """Gather a parameter's memory to fill it; yield True if this rank's values are the ones that are kept."""
    if "deepspeed" not in sys.modules:
        yield True
        return
    is_first = groups.data.rank == 0
    with importlib.import_module(_DEEPSPEEDS).gathered(parameter, is_first=is_first) as is_kept:
        yield is_kept


def whole_parameter(parameter: nn.Parameter, groups: Groups) -> Tensor:
    """Return a copy of all elements that this tensor-parallel rank has of a parameter.

    Collective over the data group if the parameter is partitioned.
    """
    with gathered_parameter(parameter, groups):
        return whole_tensor(parameter)
