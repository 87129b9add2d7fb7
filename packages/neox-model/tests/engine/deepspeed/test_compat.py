"""What compat.py uses of DeepSpeed: its contracts, which replace parts of it, each in its own process.

`make test-contracts` runs these tests in any environment.
"""

import pytest

from neox_model.contracts import contracts_of
from support.distributed import run_ranks

CONTRACTS = contracts_of("neox_model.engine.deepspeed.contracts")


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_contract(contract):
    run_ranks(contract, size=1)
