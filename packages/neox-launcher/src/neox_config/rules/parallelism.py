"""Rules about pipeline parallelism."""

import re
from collections.abc import Iterator

from neox_config.derive.engine import chosen_engine, engine_offers, uses_pipeline
from neox_config.derive.pipeline import chunks_per_stage, splits_backward
from neox_config.facts.pipeline_schedules import SCHEDULES, has_zero_stage
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def stages_have_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require at least one layer per pipeline stage."""
    stages, layers = c.parallelism.pipe_parallel_size, c.model.num_layers
    if stages > layers:
        yield Problem("pipe_parallel_size", f"is more than num-layers: {layers}", f"use at most {layers}")


def chunks_suit_the_schedule(c: NeoXConfig) -> Iterator[Problem]:
    """Require a number of chunks per stage that the schedule has."""
    schedule, chunks = c.parallelism.pipeline_schedule, chunks_per_stage(c)
    facts = SCHEDULES[schedule]
    if chunks < facts.least_chunks:
        yield Problem(
            "virtual_pipeline_stages",
            f"must be at least {facts.least_chunks} with pipeline-schedule {schedule}",
            f"use {facts.least_chunks}",
        )
    if facts.most_chunks is not None and chunks > facts.most_chunks:
        remedy = f"use {facts.most_chunks}, or pipeline-schedule: interleaved"
        yield Problem(
            "virtual_pipeline_stages",
            f"must be at most {facts.most_chunks} with pipeline-schedule {schedule}",
            remedy,
        )


def chunks_have_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Require at least one layer per chunk of a pipeline stage."""
    stages, chunks, layers = c.parallelism.pipe_parallel_size, chunks_per_stage(c), c.model.num_layers
    if chunks > 1 and stages <= layers < stages * chunks:
        yield Problem(
            "virtual_pipeline_stages",
            f"requires a layer for each of {stages} x {chunks} chunks, but num-layers is {layers}",
            f"use at most {layers // stages}, or fewer pipeline stages",
        )


def only_the_torch_engine_has_other_schedules(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse schedules that DeepSpeed's pipeline does not have."""
    schedule = c.parallelism.pipeline_schedule
    if schedule != "1f1b" and uses_pipeline(c) and chosen_engine(c).name != "torch":
        what = f"is {schedule}, which runs on the torch engine alone: DeepSpeed's pipeline is 1f1b"
        yield Problem("pipeline_schedule", what, "set engine: auto, or pipeline-schedule: 1f1b")


def split_backward_passes_store_activations(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse recomputed activations with schedules that split the backward pass."""
    if c.activation_checkpointing.checkpoint_activations and splits_backward(c):
        yield Problem(
            "pipeline_schedule",
            f"is {c.parallelism.pipeline_schedule}, which would recompute each layer once for its "
            "activations and again for every weight (checkpoint-activations)",
            "set pipeline-schedule: interleaved, or checkpoint-activations: false",
        )


def one_buffer_of_checkpoints_has_a_size(c: NeoXConfig) -> Iterator[Problem]:
    """Require the size of the buffer of recomputed layers' inputs if it does not follow from the stages."""
    activation, has_chunks = c.activation_checkpointing, chunks_per_stage(c) > 1
    has_no_size = activation.contiguous_checkpointing and activation.number_checkpoints is None
    if uses_pipeline(c) and has_chunks and has_no_size:
        yield Problem(
            "contiguous_checkpointing",
            "cannot size its buffer for several chunks per stage (virtual-pipeline-stages)",
            "set number-checkpoints, or contiguous-checkpointing: false",
        )


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


def zero_stages_suit_the_pipeline(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO stages that the engine does not support with pipeline parallelism."""
    if not engine_offers(c, "training"):
        yield Problem(
            "zero_optimization.stage",
            f"must be at most 1 with a pipeline on the {chosen_engine(c).name} engine",
            "set stage: 1, engine: torch, or pipe-parallel-size: 0",
        )


def split_backward_passes_keep_weights(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse ZeRO stage 3 with schedules that split the backward pass.

    The gradients of weights are computed when the weights that the operators refer to are freed again.
    """
    schedule, stage = c.parallelism.pipeline_schedule, c.zero.zero_optimization.stage
    if uses_pipeline(c) and not has_zero_stage(schedule, stage):
        yield Problem(
            "zero_optimization.stage",
            f"must be at most 2 with pipeline-schedule {schedule}, which computes the gradients of weights "
            "after stage 3 has freed the layer",
            "set stage: 2, or pipeline-schedule: interleaved",
        )


def contiguous_checkpointing_partitions(c: NeoXConfig) -> Iterator[Problem]:
    """Require partition_activations for contiguous_checkpointing."""
    activation = c.activation_checkpointing
    if activation.contiguous_checkpointing and not activation.partition_activations:
        yield Problem(
            "contiguous_checkpointing", "requires partition-activations", "set partition-activations: true"
        )
