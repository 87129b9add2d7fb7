"""Plans of elastic jobs on the remaining hosts."""

from dataclasses import replace

import pytest

from neox_config.errors import LaunchError
from neox_launcher.controller.elastic import can_shrink, describe_change, without_hosts
from neox_launcher.plan.planning import Request, plan_launch
from support.refusals import refused, shows

# 12 = 6 micro-batches of 2, so 1, 2, 3 or 6 workers share it; in version 0.2 as many hosts.
ELASTIC = "elasticity: {{enabled: true, max_train_batch_size: {most}, micro_batch_sizes: [2], {more}}}\n"
VERSION_1 = "version: 0.1"


@pytest.fixture
def plan_for(minimal, tmp_path, monkeypatch):
    """Return `plan_for(elastic, "slots of worker-1", ...)`, which plans an elastic job on these hosts."""
    monkeypatch.chdir(tmp_path)

    def plan(more, *slots, most=12, overrides=()):
        lines = [f"worker-{number} slots={count}\n" for number, count in enumerate(slots, 1)]
        (tmp_path / "hosts").write_text("".join(lines))
        elastic = tmp_path / "elastic.yml"
        elastic.write_text(ELASTIC.format(more=more, most=most))
        given = ("hostfile=hosts", "launcher=ssh", "train-micro-batch-size-per-gpu=null", *overrides)
        request = Request(program="train", paths=(str(minimal), str(elastic)), overrides=given)
        return plan_launch(request, gpus=0, environment={})

    return plan


def batch_of(plan):
    resolved = plan.resolved
    return resolved.run.batch.whole, resolved.run.batch.micro, resolved.run.batch.accumulation


def places_of(plan):
    return [(host.name, host.slots) for host in plan.world.hosts]


@pytest.mark.parametrize("more", [VERSION_1, "version: 0.2"])
def test_the_remaining_hosts_share_the_same_batch(plan_for, more):
    before = plan_for(more, 1, 1, 1)
    assert batch_of(before) == (12, 2, 2)
    after = without_hosts(before, ["worker-2"])
    assert places_of(after) == [("worker-1", (0,)), ("worker-3", (0,))]
    assert batch_of(after) == (12, 2, 3)
    assert (after.resolved.run.layout.data, after.resolved.run.layout.hosts) == (2, 2)
    last = without_hosts(after, ["worker-1"])
    assert places_of(last) == [("worker-3", (0,))]
    assert batch_of(last) == (12, 2, 6)


def test_the_change_is_described(plan_for):
    before = plan_for(VERSION_1, 1, 1, 1)
    assert shows(
        describe_change(before, before, without_hosts(before, ["worker-2"]), ["worker-2"]),
        "worker-2",
        "2 workers",
        "3",
        "worker-1, worker-3",
        "batch 12",
    )


def test_slots_beyond_the_largest_suitable_number_are_not_used(plan_for):
    # 2 + 3 slots are left, and 5 workers cannot share 12 samples by twos.
    before = plan_for(VERSION_1, 1, 2, 3)
    after = without_hosts(before, ["worker-1"])
    assert places_of(after) == [("worker-2", (0, 1)), ("worker-3", (0,))]
    assert batch_of(after) == (12, 2, 2)
    assert shows(
        describe_change(before, before, after, ["worker-1"]).splitlines()[-1],
        "2",
        "5 slots",
        "1, 2, 3",
        "6 workers",
    )


def test_version_2_counts_whole_hosts(plan_for):
    # Each of a host's two devices has half of 24 samples: 6 micro-batches of 2, for 1, 2, 3 or 6 hosts.
    before = plan_for("num_gpus_per_node: 2", 2, 2, 1, 2, most=24, overrides=("exclude=worker-3",))
    assert batch_of(before) == (24, 2, 2)
    after = without_hosts(before, ["worker-1"])
    assert places_of(after) == [("worker-2", (0, 1)), ("worker-4", (0, 1))]
    assert batch_of(after) == (24, 2, 3)


@pytest.mark.parametrize(
    ("more", "allowed"), [(f"{VERSION_1}, min_gpus: 3", "3"), (f"{VERSION_1}, min_gpus: 2", "2, 3")]
)
def test_without_a_suitable_number_of_workers_the_job_ends_with_a_remedy(plan_for, more, allowed):
    before = plan_for(more, 1, 1, 1)
    with pytest.raises(LaunchError) as found:
        without_hosts(before, ["worker-1", "worker-2"])
    assert shows(found.value, "worker-1, worker-2", "1 slot", "12 samples", f"{allowed} workers")


def test_other_conflicts_of_the_layout_are_reported(plan_for):
    zero = ("zero-optimization={stage: 3, zero_hpz_partition_size: 3}",)
    before = plan_for(VERSION_1, 1, 1, 1, overrides=zero)
    with pytest.raises(LaunchError) as found:
        without_hosts(before, ["worker-1"])
    assert "2 workers: " in str(found.value)
    assert shows(str(found.value), "data-parallel", "size 2")


def test_a_number_of_hosts_with_a_unique_batch_size_cannot_shrink(plan_for):
    # Five hosts share no common batch: version 0.2 gives them 10 samples, which fewer would not have.
    before = plan_for("version: 0.2", 1, 1, 1, 1, 1)
    assert batch_of(before)[0] == 10
    with refused(LaunchError, "10 samples", "5 workers", code="too-few-hosts"):
        without_hosts(before, ["worker-5"])


def test_the_address_of_a_lost_first_host_is_not_kept(plan_for):
    before = plan_for(VERSION_1, 1, 1, 1, overrides=("master-addr=10.0.0.1",))
    assert without_hosts(before, ["worker-2"]).master_addr == "10.0.0.1"
    assert without_hosts(before, ["worker-1"]).master_addr is None


def test_only_an_elastic_training_can_shrink(plan_for):
    plan = plan_for(VERSION_1, 1, 1)
    assert can_shrink(plan)
    assert not can_shrink(replace(plan, program="evaluate"))
    given = ("elasticity.enabled=false", "train-batch-size=4")
    assert not can_shrink(plan_for(VERSION_1, 1, 1, overrides=given))
