"""What holds for every test of the repository, whichever package it belongs to."""

import pytest
from hypothesis import settings

# A busy machine is slow, and that fails no test. What was right yesterday is right today: every run tries the
# same examples; with `--hypothesis-profile=random`, as `make test-chaos` has it, a run searches for new ones.
settings.register_profile("same", settings.default, deadline=None, derandomize=True)
settings.register_profile("random", settings.default, deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` say why they cannot run where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
