"""The partitioned parameters of a pipeline stage, whose passes a schedule runs one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule

from neox_model.parallel.groups import Groups
from neox_model.parallel.sharding import MeanReduceScatter, ShardedModel

__all__ = ["ShardedStage"]


class ShardedStage(ShardedModel):
    """The partitioned chunks of a pipeline stage.

    The chunks run, not the module that contains them. What is gathered with that module (the final norm, the
    head, and weights that several layers share) stays for all passes of an update.

    Args:
        model: partitioned by `partition`, with its initial weights.
        chunks: the parts of it that run.
        groups: this job's process groups.
        reduction: averages gradients over the ranks of a group.
        keeps_weights: whole parameters stay from the first micro-batch of an update to the last.
        reduces_every_time: reduce the gradients of each micro-batch, so that only their parts are stored.
    """

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[nn.Module],
        *,
        groups: Groups,
        reduction: Callable[[int], MeanReduceScatter],
        keeps_weights: bool,
        reduces_every_time: bool,
    ) -> None:
        super().__init__(
            model,
            groups=groups,
            reduction=reduction,
            keeps_weights=keeps_weights,
            reduces_every_time=reduces_every_time,
        )
        for chunk in chunks:
            _gather_in_reverse(chunk)
        # Its backward pass is the empty one, which gathers nothing.
        self._parts[0].set_modules_to_backward_prefetch([self._parts[0]])

    def begin_passes(self) -> None:
        """Prepare the passes of an update."""
        root = self._parts[0]
        root.set_is_last_backward(False)
        root.set_requires_gradient_sync(self._reduces_every_time)
        root.set_reshard_after_backward(not self._keeps_weights)
        root.set_reshard_after_backward(False, recurse=False)
        root.unshard()

    def collect(self) -> None:
        """Take gradients of weights that a schedule computed apart and added to the parameters itself."""
        self._end_backward()

    def end_passes(self) -> None:
        """Reduce the gradients of an update that are not reduced yet, and free whole parameters."""
        root = self._parts[0]
        root.set_is_last_backward(True)
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        self._end_backward()
        self.take_gradients()

    def _end_backward(self) -> None:
        """Let `fully_shard` take the gradients of all parts, as it does at the end of a backward pass.

        It does so after passes that accumulate gradients, but not where a schedule adds gradients of weights
        to the parameters itself, and not for the whole model, which does not run. So an empty pass runs.
        """
        self.run_empty_pass().backward()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, the chunks may run forward passes."""
        self._parts[0].unshard()
        yield
        self.release()


def _gather_in_reverse(chunk: nn.Module) -> None:
    """Let each layer gather the one before it in its backward pass.

    By default it is the layer whose forward pass ran before, which in a pipeline may be one of another
    micro-batch.
    """
    parts = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
    for before, part in pairwise([*parts[:1], *parts]):
        # The first one has none before it; without any, torch would choose one.
        part.set_modules_to_backward_prefetch([before])
