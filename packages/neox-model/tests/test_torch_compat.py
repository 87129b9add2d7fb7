"""What torch_compat uses of torch: its contracts, and what takes a compiler or two ranks.

`make test-contracts` runs these tests in any environment.
"""

from typing import Any

import pytest
import torch
from torch import distributed

from neox_model import torch_compat
from neox_model.contracts import contracts_of
from neox_model.torch_compat import limit_graphs, recompile_limit_error, watched_collectives
from support.distributed import run_ranks


@pytest.mark.parametrize(
    "contract", contracts_of("neox_model.contracts.torch_compat"), ids=lambda contract: contract.__name__
)
def test_contract(contract):
    contract()


def test_a_graph_beyond_the_limit_is_an_error():
    # torch._dynamo.exc.FailOnRecompileLimitHit
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        limit_graphs(2)
        function = torch.compile(lambda tensor: tensor + 1, backend="eager", dynamic=False)
        assert [function(torch.zeros(size)).tolist() for size in (1, 2)] == [[1.0], [1.0, 1.0]]
        with pytest.raises(recompile_limit_error()):
            function(torch.zeros(3))
    torch.compiler.reset()


def watch_each() -> list[list[Any]]:
    """Return what `watched_collectives` reports of one call of every function."""
    seen: list[list[Any]] = []

    def watch(name: str, group: Any, message: Any, start: Any, peer: int | None) -> Any:
        seen.append([name, [tensor.numel() for tensor in message], peer])
        return start()

    rank = distributed.get_rank()
    one, two = torch.ones(3), torch.ones(6)
    with watched_collectives(watch):
        distributed.all_reduce(one)
        torch_compat.all_gather_single(two, one)
        torch_compat.reduce_scatter_single(one, two)
        distributed.all_gather([one.clone(), one.clone()], one)
        distributed.broadcast(one, 0)
        distributed.all_to_all_single(two.clone(), two)
        (distributed.recv if rank else distributed.send)(one, 1 - rank)
        distributed.barrier()
    return seen


def test_collectives_are_watched_with_their_messages_and_peers():
    for rank, seen in enumerate(run_ranks(watch_each, size=2)):
        assert [name for name, _, _ in seen] == [
            "all_reduce",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_gather",
            "broadcast",
            "all_to_all_single",
            "recv" if rank else "send",
            "barrier",
        ]
        assert [sizes for _, sizes, _ in seen[:-1]] == [[3], [6], [6], [3, 3], [3], [6], [3]]
        assert [peer for _, _, peer in seen[:-1]] == [None] * 6 + [1 - rank]
