"""The parameters that request a fused operator of neox-kernels."""

__all__ = ["FUSED_OPERATORS"]

FUSED_OPERATORS = (
    "scaled_upper_triang_masked_softmax_fusion",
    "scaled_masked_softmax_fusion",
    "bias_gelu_fusion",
    "bias_dropout_fusion",
    "rope_fusion",
    "layernorm_fusion",
    "rmsnorm_fusion",
    "glu_fusion",
    "loss_fusion",
)
"""With `true`, the operator is required."""
