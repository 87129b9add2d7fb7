"""A cluster for the tests of a file, and the backends that its tools allow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster import Cluster, why_not_here
from support.cluster_tools import words_before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers and a login host."""
    reason = why_not_here("pdsh")
    if reason is not None:
        pytest.skip(f"no cluster here: {reason}")
    folder: Path = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, workers=3) as cluster:
        yield cluster


@pytest.fixture
def launcher(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[str, tuple[str, ...]]:
    """Return a backend whose tools are installed, and the words before its command."""
    try:
        return request.param, words_before(cluster, request.param)
    except LookupError as error:
        pytest.skip(str(error))
