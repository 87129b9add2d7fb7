"""What deepspeed_compat uses of DeepSpeed: its contracts, which replace parts of it, each in its own process.

`make test-contracts` runs these tests in any environment.
"""

import pytest

from neox_model.contracts import contracts_of
from support.distributed import run_ranks


@pytest.mark.parametrize("contract", contracts_of("deepspeed_compat"), ids=lambda contract: contract.__name__)
def test_contract(contract):
    run_ranks(contract, size=1)
