"""Rules about stages of a pipeline, and what works only without them."""

import re
from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig


def stages_have_layers(c: NeoXConfig) -> Iterator[Problem]:
    """A pipeline stage holds at least one layer."""
    stages, layers = c.parallelism.pipe_parallel_size, c.model.num_layers
    if stages > layers:
        yield Problem("pipe_parallel_size", f"is more than num-layers: {layers}", f"use at most {layers}")


def layers_are_dealt_by_a_pattern(c: NeoXConfig) -> Iterator[Problem]:
    """What stands behind `type:` is a regular expression."""
    kind, _, pattern = c.parallelism.pipe_partition_method.partition(":")
    if kind.lower() == "type":
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(
                "pipe_partition_method",
                f"is no regular expression behind type: ({error})",
                "use type:transformer|mlp",
            )


def zero_2_and_above_need_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed cannot split gradients (ZeRO stage >= 2) across pipeline stages."""
    if c.zero.zero_optimization.stage >= 2 and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "zero_optimization.stage",
            "stage 2 and above do not work with pipeline parallelism",
            "set pipe-parallel-size: 0, or stage: 1",
        )


def gradient_norms_need_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """The pipeline engine does not keep each gradient."""
    if c.logging.log_grad_norm and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "log_grad_norm", "works only without pipeline stages", "set pipe-parallel-size: 0, or false"
        )


def contiguous_checkpointing_partitions(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's one buffer holds partitioned activations only."""
    activation = c.activation_checkpointing
    if activation.contiguous_checkpointing and not activation.partition_activations:
        yield Problem(
            "contiguous_checkpointing", "needs partition-activations", "set partition-activations: true"
        )
