"""Who stands for which host and ranks, and who is turned away."""

import selectors
import socket
from dataclasses import replace

import pytest

from neox_launcher.control import Channel
from neox_launcher.nodes import Nodes
from neox_launcher.orders import Orders
from neox_launcher.resources.host import Host

ORDERS = Orders(
    hosts=(Host("one.cluster", (0,)), Host("two", (1, 3)), Host("three", (0,))),
    master_addr=None,
    master_port=0,
    environment={},
    worker=("-m", "program"),
    resolved="",
    working_directory="/",
    log_dir=None,
    gpus=0,
    bind_cores=False,
    detect_nvlink_pairs=False,
    stop_timeout=1.0,
    hang_timeout=None,
)


@pytest.fixture
def report():
    """Let a node report, and see what it is told."""
    refused, told = [], []
    with selectors.DefaultSelector() as selector:
        nodes = Nodes(
            ORDERS,
            selector,
            hear=lambda node, message: None,
            lose=lambda node, reason: None,
            refuse=lambda host, reason: refused.append((host, reason)),
            shares_terminal=False,
        )

        def say_hello(**who):
            here, there = (Channel(end) for end in tcp_pair())
            there.trust()
            nodes.welcome(here, {"host": "h", "addresses": ["10.0.0.1"], "time": 0.0, **who})
            told.append(there)
            return there

        say_hello.nodes, say_hello.refused = nodes, refused
        yield say_hello
        nodes.close()
        for channel in told:
            channel.close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.mark.parametrize(
    ("who", "place"),
    [
        ({"node": 1}, {"node": 1, "ranks": [1, 2], "local_rank": 0, "is_mpi": False}),
        ({"name": "three"}, {"node": 2, "ranks": [3], "local_rank": 0, "is_mpi": False}),
        ({"name": "one"}, {"node": 0, "ranks": [0], "local_rank": 0, "is_mpi": False}),
        ({"name": "two.cluster"}, {"node": 1, "ranks": [1, 2], "local_rank": 0, "is_mpi": False}),
        ({"rank": 2}, {"node": 1, "ranks": [2], "local_rank": 1, "is_mpi": True}),
    ],
)
def test_a_node_gets_its_orders_and_its_place(report, who, place):
    message = report(**who).next_message()
    assert message["kind"] == "orders"
    assert Orders.from_json(message["orders"]) == ORDERS
    assert message["place"] == {**place, "shares_terminal": False}


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ({"node": 3}, "it reports as node 3, which is not in the plan"),
        ({"node": -1}, "it reports as node -1, which is not in the plan"),
        ({"name": "four"}, "it reports as name four, which is not in the plan"),
        ({"rank": 4}, "it reports as rank 4, which is not in the plan"),
    ],
)
def test_who_is_not_in_the_plan_is_turned_away(report, who, words):
    report(**who)
    assert report.refused == [("h", words)]
    assert len(report.nodes) == 0


def test_nobody_is_two(report):
    report(node=1)
    report(rank=2)
    assert report.refused == [("h", "it reports as rank 2, and so does another host")]


def test_all_are_ready_when_every_rank_has_a_node(report):
    report(rank=0)
    report(rank=1)
    report(node=2)
    assert report.nodes.missing_hosts() == [1]
    report(rank=2)
    assert report.nodes.missing_hosts() == []
    assert not report.nodes.are_ready
    for node in report.nodes:
        node.is_ready = True
    assert report.nodes.are_ready
    assert report.nodes.first_address() == "10.0.0.1"


def test_orders_of_a_thousand_hosts_are_short(report):
    hosts = tuple(Host(f"worker-{number}", tuple(range(8))) for number in range(1000))
    assert len(replace(ORDERS, hosts=hosts).to_json()) < 100_000
