"""Phi-3, whose projections are stored together."""

from neox_model.convert.families.family import HeadDim, Row
from neox_model.convert.families.llama import GATED_MLP, NORMS_BEFORE, entries, like_llama
from neox_model.convert.families.rotary import RotaryBase, RotaryFraction, RotaryScaling
from neox_model.convert.families.windows import OneWindow
from neox_model.convert.forms import FUSED_QKV

__all__ = ["PHI3"]

_ROTARY = (
    RotaryBase(),
    RotaryFraction("partial_rotary_factor", 1.0),
    # Older files call the scaling su or yarn.
    RotaryScaling(("longrope",), {"su": "longrope", "yarn": "longrope"}, length=4096),
)
PHI3 = like_llama(
    "phi3",
    (*entries(epsilon=1e-5, rotary=_ROTARY), HeadDim(), OneWindow(default=None)),
    in_layer=(
        *NORMS_BEFORE,
        Row("attention.qkv", ("self_attn.qkv_proj",), FUSED_QKV),
        Row("attention.dense", ("self_attn.o_proj",)),
        *GATED_MLP,
    ),
    required={},
    dropouts={"hidden-dropout": "resid_pdrop", "attention-dropout": "attention_dropout"},
    joined={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
)
