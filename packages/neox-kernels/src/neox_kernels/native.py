"""The compiled module: when it can be used, how it is loaded, and how tensors are described to it.

`compiled_for` is the one place that decides what calculates a custom operator: the compiled module for
tensors on an NVIDIA GPU, the plain formula on the CPU. So shapes, gradients and `torch.compile` are tested on
every machine.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from neox_kernels import build
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelBuildError, KernelUnavailable
from neox_kernels.precision import FUSED_DTYPES

__all__ = [
    "availability",
    "compiled_for",
    "norm_parameter_dtype",
    "parameter",
    "partials",
    "present_architectures",
    "site",
    "state",
]

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def present_architectures() -> tuple[str, ...]:
    """The architectures of the GPUs that this process sees, like ("sm_90",); empty without any."""
    if not torch.cuda.is_available():
        return ()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


@functools.cache
def _loaded(may_build: bool) -> tuple[ModuleType | None, str]:
    """The module, or None with the reason. Decided once per process."""
    if torch.version.hip is not None:
        return None, "the fused operators are CUDA code, and this PyTorch is built for ROCm"
    if not torch.cuda.is_available():
        return None, "this process sees no NVIDIA GPU"
    architectures = present_architectures()
    try:
        found = build.find_built(architectures)
        if found is None and may_build:
            found = build.build(architectures)
    except KernelBuildError as error:
        return None, str(error)
    if found is None:
        return None, "they are not built for this machine; run: neox-kernels build"
    return build.load_module(found.module), found.description


def state(*, may_build: bool) -> Availability:
    """Whether the compiled module can be loaded here, and by which build or why not."""
    module, reason = _loaded(may_build)
    if module is None and not may_build:
        _loaded.cache_clear()  # It may be built later.
    return Availability(module is not None, reason)


def availability(device: torch.device, dtype: torch.dtype, *, may_build: bool) -> Availability:
    """Whether the fused operators can be used for tensors of this device and type."""
    if device.type != "cuda":
        return Availability(
            False, f"the fused operators run on NVIDIA GPUs, and the tensors are on {device.type!r}"
        )
    if dtype not in FUSED_DTYPES:
        return Availability(False, f"the fused operators take float16, bfloat16 and float32, not {dtype}")
    return state(may_build=may_build)


def compiled_for(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The compiled module for tensors on an NVIDIA GPU; None on the CPU, where the plain formula is used.

    Raises:
        ValueError: the tensors are on several devices.
        KernelUnavailable: the tensors are on a GPU and the compiled module cannot be used.
    """
    for other in others:
        if other is not None and other.device != first.device:
            raise ValueError(
                f"tensors of one call are on {first.device} and {other.device}; move them to one device"
            )
    return None if first.device.type == "cpu" else _required()


def _required() -> ModuleType:
    module, reason = _loaded(True)
    if module is None:
        raise KernelUnavailable(f"the fused operators cannot be used: {reason}")
    return module


def site(tensor: Tensor) -> tuple[int, int, int]:
    """Device number, address of the current stream there, and dtype code: the first arguments of every call.

    Raises:
        KernelUnavailable: the type is none that the fused operators take.
    """
    if tensor.dtype not in DTYPE_CODES:
        raise KernelUnavailable(f"the fused operators take float16, bfloat16 and float32, not {tensor.dtype}")
    if tensor.device.type == "cpu":
        return 0, 0, DTYPE_CODES[tensor.dtype]
    stream = torch.cuda.current_stream(tensor.device)
    return stream.device_index, stream.cuda_stream, DTYPE_CODES[tensor.dtype]


def parameter(tensor: Tensor | None) -> tuple[int, int]:
    """Address and dtype code of a contiguous weight, bias or gradient of one; (0, 0) for none.

    Raises:
        KernelUnavailable: the type is none that the fused operators take.
    """
    if tensor is None:
        return 0, 0
    if tensor.dtype not in DTYPE_CODES:
        raise KernelUnavailable(
            f"a weight or bias is {tensor.dtype}; the fused operators take float32 or 16 bits"
        )
    return tensor.data_ptr(), DTYPE_CODES[tensor.dtype]


def partials(like: Tensor, rows: int, columns: int) -> Tensor:
    """Scratch memory for sums over rows, beside the tensor that is summed."""
    return torch.empty(rows * columns, dtype=torch.float32, device=like.device)


def norm_parameter_dtype(x: Tensor, *parameters: Tensor) -> torch.dtype:
    """In which type a norm reads its weight and bias: the input's if all have it, else float32 or wider."""
    if all(parameter.dtype == x.dtype for parameter in parameters):
        return x.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32
