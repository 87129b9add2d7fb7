"""Rules about low-rank adapters."""

from collections.abc import Iterator

from neox_config.derive.adapters import adapted_matrices
from neox_config.derive.attention_layers import types_in
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.facts.attention import WITHOUT_HEADS
from neox_config.facts.conditions import one_of
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

# Gives each pipeline stage transformer layers, which all have adapters.
_EVERY_STAGE = "type:transformer|mlp"


def adapters_have_a_base(c: NeoXConfig) -> Iterator[Problem]:
    """Require the folder of the weights that adapters are added to."""
    if c.adapters.lora_rank and c.adapters.lora_base is None:
        what = "requires lora-base, the folder of the checkpoints of the model to adapt"
        yield Problem("lora_rank", what, "add lora-base: FOLDER")


def adapters_have_matrices(c: NeoXConfig) -> Iterator[Problem]:
    """Require that the model has a matrix that is adapted."""
    if not c.adapters.lora_rank:
        return
    if types_in(c) & set(WITHOUT_HEADS):
        what = f"cannot be used with {one_of(WITHOUT_HEADS)} layers"
        yield Problem("lora_rank", what, "use other attention types")
    if not adapted_matrices(c):
        yield Problem(
            "lora_target_modules",
            "names no matrix of this model",
            "use some of qkv, dense, up, down, or gate with a gated activation",
        )


def adapters_are_not_orthogonalized(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse an optimizer for whole matrices."""
    if c.adapters.lora_rank and optimizer_facts(c).matrix_states:
        what = f"cannot train adapters: {c.optimizer.optimizer.type} updates the layers' own matrices"
        yield Problem("optimizer.type", what, "use Adam")


def adapters_are_on_every_stage(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse pipelines that may have a stage without a transformer layer, which would train its weights."""
    method = c.parallelism.pipe_partition_method
    if c.adapters.lora_rank and c.parallelism.pipe_parallel_size > 1 and method.lower() != _EVERY_STAGE:
        what = f"{method} can leave a pipeline stage without adapters (lora-rank)"
        yield Problem("pipe_partition_method", what, f"use {_EVERY_STAGE}")
