"""A cluster for the tests of a file, and small trainings on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster, why_not_here


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers and a login host."""
    reason = why_not_here("pdsh")
    if reason is not None:
        pytest.skip(f"no cluster here: {reason}")
    folder: Path = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, workers=3) as cluster:
        yield cluster
