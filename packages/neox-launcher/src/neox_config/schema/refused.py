"""Documented switches that will not be implemented, and why; the table may only shrink."""

from collections.abc import Mapping

__all__ = ["REFUSED"]

# Refused whenever a configuration is loaded.
REFUSED: Mapping[str, str] = {
    "zero_optimization.zero_quantized_gradients": (
        "gives wrong gradients: DeepSpeed 0.19.8 reads bfloat16 and float32 as float16, and averages over "
        "all ranks instead of the data-parallel ones"
    ),
    "sparse_gradients": "is no longer supported by DeepSpeed; embedding gradients are dense",
    "compression_training.channel_pruning.shared_parameters.enabled": (
        "prunes convolutions, and the model has none"
    ),
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel": (
        "is a CUDA kernel that DeepSpeed removed with its compression; PyTorch quantizes the weights"
    ),
}
