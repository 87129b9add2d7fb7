"""What nodes are told survives the journey, hostile bytes included."""

from neox_launcher.orders import Orders
from neox_launcher.resources.world import Host

ORDERS = Orders(
    hosts=(Host("one", (0, 1)), Host("two", (3,))),
    master_addr=None,
    master_port=0,
    environment={"NAME": "a 'b' \"c\"; $(d)\n`e` \\ \udcff \u2028"},
    worker=("-m", "program", "--flag", "x\ny"),
    resolved="word",
    working_directory="/some where",
    log_dir=None,
    gpus=0,
    bind_cores=False,
    detect_nvlink_pairs=True,
    stop_timeout=60.0,
    hang_timeout=None,
)


def test_orders_come_back_as_they_were():
    assert Orders.from_json(ORDERS.to_json()) == ORDERS


def test_orders_are_one_line_of_ascii():
    text = ORDERS.to_json()
    assert text.isascii()
    assert "\n" not in text


def test_workers_are_counted_over_hosts():
    assert ORDERS.num_workers == 3
