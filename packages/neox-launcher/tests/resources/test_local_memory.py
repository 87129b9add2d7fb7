"""The memory that processes of this host may use."""

import pytest

from neox_launcher.resources import local_memory
from neox_launcher.resources.local_memory import usable_memory


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return `groups(membership, limits)`, which replaces the control groups of this process."""

    def pretend(membership, limits):
        (tmp_path / "cgroup").write_text(membership)
        for name, text in limits.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(local_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(local_memory, "_CGROUPS", tmp_path)
    return pretend


def test_without_limits_the_memory_is_that_of_the_host(groups):
    whole = usable_memory()
    assert whole > 2**20
    groups("0::/job\n", {"job/memory.max": "max\n", "memory.max": f"{2 * whole}\n"})
    assert usable_memory() == whole


def test_the_smallest_limit_of_all_groups_around_counts(groups):
    groups("1:cpu:/\n0::/job/step\n", {"job/step/memory.max": "7000\n", "job/memory.max": "5000\n"})
    assert usable_memory() == 5000


def test_limits_of_version_1_count(groups):
    groups("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "4000\n"})
    assert usable_memory() == 4000
