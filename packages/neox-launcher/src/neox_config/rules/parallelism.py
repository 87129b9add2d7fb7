"""Rules about pipeline parallelism."""

import re
from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, engine_offers
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def stages_have_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require at least one layer per pipeline stage."""
    stages, layers = c.parallelism.pipe_parallel_size, c.model.num_layers
    if stages > layers:
        yield Problem("pipe_parallel_size", f"is more than num-layers: {layers}", f"use at most {layers}")


def layers_are_dealt_by_a_pattern(c: NeoXConfig) -> Iterator[Problem]:
    """Require a valid regular expression after `type:`."""
    kind, _, pattern = c.parallelism.pipe_partition_method.partition(":")
    if kind.lower() == "type":
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(
                "pipe_partition_method",
                f"has an invalid regular expression after type: ({error})",
                "use type:transformer|mlp",
            )


def zero_2_and_above_need_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO stages that DeepSpeed does not support with pipeline parallelism."""
    if chosen_engine(c).name == "deepspeed" and not engine_offers(c, "training"):
        yield Problem(
            "zero_optimization.stage",
            "must be at most 1 with pipeline parallelism",
            "set pipe-parallel-size: 0, or stage: 1",
        )


def contiguous_checkpointing_partitions(c: NeoXConfig) -> Iterator[Problem]:
    """Require partition_activations for contiguous_checkpointing."""
    activation = c.activation_checkpointing
    if activation.contiguous_checkpointing and not activation.partition_activations:
        yield Problem(
            "contiguous_checkpointing", "requires partition-activations", "set partition-activations: true"
        )
