"""Provide `Groups` through DeepSpeed's `mpu` interface.

Used with the plain model only: a pipeline has its own grid. DeepSpeed sums gradient norms over the "model
parallel" group, counting parameters without `model_parallel = True` on its rank 0 only.
"""

from functools import partial
from types import SimpleNamespace

from neox_model.parallel.groups import Groups

__all__ = ["model_parallel_unit"]


def model_parallel_unit(groups: Groups) -> SimpleNamespace:
    """Return DeepSpeed's view of groups: `get_model_parallel_rank`, `get_data_parallel_group`, ..."""
    kinds = {"model": groups.model, "tensor_model": groups.model, "data": groups.data, "pipe": groups.pipe}
    unit = SimpleNamespace(get_data_parallel_group_ranks=partial(list, groups.data.ranks))
    for kind, group in kinds.items():
        for suffix, attribute in (("rank", "rank"), ("world_size", "size"), ("group", "process_group")):
            setattr(unit, f"get_{kind}_parallel_{suffix}", partial(getattr, group, attribute))
    return unit
