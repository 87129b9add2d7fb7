"""Time what a call of each fused operator costs on the CPU besides the kernel, next to PyTorch's operators.

The compiled module is replaced by one whose functions do nothing, and all tensors are tiny and on the CPU, so
that checks, allocations, autograd and dispatch remain: what an eager training pays per call before a GPU
starts. PyTorch's operators that compute the same get the same arguments; their time includes the arithmetic.

    python benchmarks/operator_overhead.py

Columns: microseconds of forward without gradients, forward with gradients, and forward and backward, for the
fused operator called directly, the same through torch.library's dispatcher, and PyTorch's operators; then the
ratio of the direct call to PyTorch's. Each is the least of ten runs, in time of this thread.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from neox_kernels import custom_operator, native
from neox_kernels.status import OPERATORS

CPU = torch.device("cpu")
SHAPE = (2, 3, 2, 8)
PASSES = ("forward, no gradient", "forward", "forward and backward")
_RUNS = 10

Call = Callable[..., Any]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _torch_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (angles.repeat(1, 2)[:, None, None] for angles in (cos, sin))
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _torch_cross_entropy(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _torch_split_rotary(
    projected: Tensor, cos: Tensor, sin: Tensor, groups: int, width: int
) -> tuple[Tensor, ...]:
    query, key, value = projected.unflatten(-1, (groups, 3, width)).unbind(3)
    return *_torch_rotary(query, key, cos, sin), value


def _torch_sum(norm: Call, x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, norm(total, total.shape[-1:], *parameters)


# operator -> PyTorch's operators for the same arguments
TORCH: dict[str, Call] = {
    "scaled_causal_softmax": lambda scores, scale: torch.softmax(scores * scale, -1),
    "scaled_masked_softmax": lambda scores, mask, scale: torch.softmax(
        (scores * scale).masked_fill(mask, -1e4), -1
    ),
    "scaled_softmax": lambda scores, scale: torch.softmax(scores * scale, -1),
    "bias_gelu": lambda x, bias: F.gelu(x + bias, approximate="tanh"),
    "bias_swiglu": lambda up, gate, up_bias, gate_bias: (up + up_bias) * F.silu(gate + gate_bias),
    "bias_geglu": lambda up, gate, up_bias, gate_bias: (up + up_bias) * F.gelu(gate + gate_bias),
    "bias_dropout_add": lambda x, bias, residual, p: residual + F.dropout(x + bias, p),
    "rotary": _torch_rotary,
    "rotary_": _torch_rotary,
    "split_rotary": _torch_split_rotary,
    "layer_norm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
    "rms_norm": lambda x, weight: F.rms_norm(x, x.shape[-1:], weight),
    "add_layer_norm": lambda x, residual, weight, bias: _torch_sum(F.layer_norm, x, residual, weight, bias),
    "add_rms_norm": lambda x, residual, weight: _torch_sum(F.rms_norm, x, residual, weight),
    "cross_entropy": _torch_cross_entropy,
}


class _EmptyModule:
    """A compiled module whose functions compute nothing."""

    def __getattr__(self, name: str) -> Call:
        def function(*_: Any) -> int:
            return 1

        setattr(self, name, function)  # Found without this method from now on.
        return function


def _microseconds(run: Callable[[], object], calls: int) -> float:
    """Return this thread's time for a call, the least of several runs: other processes do not count."""
    times = []
    for _ in range(_RUNS + 1):
        start = time.thread_time()
        for _ in range(calls):
            run()
        times.append(time.thread_time() - start)
    return min(times[1:]) / calls * 1e6


def _forward_backward(call: Call, arguments: tuple[Any, ...], leaves: list[Tensor]) -> Callable[[], object]:
    def run() -> object:
        results = call(*arguments)
        outputs = results if isinstance(results, tuple) else (results,)
        return torch.autograd.grad(outputs, leaves, outputs)

    return run


def _times(call: Call, arguments: tuple[Any, ...], calls: int) -> list[float | None]:
    """Return microseconds of forward without and with gradients, and of forward and backward."""
    leaves = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    plain = tuple(each.detach() if isinstance(each, Tensor) else each for each in arguments)
    without = _microseconds(lambda: call(*plain), calls)
    if not leaves:
        return [without, None, None]
    return [
        without,
        _microseconds(lambda: call(*arguments), calls),
        _microseconds(_forward_backward(call, arguments, leaves), calls),
    ]


def _through_the_dispatcher(call: Call) -> Call:
    def dispatched(*arguments: Any) -> Any:
        usual = custom_operator._num_modes
        custom_operator._num_modes = lambda: 1
        try:
            return call(*arguments)
        finally:
            custom_operator._num_modes = usual

    return dispatched


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300, help="calls per run (default: 300)")
    parser.add_argument("--only", default="", help="names of operators that contain this")
    calls, only = (given := parser.parse_args()).calls, given.only
    torch.set_num_threads(1)
    compiled = _EmptyModule()
    native.compiled_for = lambda *_: compiled
    sys.stdout.write("| operator | pass | direct | dispatcher | PyTorch | direct / PyTorch |\n")
    sys.stdout.write("| --- | --- | ---: | ---: | ---: | ---: |\n")
    for operator in OPERATORS:
        if operator.name not in TORCH or only not in operator.name:
            continue
        arguments = operator.example(SHAPE, torch.float32, CPU)
        forms = (operator.fused, _through_the_dispatcher(operator.fused), TORCH[operator.name])
        columns = zip(*(_times(form, arguments, calls) for form in forms), strict=True)
        for kind, times in zip(
            ("forward, no gradient", "forward", "forward and backward"), columns, strict=True
        ):
            if None in times:
                continue
            direct, dispatched, usual = times
            sys.stdout.write(
                f"| {operator.name} | {kind} | {direct:.1f} | {dispatched:.1f} | {usual:.1f} "
                f"| {direct / usual:.2f} |\n"
            )


if __name__ == "__main__":
    main()
