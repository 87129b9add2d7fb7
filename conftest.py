"""What holds for every test of the repository, whichever package it belongs to."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, and that fails no test. What was right yesterday is right today: every run tries the
# same examples; `--hypothesis-profile=random`, as in `make sweep NAME=chaos`, searches for new ones.
_PATIENT = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True)
settings.register_profile("random", _PATIENT)
settings.load_profile("same")

# Every Python program that a test starts prints its stacks when native code crashes.
os.environ["PYTHONFAULTHANDLER"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they cannot run where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
