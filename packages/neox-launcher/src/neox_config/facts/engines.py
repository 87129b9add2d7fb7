"""What each engine offers, by ZeRO stage, with and without pipeline stages.

Rules ask it through `neox_config.derive.engine`, which chooses the engine of a configuration. The engines
themselves are in `neox_model.engine`, whose tests compare them with this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ENGINES", "Capability", "EngineName", "Offer", "averages_early"]

EngineName = Literal["torch", "deepspeed"]

# training: it trains.
# before_update: gradients, averaged over data-parallel ranks, can be read before they are clipped and applied
#     (`Update.before` in `neox_model.engine.contract`).
# whole_weights: the optimizer updates the whole tensor that a rank holds, not a part of it.
# whole_rows: the optimizer updates whole rows of that tensor, and may join over data-parallel ranks what it
#     computes of them.
Capability = Literal["training", "before_update", "whole_weights", "whole_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The ZeRO stages with which an engine offers something.

    Args:
        plain: without pipeline stages.
        pipeline: with pipeline stages.
    """

    plain: frozenset[int]
    pipeline: frozenset[int]

    def includes(self, stage: int, *, uses_pipeline: bool) -> bool:
        """Return True if it is offered with this ZeRO stage."""
        return stage in (self.pipeline if uses_pipeline else self.plain)


_STAGES = frozenset({0, 1, 2, 3})
_STAGE_0 = Offer(plain=frozenset({0}), pipeline=frozenset({0}))

ENGINES: Mapping[EngineName, Mapping[Capability, Offer]] = {
    "torch": {
        "training": Offer(plain=_STAGES, pipeline=_STAGES),
        "before_update": Offer(plain=_STAGES, pipeline=_STAGES),
        "whole_weights": _STAGE_0,
        "whole_rows": Offer(plain=_STAGES, pipeline=_STAGES),
    },
    "deepspeed": {
        "training": Offer(plain=_STAGES, pipeline=frozenset({0, 1})),
        "before_update": _STAGE_0,
        "whole_weights": _STAGE_0,
        "whole_rows": _STAGE_0,
    },
}
"""Name -> capability -> where it is offered."""


def averages_early(engine: EngineName, zero_stage: int, *, overlaps: bool | None, on_gpu: bool) -> bool:
    """Return True if gradients of whole weights are averaged during the backward pass, not after it.

    Args:
        engine: the engine that trains.
        zero_stage: stage of ZeRO.
        overlaps: what the configuration says; None: on GPUs. On CPUs, threads that communicate take the time
            of those that compute.
        on_gpu: whether the devices are GPUs.
    """
    return engine == "torch" and zero_stage == 0 and (on_gpu if overlaps is None else overlaps)
