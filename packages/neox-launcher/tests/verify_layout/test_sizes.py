"""The parallel sizes of `verify-layout`."""

import json

import pytest

from neox_config import Text, load_config
from neox_config.errors import LaunchError
from neox_launcher.verify_layout.sizes import Sizes, parse_layout, sizes_of
from support.refusals import refused
from support.settings import TINY


def config_of(settings):
    return load_config([], texts=[Text(json.dumps(TINY | settings), name="settings")])


def test_short_names_are_parameters():
    assert parse_layout("tp=2, pp=2,zero=3,sp=true,schedule=zbv,dp=2,num-layers=4") == {
        "model-parallel-size": "2",
        "pipe-parallel-size": "2",
        "zero-optimization.stage": "3",
        "sequence-parallel": "true",
        "pipeline-schedule": "zbv",
        "dp": "2",
        "num-layers": "4",
    }


@pytest.mark.parametrize("text", ["tp", "tp=", "=2", "tp=2,pp"])
def test_what_is_no_setting_is_refused(text):
    with refused(LaunchError, "name=value", code="no-pair"):
        parse_layout(text)


def test_each_degree_above_one_becomes_two():
    config = config_of({"model_parallel_size": 4, "pipe_parallel_size": 8, "num_layers": 8})
    assert sizes_of(config, {}, is_cut=True) == Sizes(tensor=2, stages=2, data=2)
    assert sizes_of(config, {}, is_cut=True).processes == 8


def test_a_layout_without_parallelism_has_two_replicas():
    assert sizes_of(config_of({}), {}, is_cut=True) == Sizes(data=2)
    assert sizes_of(config_of({}), {"dp": "4"}, is_cut=True) == Sizes(data=4)


def test_more_than_eight_processes_are_refused():
    config = config_of({"model_parallel_size": 4, "pipe_parallel_size": 4, "num_layers": 8})
    with refused(LaunchError, "32 processes", code="too-many-processes"):
        sizes_of(config, {}, is_cut=False)


@pytest.mark.parametrize("copies", ["0", "two", "-1"])
def test_dp_is_a_number_of_copies(copies):
    with refused(LaunchError, "dp=2", code="invalid-size"):
        sizes_of(config_of({}), {"dp": copies}, is_cut=True)
