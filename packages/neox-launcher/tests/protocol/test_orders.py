"""Serialization of orders, including arbitrary bytes."""

from dataclasses import asdict

import pytest

from neox_launcher.protocol.messages import decode_line, encode_message
from neox_launcher.protocol.orders import AgentOrders, Place
from neox_launcher.resources.host import Host


@pytest.fixture
def orders(make_orders):
    return make_orders(
        hosts=(Host("one", (0, 1)), Host("two", (3,))),
        environment={"NAME": "a 'b' \"c\"; $(d)\n`e` \\ \udcff \u2028"},
        worker=("-m", "program", "--flag", "x\ny"),
        resolved="word",
        working_directory="/some where",
    )


def encoded(orders):
    return encode_message("orders", {"orders": orders.for_agents()})


def test_orders_survive_serialization(orders):
    received = AgentOrders.from_fields(decode_line(encoded(orders))["orders"])
    assert asdict(received) == orders.for_agents()


def test_orders_are_one_line_of_ascii(orders):
    assert encoded(orders).isascii()
    assert b"\n" not in encoded(orders)


def test_what_agents_receive_does_not_grow_with_the_number_of_hosts(make_orders):
    one, many = (
        make_orders(hosts=tuple(Host(f"worker-{number}", tuple(range(8))) for number in range(count)))
        for count in (1, 10_000)
    )
    assert encoded(one) == encoded(many)


def test_a_place_survives_serialization():
    place = Place(
        slots=(1, 3), ranks=(5, 6), local_rank=0, num_workers=9, is_mpi=False, shares_terminal=False
    )
    sent = decode_line(encode_message("place", {"place": asdict(place)}))
    assert Place.from_fields(sent["place"]) == place


def test_workers_are_counted_over_hosts(orders):
    assert orders.num_workers == 3
