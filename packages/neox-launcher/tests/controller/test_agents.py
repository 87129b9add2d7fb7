"""Which agents are accepted for which hosts and ranks, and which are refused."""

import selectors

import pytest

from neox_launcher.controller.agents import Agents
from neox_launcher.protocol.orders import AgentOrders
from neox_launcher.resources.host import Host


@pytest.fixture
def orders(make_orders):
    hosts = (Host("one.cluster", (0,)), Host("two", (1, 3)), Host("three", (0,)))
    return make_orders(hosts=(*hosts, Host("10.0.0.1", (0,)), Host("10.0.0.2", (0,)), Host("one.b", (0,))))


@pytest.fixture
def report(orders, sealed_channels):
    """Let agents connect, and record what is sent to them and what is heard from them."""
    refused, heard = [], []
    with selectors.DefaultSelector() as selector:
        agents = Agents(
            orders,
            selector,
            hear=lambda agent, message: heard.append(message),
            lose=lambda agent, reason: None,
            refuse=lambda host, reason: refused.append((host, reason)),
            shares_terminal=False,
        )

        def say_hello(*, follow_up=None, **who):
            here, there = sealed_channels()
            if follow_up is not None:
                there.send(follow_up)
                here.read()
            agents.on_connected(
                here,
                {
                    "kind": "hello",
                    "host": "h",
                    "addresses": ["10.0.0.1"],
                    "time": 0.0,
                    "number": None,
                    "name": None,
                    "rank": None,
                    **who,
                },
            )
            return there

        say_hello.agents, say_hello.refused, say_hello.heard = agents, refused, heard
        yield say_hello
        agents.close()


@pytest.mark.parametrize(
    ("who", "place"),
    [
        ({"number": 1}, {"slots": [1, 3], "ranks": [1, 2], "local_rank": 0, "is_mpi": False}),
        ({"name": "three"}, {"slots": [0], "ranks": [3], "local_rank": 0, "is_mpi": False}),
        ({"name": "one"}, {"slots": [0], "ranks": [0], "local_rank": 0, "is_mpi": False}),
        ({"name": "two.cluster"}, {"slots": [1, 3], "ranks": [1, 2], "local_rank": 0, "is_mpi": False}),
        ({"name": "10.0.0.2"}, {"slots": [0], "ranks": [5], "local_rank": 0, "is_mpi": False}),
        ({"name": "one.b"}, {"slots": [0], "ranks": [6], "local_rank": 0, "is_mpi": False}),
        ({"rank": 2}, {"slots": [1, 3], "ranks": [2], "local_rank": 1, "is_mpi": True}),
    ],
)
def test_an_agent_receives_its_orders_and_its_place(report, orders, who, place):
    agent = report(**who)
    message = agent.next_message()
    assert message["kind"] == "orders"
    received = AgentOrders.from_fields(message["orders"])
    assert {name: getattr(received, name) for name in orders.for_agents()} == orders.for_agents()
    assert agent.next_message() == {
        "kind": "place",
        "place": {**place, "num_workers": 7, "shares_terminal": False},
    }


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ({"number": 6}, "it reports as host 6, which is not in the plan"),
        ({"number": -1}, "it reports as host -1, which is not in the plan"),
        ({"name": "four"}, "it reports as name four, which is not in the plan"),
        ({"name": "10"}, "it reports as name 10, which is not in the plan"),
        ({"rank": 7}, "it reports as rank 7, which is not in the plan"),
        ({}, "it reports neither a rank nor a host"),
    ],
)
def test_an_agent_that_is_not_in_the_plan_is_refused(report, who, words):
    report(**who)
    assert report.refused == [("h", words)]
    assert len(report.agents) == 0


def test_a_message_that_arrived_together_with_the_hello_is_heard(report):
    report(number=0, follow_up="trouble")
    assert report.heard == [{"kind": "trouble"}]


def test_ranks_are_unique(report):
    report(number=1)
    report(rank=2)
    assert [host for host, why in report.refused if "rank 2" in why] == ["h"]


def test_all_are_ready_when_every_rank_has_an_agent(report):
    for number in (3, 4, 5):
        report(number=number)
    report(rank=0)
    report(rank=1)
    report(number=2)
    assert report.agents.missing_hosts() == [1]
    assert not report.agents.are_complete
    report(rank=2)
    assert report.agents.missing_hosts() == []
    assert report.agents.are_complete
    assert not report.agents.are_ready
    for agent in report.agents:
        agent.is_ready = True
    assert report.agents.are_ready
    assert report.agents.first_address() == "10.0.0.1"
