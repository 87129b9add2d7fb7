"""The dtypes of stored tensors, by the names of the safetensors format."""

import torch

__all__ = ["DTYPES", "DTYPE_NAMES"]

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
