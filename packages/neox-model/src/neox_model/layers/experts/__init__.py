"""Mixture of experts."""

from neox_model.layers.experts.blocks import (
    ExpertAdapter,
    ExpertBlocks,
    grouped_product,
    looped_product,
    uncompiled_grouped_product,
)
from neox_model.layers.experts.dispatch import LOCAL_DISPATCH, Dispatcher
from neox_model.layers.experts.layer import Experts
from neox_model.layers.experts.router import SCORES, Balance, Router, sinkhorn

__all__ = [
    "LOCAL_DISPATCH",
    "SCORES",
    "Balance",
    "Dispatcher",
    "ExpertAdapter",
    "ExpertBlocks",
    "Experts",
    "Router",
    "grouped_product",
    "looped_product",
    "sinkhorn",
    "uncompiled_grouped_product",
]
