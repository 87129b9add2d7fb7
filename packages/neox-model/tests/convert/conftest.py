import pytest


@pytest.fixture(autouse=True)
def _quiet():
    """Skip without transformers, and keep its progress bars out of the output."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
