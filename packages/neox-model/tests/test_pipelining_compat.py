"""What pipelining_compat uses of torch.distributed.pipelining: its contracts, and schedules on two ranks.

`make test-contracts` runs these tests in any environment.
"""

import inspect

import pytest
from torch.distributed.pipelining import PipelineStage

from neox_model.contracts import contracts_of, pipelining_compat
from neox_model.pipelining_compat import PipelineChunk
from support.distributed import run_ranks


@pytest.mark.parametrize(
    "contract", contracts_of("neox_model.contracts.pipelining_compat"), ids=lambda contract: contract.__name__
)
def test_contract(contract):
    run_ranks(contract, size=1)


def test_all_overridden_methods_are_listed():
    own = {name for name, value in vars(PipelineChunk).items() if inspect.isfunction(value)} - {"__init__"}
    assert own & set(dir(PipelineStage)) == set(pipelining_compat.OVERRIDDEN)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_a_schedule_runs_chunks_on_two_ranks(name):
    run_ranks(pipelining_compat._run_schedule, size=2, name=name)
