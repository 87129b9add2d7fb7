"""Selection of hosts and slots by `include`, `exclude`, `num_nodes` and `num_gpus`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neox_launcher.resources.host import Host
from neox_launcher.resources.selection import SelectionError, select_hosts
from support.refusals import shows

POOL = (
    Host("worker-0", (0, 1, 2, 3)),
    Host("worker-1", (0, 1, 2, 3)),
    Host("worker-2", (0, 1)),
)


def chosen(pool=POOL, **choice):
    return {host.name: host.slots for host in select_hosts(pool, **choice)}


ALL_OF = {host.name: host.slots for host in POOL}
INCLUDED = {
    "worker-0": {"worker-0": (0, 1, 2, 3)},
    "worker-1:2": {"worker-1": (2,)},
    "worker-0:0,2": {"worker-0": (0, 2)},
    "worker-0@worker-1:0,2": {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)},
    # The pool's order counts, not the text's, and slots come in rising order.
    "worker-2@worker-0:3,1": {"worker-0": (1, 3), "worker-2": (0, 1)},
    "worker-1:1@worker-1:3,1": {"worker-1": (1, 3)},
    " worker-0 : 1 , 2 @ worker-2 ": {"worker-0": (1, 2), "worker-2": (0, 1)},
    "WORKER-0:1": {"worker-0": (1,)},
}


@pytest.mark.parametrize("text", INCLUDED)
def test_include_selects_hosts_and_slots(text):
    assert chosen(include=text) == INCLUDED[text]
    assert list(chosen(include=text)) == sorted(INCLUDED[text])


EXCLUDED = {
    "worker-0": {"worker-1": (0, 1, 2, 3), "worker-2": (0, 1)},
    "worker-1:2": {**ALL_OF, "worker-1": (0, 1, 3)},
    "worker-0@worker-1:0,1@worker-2:1": {"worker-1": (2, 3), "worker-2": (0,)},
    "worker-2:0,1": {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)},
}


@pytest.mark.parametrize("text", EXCLUDED)
def test_exclude_removes_hosts_and_slots(text):
    assert chosen(exclude=text) == EXCLUDED[text]


WRONG = {
    "jeff": "names jeff, which is not among the hosts",
    "jeff@worker-0": "names jeff",
    "worker-4": "names worker-4",
    "worker-0:4": "names slot 4 of worker-0, which has slots 0 to 3",
    "worker-0:0@worker-2:2": "names slot 2 of worker-2, which has slots 0 to 1",
    "worker-0:": "lacks a slot after worker-0:",
    "worker-0:1,": "lacks a slot after worker-0:",
    "worker-0:-1": "has '-1' as a slot of worker-0",
    "worker-0:a": "has 'a' as a slot of worker-0",
    "worker-0:1-3": "has '1-3' as a slot of worker-0",
    "worker-0:²": "has '²' as a slot of worker-0",
    f"worker-0:{'9' * 5000}": "of worker-0, which has slots 0 to 3",
    "x" * 5000: "which is not among the hosts",
    "": "has an empty part",
    "worker-0@": "has an empty part",
    "worker-0@@worker-1": "has an empty part",
    "worker-0@worker-0:1": "names worker-0 both as a whole and with slots",
    "worker-0:1@worker-0": "names worker-0 both as a whole and with slots",
}


@pytest.mark.parametrize("parameter", ["include", "exclude"])
@pytest.mark.parametrize("text", WRONG)
def test_unknown_hosts_and_malformed_selections_are_refused(parameter, text):
    with pytest.raises(SelectionError) as found:
        chosen(**{parameter: text})
    assert found.value.problem.name == parameter
    assert WRONG[text] in found.value.problem.what
    assert len(found.value.problem.what) < 200


def test_hosts_are_listed_if_one_is_not_known():
    with pytest.raises(SelectionError) as found:
        chosen(exclude="worker-9")
    assert shows(found.value.problem.remedy, "worker-0, worker-1, worker-2")


def test_nothing_left_is_refused():
    with pytest.raises(SelectionError) as found:
        chosen(exclude="worker-0@worker-1@worker-2:0,1")
    assert shows(found.value.problem.what, "leaves no host")


def test_num_nodes_and_num_gpus_select_the_first_ones():
    assert chosen(num_nodes=-1, num_gpus=-1) == chosen(num_gpus=None) == ALL_OF
    assert chosen(num_nodes=1) == {"worker-0": (0, 1, 2, 3)}
    assert chosen(num_gpus=2) == {"worker-0": (0, 1), "worker-1": (0, 1), "worker-2": (0, 1)}
    assert chosen(num_nodes=2, num_gpus=3) == {"worker-0": (0, 1, 2), "worker-1": (0, 1, 2)}


def test_num_nodes_counts_the_remaining_hosts():
    assert chosen(exclude="worker-0@worker-1:0", num_nodes=1) == {"worker-1": (1, 2, 3)}
    assert chosen(include="worker-2@worker-1", num_nodes=1) == {"worker-1": (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("choice", "name", "sentence"),
    [
        ({"num_nodes": 4}, "num_nodes", "is more than the 3 hosts available"),
        ({"num_nodes": 2, "include": "worker-2"}, "num_nodes", "is more than the 1 host available"),
        ({"num_gpus": 3}, "num_gpus", "is more than the 2 slots of worker-2"),
    ],
)
def test_more_hosts_or_slots_than_available_are_refused(choice, name, sentence):
    with pytest.raises(SelectionError) as found:
        chosen(**choice)
    assert (found.value.problem.name, found.value.problem.what) == (name, sentence)


def test_an_ipv6_address_is_separated_from_its_slots():
    pool = (Host("fe80::1", (0, 1)), Host("fe80::1:1", (0, 1)))
    assert chosen(pool, include="fe80::1") == {"fe80::1": (0, 1)}
    assert chosen(pool, include="[fe80::1]:1") == {"fe80::1": (1,)}
    assert chosen(pool, include="fe80::1:1") == {"fe80::1:1": (0, 1)}
    assert chosen(pool, include="fe80::1:0") == {"fe80::1": (0,)}


slots = st.sets(st.integers(0, 5), min_size=1)


@given(st.dictionaries(st.sampled_from("abcdef"), slots, min_size=1), st.integers(1, 6))
def test_included_and_excluded_slots_add_up_to_the_pool(named, hosts):
    pool = tuple(Host(name, tuple(range(6))) for name in "abcdef"[:hosts])
    named = {name: part for name, part in named.items() if name in "abcdef"[:hosts]}
    if not named:
        return
    text = "@".join(f"{name}:{','.join(map(str, part))}" for name, part in named.items())
    inside = chosen(pool, include=text)
    assert inside == {name: tuple(sorted(part)) for name, part in named.items()}
    if sum(map(len, inside.values())) == 6 * hosts:
        return
    outside = chosen(pool, exclude=text)
    both = {host.name: sorted(inside.get(host.name, ()) + outside.get(host.name, ())) for host in pool}
    assert both == {host.name: list(host.slots) for host in pool}
