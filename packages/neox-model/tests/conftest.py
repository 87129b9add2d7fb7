"""What holds for every test of the model."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(1234)
