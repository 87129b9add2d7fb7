"""Parameters that the engine partitions over data-parallel ranks (ZeRO), gathered one at a time."""

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from neox_config.spec.run import RunSpec
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.layers.embedding import Embedding
from neox_model.layers.residual_layer import ResidualLayer
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import without_memory
from neox_model.parallel.partitioned import is_sharded, own_rows_of, whole_tensor

__all__ = [
    "gathered_parameter",
    "partition_model",
    "partitioned_as_built",
    "whole_parameter",
    "without_zero",
]

# Imported by name: DeepSpeed and torch's `fully_shard` take seconds to import; many trainings use neither.
_DEEPSPEEDS = "neox_model.assembly.deepspeed_sharding"


def without_zero(run: RunSpec) -> RunSpec:
    """Return the same with ZeRO stage 0, for programs without an optimizer."""
    return replace(run, layout=replace(run.layout, zero=0))


def partitioned_as_built(run: RunSpec, groups: Groups) -> AbstractContextManager[Any]:
    """Return a context manager in which new parameters do not take the memory of the whole model.

    Under ZeRO, DeepSpeed's stage 3 partitions each as soon as it is created, and the torch engine has no
    memory for them until `partition_model`.

    Raises:
        NeoXError: DeepSpeed was installed without an operator that the configuration requires.
    """
    if run.partitions_rows and groups.data.size > 1:
        return without_memory()
    if run.engine.name == "torch" or run.layout.zero < 3:
        return nullcontext()
    partitioning: AbstractContextManager[Any] = importlib.import_module(_DEEPSPEEDS).partitioning(
        groups, json.loads(run.engine.settings)
    )
    return partitioning


def partition_model(run: RunSpec, model: nn.Module, groups: Groups) -> None:
    """Partition a model over the data group for the torch engine, as its ZeRO stage says. Collective."""
    second, is_last = run.layout.second_partition, run.layout.zero == 3
    summed_in = run.reduces_in if run.gradients.reduces_each else run.gradients.accumulate_in
    sharding = importlib.import_module("neox_model.parallel.sharding")
    sharding.partition(
        model,
        # The last two layers, norm and head, are gathered with the root.
        [module for module in model.modules() if isinstance(module, Embedding | ResidualLayer)],
        group=groups.data,
        device=computing_device(),
        precisions=sharding.Precisions(
            computation=DTYPES[run.precision.weights], accumulation=DTYPES[summed_in]
        ),
        reshards_after_forward=is_last and (second if second > 1 else True),
        partitions_frozen=is_last,
    )


@contextmanager
def gathered_parameter(parameter: nn.Parameter, groups: Groups) -> Iterator[Tensor | None]:
    """Yield the tensor to fill for a parameter, of its whole shape; None if another rank's values are kept.

    The parameter has the values of that tensor afterwards; to read a parameter, use `whole_parameter`.

    Collective over the data group if the parameter is partitioned.
    """
    if is_sharded(parameter):
        with own_rows_of(parameter) as whole:
            yield whole
    elif "deepspeed" in sys.modules:
        is_first = groups.data.rank == 0
        with importlib.import_module(_DEEPSPEEDS).gathered(parameter, is_first=is_first) as is_kept:
            yield parameter if is_kept else None
    else:
        yield parameter


def whole_parameter(parameter: nn.Parameter, groups: Groups) -> Tensor:
    """Return a copy of all elements that this tensor-parallel rank has of a parameter.

    Collective over the data group if the parameter is partitioned.
    """
    if is_sharded(parameter):
        return whole_tensor(parameter)
    with gathered_parameter(parameter, groups):
        return parameter.detach().clone()
