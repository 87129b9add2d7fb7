"""Run every operator with all memory ending at an inaccessible page: `guarded.py MODULE`.

A read or write behind the end of a tensor ends this process with a segmentation fault.
Prints the operators that passed.
"""

import ctypes
import importlib.util
import mmap
import sys

import torch

from neox_kernels import choice, native, status

LIBC = ctypes.CDLL(None, use_errno=True)
KEPT = []


def guarded(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized memory for `count` elements that ends at an inaccessible page."""
    size = count * dtype.itemsize
    pages = -(-max(size, 1) // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = start + pages * mmap.PAGESIZE
    if LIBC.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    KEPT.append(memory)
    if count == 0:
        return torch.tensor([], dtype=dtype)
    buffer = (ctypes.c_char * size).from_address(end - size)
    return torch.frombuffer(buffer, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 1)


def guarded_like(tensor: torch.Tensor, **_options: object) -> torch.Tensor:
    return guarded(tensor.numel(), tensor.dtype).view(tensor.shape)


def copied(argument: object) -> object:
    if not isinstance(argument, torch.Tensor):
        return argument
    return guarded_like(argument).copy_(argument.detach()).requires_grad_(argument.requires_grad)


def main(module_path: str) -> None:
    spec = importlib.util.spec_from_file_location("emulated._native", module_path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = {}
    operators = [o for o in status.OPERATORS if o.name not in ("rotary_", "apex_layer_norm")]
    cases = [
        (o, d, w) for o in operators for d in (torch.float32, torch.bfloat16) for w in (7, 64, 136, 2050)
    ]
    for operator, dtype, width in cases:
        make = operator.comparable_example or operator.example
        arguments = make((3, 1, 2, width), dtype, torch.device("cpu"))
        expected[operator.name, dtype, width] = (
            arguments,
            choice.results_and_gradients(operator.reference, arguments),
        )
    native.compiled_for = lambda *tensors: module
    choice._fresh = lambda arguments: tuple(map(copied, arguments))
    torch.empty_like = guarded_like
    torch.empty = lambda count, *, dtype, device: guarded(count, dtype)
    for operator, dtype, width in cases:
        arguments, plain = expected[operator.name, dtype, width]
        for given, value in zip(choice.results_and_gradients(operator.fused, arguments), plain, strict=True):
            if not choice.relative_error(given, value) < choice.TOLERANCE[dtype]:
                raise SystemExit(f"{operator.name} {dtype} {width}: wrong")
    sys.stdout.write("\n".join(operator.name for operator in operators))


main(sys.argv[1])
