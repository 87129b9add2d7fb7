"""OLMo 2 and 3, whose norms are on the outputs of attention and MLP, and of whole queries and keys."""

from neox_model.convert.families.family import HeadDim, Row
from neox_model.convert.families.llama import (
    ATTENTION_BIAS,
    GATED_MLP,
    QK_NORM,
    SELF_ATTENTION,
    entries,
    like_llama,
)
from neox_model.convert.families.rotary import RotaryByType
from neox_model.convert.families.windows import RepeatedWindows

__all__ = ["OLMO2", "OLMO3"]

_IN_LAYER = (
    *SELF_ATTENTION,
    *QK_NORM,
    Row("norm1_after", ("post_attention_layernorm",)),
    *GATED_MLP,
    Row("norm2_after", ("post_feedforward_layernorm",)),
)
_FIXED = {"layers.norm_placement": "after", "layers.mixer.qk_norm": "width"}
_WINDOWS = RepeatedWindows(4)
_ENTRIES = (HeadDim(), ATTENTION_BIAS)
OLMO2 = like_llama("olmo2", (*entries(epsilon=1e-5), *_ENTRIES), in_layer=_IN_LAYER, fixed=_FIXED)
# Layers with a window are rotated without scaling.
OLMO3 = like_llama(
    "olmo3",
    (*entries(epsilon=1e-5, rotary=(RotaryByType(_WINDOWS, 500000.0, 500000.0),)), *_ENTRIES, _WINDOWS),
    in_layer=_IN_LAYER,
    fixed=_FIXED,
)
