"""Hosts that must not be reached: told with the tool's own words, with nothing left running."""

import pytest

from support.cluster_job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("pdsh", marks=pytest.mark.sweep)])
def test_a_host_whose_key_is_not_known_is_not_trusted(cluster, tmp_path, launcher):
    """The cluster's keys are known by name; by address nobody knows them."""
    job = Job(cluster, tmp_path, "worker-1 slots=1", "10.77.0.3 slots=1", launcher=launcher)
    result = job.run()
    assert result.code == 1
    assert "10.77.0.3: could not be started" in result.err
    assert "host key" in result.err.lower()
    assert job.losses == []


def test_a_name_that_leads_nowhere_is_told_before_anything_is_started(cluster, tmp_path):
    job = Job(cluster, tmp_path, "worker-1 slots=1", "worker-9 slots=1", launcher="ssh")
    result = job.run()
    assert result.code == 2
    assert "worker-9 cannot be resolved here" in result.err
