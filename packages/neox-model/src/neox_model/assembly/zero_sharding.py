"""Parameters that the engine partitions over data-parallel ranks (ZeRO), gathered one at a time."""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from neox_config.spec.run import RunSpec
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.engines import engine_module, functions_of_engines
from neox_model.layers.embedding import Embedding
from neox_model.layers.experts import ExpertBlocks
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


def without_zero(run: RunSpec) -> RunSpec:
    """Return the same with ZeRO stage 0, for programs without an optimizer."""
    return replace(run, layout=replace(run.layout, zero=0))


def partitioned_as_built(run: RunSpec, groups: Groups) -> AbstractContextManager[Any]:
    """Return a context manager in which new parameters do not take the memory of the whole model.

    Under ZeRO an engine may partition each as soon as it is created; for the others there is no memory until
    `partition_model`.

    Raises:
        NeoXError: the engine lacks a part that the configuration requires.
    """
    if run.partitions_rows and groups.data.size > 1:
        return without_memory()
    if run.layout.zero < 3:
        return nullcontext()
    partitioned = getattr(engine_module(run), "partitioned_as_built", None)
    return nullcontext() if partitioned is None else partitioned(run, groups)


def partition_model(run: RunSpec, model: nn.Module, groups: Groups) -> None:
    """Partition a model over data-parallel ranks for the torch engine, as its ZeRO stage says. Collective."""
    second, is_last = run.layout.second_partition, run.layout.zero == 3
    summed_in = run.reduces_in if run.gradients.reduces_each else run.gradients.accumulate_in
    # Imported by name: torch's `fully_shard` takes a second to import; many runs do not use it.
    sharding = importlib.import_module("neox_model.parallel.sharding")
    sharding.partition(
        model,
        # The last two layers, norm and head, are gathered with the root.
        [module for module in model.modules() if isinstance(module, Embedding | ResidualLayer)],
        experts=[module for module in model.modules() if isinstance(module, ExpertBlocks)]
        if groups.experts.size > 1
        else (),
        groups=groups,
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
        return
    is_first = groups.data.rank == 0
    with ExitStack() as stack:
        gatherings = [gathered(parameter, is_first=is_first) for gathered in functions_of_engines("gathered")]
        are_kept = [stack.enter_context(gathering) for gathering in gatherings]
        yield parameter if all(are_kept) else None


def whole_parameter(parameter: nn.Parameter, groups: Groups) -> Tensor:
    """Return a copy of all elements that this tensor-parallel rank has of a parameter.

    Collective over the data group if the parameter is partitioned.
    """
    if is_sharded(parameter):
        return whole_tensor(parameter)
    with gathered_parameter(parameter, groups):
        return parameter.detach().clone()
