"""Unreachable hosts are reported in the tool's words, and nothing is left running."""

import pytest

from support.cluster_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("pdsh", marks=pytest.mark.sweep)])
def test_host_with_an_unknown_key_is_refused(cluster, tmp_path, launcher):
    """The cluster's keys are known by host name, not by address."""
    job = Job(cluster, tmp_path, "worker-1 slots=1", "10.77.0.3 slots=1", launcher=launcher)
    result = job.run()
    assert result.code == 1
    assert "10.77.0.3" in result.err
    assert "host key" in result.err.lower()
    assert job.losses == []


def test_unresolvable_host_name_is_reported_before_the_start(cluster, tmp_path):
    job = Job(cluster, tmp_path, "worker-1 slots=1", "worker-9 slots=1", launcher="ssh")
    result = job.run()
    assert result.code == 2
    assert "worker-9 cannot be" in result.err
