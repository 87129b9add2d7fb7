"""Slurm's variables: lists of hosts, and their numbers of slots."""

import pytest

from neox_config.errors import HostfileError
from neox_launcher.resources.slurm import allocated_hosts, expand_nodelist, is_inside_allocation
from support.refusals import refused

LISTS = {
    "login1": ["login1"],
    "a,b": ["a", "b"],
    "node[1-3]": ["node1", "node2", "node3"],
    "gpu-[001-003,007,10-11]": ["gpu-001", "gpu-002", "gpu-003", "gpu-007", "gpu-10", "gpu-11"],
    "gpu-[098-101]": ["gpu-098", "gpu-099", "gpu-100", "gpu-101"],
    "c[1-2]-ib,login": ["c1-ib", "c2-ib", "login"],
    "rack[1-2]n[1-2,4]": ["rack1n1", "rack1n2", "rack1n4", "rack2n1", "rack2n2", "rack2n4"],
    "z9,a[2,1]": ["z9", "a2", "a1"],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_of_hosts_is_expanded(text):
    assert expand_nodelist(text) == LISTS[text]


HUGE = f"a[1-{'9' * 5000}]"
PRODUCT = "a[1-99999]b[1-99999]"


@pytest.mark.parametrize(
    "text", ["a,", ",a", "a[1-", "a1]", "a[x]", "a[3-1]", "a[]", "a[1-9999999]", "a,a", HUGE, PRODUCT]
)
def test_a_malformed_list_is_refused(text):
    with refused(HostfileError, code="invalid-nodelist"):
        expand_nodelist(text)


def slots(asked=None, **variables):
    environment = {"SLURM_JOB_NODELIST": "n[1-3]"} | {
        f"SLURM_{name}": text for name, text in variables.items()
    }
    return [len(host.slots) for host in allocated_hosts(environment, slots=asked)]


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"GPUS_PER_NODE": "8"}, [8, 8, 8]),
        ({"GPUS_PER_NODE": "a100:4"}, [4, 4, 4]),
        ({"GPUS_PER_NODE": "a100:4,v100:2"}, [6, 6, 6]),
        ({"GPUS_ON_NODE": "2"}, [2, 2, 2]),
        ({"GPUS_PER_NODE": "8", "TASKS_PER_NODE": "1(x3)"}, [8, 8, 8]),
        ({"TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        ({"TASKS_PER_NODE": "4,1(x2)"}, [4, 1, 1]),
        ({}, [1, 1, 1]),
    ],
)
def test_slots_are_gpus_if_slurm_reports_them_else_tasks(variables, counts):
    assert slots(**variables) == counts


def test_requested_slots_are_used_if_slurm_reports_no_gpus():
    assert slots(asked=2, TASKS_PER_NODE="1(x3)") == [2, 2, 2]
    assert slots(asked=2, GPUS_PER_NODE="8") == [8, 8, 8]


def test_outside_an_allocation_there_are_no_hosts():
    assert not is_inside_allocation({"SLURM_JOB_NODELIST": ""})
    with refused(HostfileError, "neox-launch", code="no-allocation"):
        allocated_hosts({})


@pytest.mark.parametrize("counts", ["2(x99999999999)", f"{'9' * 5000}", "999999", "2(x3)1", "\u00b2"])
def test_counts_of_tasks_that_cannot_be_right_are_refused(counts):
    with refused(HostfileError, code="invalid-tasks"):
        slots(TASKS_PER_NODE=counts)


def test_a_count_of_gpus_that_cannot_be_right_is_not_used():
    assert slots(GPUS_PER_NODE="9" * 5000, TASKS_PER_NODE="2(x3)") == [2, 2, 2]
