"""Provide `Groups` through DeepSpeed's `mpu` interface.

Used with the plain model only: a pipeline has its own grid. DeepSpeed sums gradient norms over the "model
parallel" group, counting parameters without `model_parallel = True` on its rank 0 only.
"""

from torch.distributed import ProcessGroup

from neox_model.parallel.groups import Groups

__all__ = ["ModelParallelUnit"]


class ModelParallelUnit:
    """DeepSpeed's view of `Groups`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        """Return this process's tensor-parallel rank."""
        return self._groups.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self._groups.model.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """Return the tensor-parallel group."""
        return self._groups.model.process_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this process's data-parallel rank."""
        return self._groups.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self._groups.data.size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the data-parallel group."""
        return self._groups.data.process_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data-parallel group."""
        return list(self._groups.data.ranks)

    def get_pipe_parallel_rank(self) -> int:
        """Return this process's pipeline stage."""
        return self._groups.pipe.rank

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._groups.pipe.size

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """Return the pipeline-parallel group."""
        return self._groups.pipe.process_group
