"""Elastic batch sizes, compared with values computed by hand from the factors of each batch."""

import pytest

from neox_config import resolve
from neox_config.derive.elasticity import (
    HIGHLY_COMPOSITE,
    common_batch,
    elastic_batch,
    elastic_devices,
    without_elasticity,
)
from neox_config.errors import ConfigError
from neox_config.estimate.setup import fewest_devices
from neox_config.schema.sections.elasticity import Elasticity
from support.refusals import refused, shows

ELASTIC = """\
elasticity:
  {enabled: true, max_train_batch_size: 64, micro_batch_sizes: [2, 4], version: 0.1, max_gpus: 16}
"""


def block(**values):
    return Elasticity.model_validate({"enabled": True} | values)


def divisors(number):
    return sum(number % other == 0 for other in range(1, number + 1))


def test_no_smaller_number_has_as_many_divisors_as_a_highly_composite_one():
    records, most = [], 0
    for number in range(1, 5041):
        if divisors(number) > most:
            records.append(number)
            most = divisors(number)
    assert [number for number in HIGHLY_COMPOSITE if number <= 5040] == records


def test_the_batch_that_most_numbers_of_devices_share():
    # lcm(8, 12, 16, 17) = 816; 12 x 816 = 9792 = 2^6 x 3^2 x 17 suits 23 numbers from 32 to 1500.
    given = block(max_train_batch_size=10_000, micro_batch_sizes=[8, 12, 16, 17], min_gpus=32, max_gpus=1500)
    given = given.replaced(version=0.1)
    assert elastic_devices(given) == (
        *(32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612),
        *(816, 1224),
    )
    chosen = elastic_batch(given, devices=64)
    assert (chosen.train, chosen.micro, chosen.accumulation) == (9792, 17, 9)


@pytest.mark.parametrize(("prefer_large", "batch"), [(True, 48), (False, 36)])
def test_of_batches_that_suit_as_many_one_is_preferred(prefer_large, batch):
    # 48 = 4 x 12 and 36 = 3 x 12; up to 6 copies, 48 suits 1 2 3 4 6 by fours, 36 suits 1 2 3 4 6 by threes.
    crowd = common_batch([4, 3], largest=49, fewest=1, most=6, prefer_large=prefer_large)
    assert (crowd.batch, crowd.counts) == (batch, (1, 2, 3, 4, 6))


def test_version_2_counts_whole_hosts_and_copies_of_the_model():
    # Hosts of 4 devices hold 2 copies; 24 per copy-row: 2 x 12, shared by 1 2 3 4 6 12 hosts; 2 x 24 in all.
    given = block(max_train_batch_size=64, micro_batch_sizes=[2, 4], num_gpus_per_node=4)
    assert elastic_devices(given, devices_per_copy=2) == (4, 8, 12, 16, 24, 48)
    chosen = elastic_batch(given, devices=8, devices_per_copy=2)
    assert (chosen.train, chosen.micro, chosen.accumulation) == (48, 4, 3)


def test_version_0_2_gives_some_host_counts_a_unique_batch_size():
    # 5 hosts are 10 copies: 3 micro-batches of 2 each make 60, one of 4 makes 40; 64 is the limit.
    given = block(max_train_batch_size=64, micro_batch_sizes=[2, 4], num_gpus_per_node=4)
    chosen = elastic_batch(given, devices=20, devices_per_copy=2)
    assert (chosen.train, chosen.micro, chosen.accumulation) == (60, 2, 3)
    small = given.replaced(prefer_large_batch=False)
    chosen = elastic_batch(small, devices=20, devices_per_copy=2)
    assert (chosen.train, chosen.micro, chosen.accumulation) == (40, 2, 2)


@pytest.mark.parametrize(
    ("values", "devices", "copy", "sentence"),
    [
        (
            {"version": 0.1, "max_train_batch_size": 48},
            7,
            1,
            "size for 7 devices; use 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        ({"num_gpus_per_node": 4}, 10, 1, "allows no batch size for 10 devices; use 4, 8"),
        ({"num_gpus_per_node": 4, "max_train_batch_size": 24}, 52, 1, "the smallest possible is 104"),
        ({"num_gpus_per_node": 3}, 6, 2, "set num_gpus_per_node to a multiple of 2"),
        ({"version": 0.1}, 4, 2, "set version: 0.2"),
        ({"max_train_batch_size": 10, "min_gpus": 100}, 100, 1, "lower min_gpus"),
    ],
)
def test_unsupported_device_counts_are_reported_with_a_remedy(values, devices, copy, sentence):
    with refused(ValueError, "") as found:
        elastic_batch(block(**values), devices=devices, devices_per_copy=copy)
    assert sentence in str(found.value)


def test_the_same_batch_on_every_number_of_devices_that_shares_it(load):
    config = load(ELASTIC, "train-micro-batch-size-per-gpu=null")
    # 64 // 2 = 32 and 64 // 4 = 16: 24 x 2 = 12 x 4 = 48 samples, for 24 = 2^3 x 3 devices and its divisors.
    assert fewest_devices(config) == 1
    for devices in (1, 2, 3, 4, 6, 8, 12):
        resolved = resolve(config, devices=devices)
        assert resolved.run.batch.whole == 48
        assert resolved.run.batch.micro * resolved.run.batch.accumulation * devices == 48
        assert resolved.run.layout.elastic == (1, 2, 3, 4, 6, 8, 12)
    experts = ("moe-num-experts=4", "expert-parallel-size=2", "engine=torch")
    config = load(ELASTIC, "train-micro-batch-size-per-gpu=null", *experts)
    assert fewest_devices(config) == 2
    assert resolve(config, devices=4).run.layout.elastic == (2, 4, 6, 8, 12)


def test_other_numbers_of_devices_are_refused_with_the_nearest(load):
    config = load(ELASTIC, "train-micro-batch-size-per-gpu=null")
    with pytest.raises(ConfigError) as found:
        resolve(config, devices=7)
    (problem,) = found.value.problems
    assert problem.name == "elasticity.enabled"
    assert shows(problem.what, "for 7 devices")
    assert shows(problem.remedy, "1, 2, 3", "4, 6, 8", "12")
    assert problem.place.line == 2


def test_tensor_parallel_devices_share_a_copy(load):
    text = ELASTIC.replace("version: 0.1", "num_gpus_per_node: 2").replace(
        "{en", "{model_parallel_size: 2, en"
    )
    config = load(f"{text}model-parallel-size: 2", "train-micro-batch-size-per-gpu=null")
    resolved = resolve(config, devices=4)
    assert (resolved.run.batch.whole, resolved.run.layout.data) == (48, 2)
    assert resolved.run.layout.elastic == (2, 4, 6, 8, 12, 16)


def test_a_program_that_fills_no_batch_runs_on_any_number_of_devices(load):
    config = without_elasticity(load(ELASTIC, "train-micro-batch-size-per-gpu=null"))
    resolved = resolve(config, devices=7)
    assert (resolved.run.batch.whole, resolved.run.layout.elastic) == (7, ())
