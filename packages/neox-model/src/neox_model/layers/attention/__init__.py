"""How tokens look at each other, by the names of `attention_config`.

A core is `core(query_SBNK, key_TBNK, value_TBNK, documents_BS) -> context_SBNK`, causal, over the heads of
this rank.
"""

from collections.abc import Callable

from torch import nn

from neox_model.layers.attention.dense import DenseCore, SoftmaxCore
from neox_model.layers.attention.parallel_attention import ParallelAttention

__all__ = ["CORES", "DenseCore", "ParallelAttention", "SoftmaxCore"]

CORES: dict[str, Callable[..., nn.Module]] = {"global": DenseCore}
