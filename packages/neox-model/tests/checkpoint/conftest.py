from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """Store of `memory://`, empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]
