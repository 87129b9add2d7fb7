"""The compiled module: whether it can be used, loading it, and passing tensors to it.

Only `compiled_for` decides what computes a custom operator: the compiled module for tensors on an NVIDIA GPU,
PyTorch on the CPU. Shapes, gradients and `torch.compile` are therefore tested on every machine.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from neox_kernels import build, driver, shapes
from neox_kernels.availability import Availability
from neox_kernels.errors import KernelBuildError, KernelUnavailable
from neox_kernels.precision import FUSED_DTYPES

__all__ = [
    "availability",
    "compiled_for",
    "norm_parameters",
    "parameter",
    "partials",
    "present_architectures",
    "site",
    "state",
]

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def present_architectures() -> tuple[str, ...]:
    """Return the architectures of the GPUs visible to this process, such as ("sm_90",)."""
    if not torch.cuda.is_available():
        return ()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


@functools.cache
def _loaded(may_build: bool) -> tuple[ModuleType | None, str]:
    """Return the module, or None with the reason. Cached per process."""
    if torch.version.hip is not None:
        return None, "the fused operators require CUDA, and this PyTorch is built for ROCm"
    if not torch.cuda.is_available():
        return None, "no NVIDIA GPU is visible to this process"
    architectures = present_architectures()
    try:
        found = build.find_built(architectures, torch.version.cuda)
        if found is None and may_build:
            found = build.build(architectures, cuda=torch.version.cuda)
    except KernelBuildError as error:
        return None, str(error)
    if found is None:
        return None, "the fused operators are not compiled for this machine; run: neox-kernels build"
    try:
        module = build.load_module(found.module)
    except (ImportError, OSError) as error:
        return None, f"{found.module} cannot be loaded ({error}); delete {found.folder} to compile it again"
    index = torch.cuda.current_device()
    failure = driver.why_launch_fails(found, f"cuda:{index}", torch.cuda.get_device_name(index))
    return (module, found.description) if failure is None else (None, failure)


def state(*, may_build: bool) -> Availability:
    """Return whether the compiled module can be loaded, with the build used or the reason."""
    module, reason = _loaded(may_build)
    if module is None and not may_build:
        _loaded.cache_clear()  # It may be compiled later.
    return Availability(module is not None, reason)


def availability(device: torch.device, dtype: torch.dtype, *, may_build: bool) -> Availability:
    """Return whether the fused operators can be used for tensors of this device and dtype."""
    if device.type != "cuda":
        return Availability(
            False, f"the fused operators require an NVIDIA GPU, and the tensors are on {device.type!r}"
        )
    if dtype not in FUSED_DTYPES:
        return Availability(False, f"the fused operators support float16, bfloat16 and float32, not {dtype}")
    return state(may_build=may_build)


def compiled_for(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the compiled module for tensors on an NVIDIA GPU; None on the CPU, where PyTorch computes.

    Raises:
        ValueError: the tensors are on different devices.
        KernelUnavailable: the tensors are on a GPU and the compiled module cannot be used.
    """
    device = first.device
    for other in others:
        if other is not None and other.device != device:
            raise ValueError(f"the tensors are on {device} and {other.device}; move them to one device")
    if first.is_cpu:
        return None
    module, reason = _loaded(True)
    if module is None:
        raise KernelUnavailable(f"the fused operators are unavailable: {reason}")
    return module


def site(tensor: Tensor) -> tuple[int, int, int]:
    """Return device number, address of its current stream and dtype code: the first arguments of each call.

    Raises:
        KernelUnavailable: the fused operators do not support the dtype.
    """
    code = _code_of(tensor)
    if tensor.is_cpu:
        return 0, 0, code
    index = tensor.get_device()
    # torch.cuda.current_stream makes a Stream object at each call; torch's compiled graphs call this, too.
    return index, torch._C._cuda_getCurrentRawStream(index), code


def parameter(tensor: Tensor | None) -> tuple[int, int]:
    """Return address and dtype code of a contiguous weight, bias or its gradient; (0, 0) for None.

    Raises:
        KernelUnavailable: the fused operators do not support the dtype.
    """
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), _code_of(tensor)


def _code_of(tensor: Tensor) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise KernelUnavailable(
            f"the fused operators support float16, bfloat16 and float32, not {tensor.dtype}"
        )
    return code


def partials(like: Tensor, rows: int, columns: int) -> Tensor:
    """Allocate scratch memory for sums over rows, on the device of the tensor that is summed."""
    return torch.empty(rows * columns, dtype=torch.float32, device=like.device)


def norm_parameters(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return a norm's parameters as it reads them: contiguous, and in float32 unless all have x's dtype.

    Args:
        x: input of the norm.
        parameters: weight, and bias if there is one.

    Raises:
        ValueError: one does not have an element per column of x.
    """
    for name, parameter in zip(("weight", "bias"), parameters, strict=False):
        shapes.check_width(name, parameter, x)
    dtype = x.dtype
    for parameter in parameters:
        if parameter.dtype != dtype or not parameter.is_contiguous():
            break
    else:
        return parameters
    if any(parameter.dtype != dtype for parameter in parameters):
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(parameter.to(dtype).contiguous() for parameter in parameters)
