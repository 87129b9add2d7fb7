"""Groups seen through the interface that DeepSpeed calls `mpu`: its engine asks by these method names.

Used with the plain model only: a pipeline brings its own grid. DeepSpeed sums gradient norms over the "model
parallel" group, counting parameters without `model_parallel = True` on its rank 0 alone.
"""

from torch.distributed import ProcessGroup

from neox_model.parallel.groups import Groups

__all__ = ["ModelParallelUnit"]


class ModelParallelUnit:
    """DeepSpeed's view of `Groups`."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def get_model_parallel_rank(self) -> int:
        """This process's tensor-parallel rank."""
        return self._groups.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self._groups.model.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """The tensor-parallel group."""
        return self._groups.model.process_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        """This process's replica."""
        return self._groups.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self._groups.data.size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """The replicas' group."""
        return self._groups.data.process_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the replicas."""
        return list(self._groups.data.ranks)

    def get_pipe_parallel_rank(self) -> int:
        """This process's stage."""
        return self._groups.pipe.rank

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self._groups.pipe.size

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """The stages of this process's pipeline."""
        return self._groups.pipe.process_group
