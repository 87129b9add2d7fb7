"""Time attention on one GPU, by backend, and attention within documents.

    python benchmarks/gpu_attention.py [--json FILE]
    python benchmarks/gpu_attention.py --rehearse                    # test this script on the CPU

Queries, keys and values have the strides of ours, [tokens, samples, heads, width] seen as [samples, heads,
tokens, width], unless a row says contiguous. TFLOP/s count causal attention, half of the full one.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from gpu_rows import Rows, Timer, parse, release
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from neox_model.torch_compat import chosen_attention


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention."""

    samples: int
    tokens: int
    heads: int
    key_heads: int
    width: int

    @property
    def operations(self) -> float:
        """Operations of a causal forward pass; the backward pass has 2.5 times as many."""
        return 2.0 * self.samples * self.heads * self.tokens**2 * self.width


SHAPES = {
    "GPT-NeoX 1.3B": Shape(8, 2048, 16, 16, 128),
    "Llama 1B": Shape(4, 4096, 32, 8, 64),
    "Pythia 160M": Shape(16, 2048, 12, 12, 64),
}
# Milliseconds of all layers, forward and backward, that the figures of arXiv:2407.08608 give.
EXPECTED = {
    ("GPT-NeoX 1.3B", "cuDNN"): 26.0 / 24,
    ("GPT-NeoX 1.3B", "flash"): 41.6 / 24,
    ("Llama 1B", "cuDNN"): 41.8 / 16,
    ("Llama 1B", "flash"): 58.6 / 16,
}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
BACKWARD = 2.5
DOCUMENTS = 8


def inputs(shape: Shape, device: torch.device, *, contiguous: bool = False) -> list[Tensor]:
    """Return queries, keys and values [samples, heads, tokens, width]."""
    made = []
    for heads in (shape.heads, shape.key_heads, shape.key_heads):
        x = torch.randn(
            shape.tokens, shape.samples, heads, shape.width, device=device, dtype=torch.bfloat16
        ).permute(1, 2, 0, 3)
        made.append((x.contiguous() if contiguous else x).requires_grad_())
    return made


def attend(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return PyTorch's causal attention."""
    has_groups = shape.heads != shape.key_heads
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=has_groups)


def kernels(shape: Shape, device: torch.device) -> str:
    """Return the names of the kernels of a forward and a backward pass, by time."""
    tensors = inputs(shape, device)
    kinds = [
        torch.profiler.ProfilerActivity.CPU if device.type == "cpu" else torch.profiler.ProfilerActivity.CUDA
    ]
    for _ in range(2):  # The first starts libraries.
        with torch.profiler.profile(activities=kinds) as found:
            output = attend(shape, *tensors)
            torch.autograd.grad(output, tensors, torch.ones_like(output))
            if device.type == "cuda":
                torch.cuda.synchronize()
    # A profile of a GPU also has what the host calls, such as the wait for the GPU.
    place = DeviceType.CPU if device.type == "cpu" else DeviceType.CUDA
    events = [each for each in found.key_averages() if each.device_type == place]
    by_time = sorted(events, key=lambda each: -max(each.device_time_total, each.cpu_time_total))
    return "; ".join(each.key[:60] for each in by_time[:3])


def both_ways(run: Callable[..., Tensor], sets: list[list[Tensor]], timer: Timer) -> tuple[float, float]:
    """Return the milliseconds of a forward and of a backward pass."""
    detached = [[x.detach() for x in tensors] for tensors in sets]
    forward = timer.milliseconds([lambda t=tensors: run(*t) for tensors in detached])
    outputs = [run(*tensors) for tensors in sets]
    aboves = [torch.randn_like(output) for output in outputs]
    pairs = list(zip(outputs, sets, aboves, strict=True))
    backward = timer.milliseconds(
        [lambda o=o, t=t, a=a: torch.autograd.grad(o, t, a, retain_graph=True) for o, t, a in pairs]
    )
    return forward, backward


def add(rows: Rows, name: str, times: tuple[float, float], operations: float, expected: float | None) -> None:
    """Add the rows of a forward and a backward pass."""
    forward, backward = times
    rows.add(f"{name}, forward", operations / forward / 1e9, "TFLOP/s")
    rows.add(f"{name}, backward", BACKWARD * operations / backward / 1e9, "TFLOP/s")
    rows.add(
        f"{name}, both", forward + backward, "ms", expected=f"{expected:.2f}" if expected is not None else ""
    )


def compare_backends(rows: Rows, timer: Timer, shapes: dict[str, Shape], device: torch.device) -> None:
    """Time each backend, the one that PyTorch chooses, and contiguous inputs."""
    for name, shape in shapes.items():
        has_groups = shape.heads != shape.key_heads
        chosen = chosen_attention(*inputs(shape, device), is_causal=True, enable_gqa=has_groups)
        rows.add(f"{name}, backend that a run logs", chosen.name, expected="CUDNN_ATTENTION (H100)")
        rows.add(f"{name}, kernels", kernels(shape, device), expected="of that backend")
        for backend, kind in [*BACKENDS.items(), ("chosen", None), ("chosen, contiguous", None)]:
            row = f"{name}, {backend}"
            if kind is not None and device.type == "cpu":
                rows.skip(row, "a backend of GPUs")
                continue
            sets = [inputs(shape, device, contiguous="contiguous" in backend) for _ in range(2)]
            run = lambda *tensors, s=shape, k=kind: _with_backend(s, k, *tensors)  # noqa: E731
            try:
                times = both_ways(run, sets, timer)
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    rows.skip(row, "PyTorch refuses this backend for these inputs")
                else:
                    rows.fail(row, error)
            else:
                add(rows, row, times, shape.operations, EXPECTED.get((name, backend)))
            del sets
            release(device)


def _with_backend(shape: Shape, kind: SDPBackend | None, *tensors: Tensor) -> Tensor:
    if kind is None:
        return attend(shape, *tensors)
    with sdpa_kernel(kind):
        return attend(shape, *tensors)


def packed_documents(shape: Shape, device: torch.device) -> Tensor:
    """Return the first tokens of documents of unequal lengths in a sample, and its length."""
    weights = torch.arange(1, DOCUMENTS + 1, dtype=torch.float64)
    ends = (weights.cumsum(0) / weights.sum() * shape.tokens).to(torch.int32)
    return torch.cat((torch.zeros(1, dtype=torch.int32), ends)).to(device)


def compare_documents(rows: Rows, timer: Timer, shape: Shape, device: torch.device) -> None:
    """Time causal attention within documents: FlexAttention, and flash attention of unequal lengths."""
    first = packed_documents(shape, device)
    name = f"{DOCUMENTS} documents in {shape.tokens} tokens"
    _varlen(rows, timer, shape, first, name, device)
    release(device)
    # Last, because it compiles for seconds.
    _flex(rows, timer, shape, first, name, device)


def _flex(rows: Rows, timer: Timer, shape: Shape, first: Tensor, name: str, device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device.type == "cpu":
        rows.skip(f"{name}, FlexAttention", "it has no backward pass on the CPU")
        return
    length = int(first[-1])
    ids = torch.bucketize(torch.arange(length, device=device), first[1:], right=True)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[q] == ids[k])

    compiled = torch.compile(flex_attention)
    sets = [inputs(shape, device) for _ in range(2)]
    try:
        mask = torch.compile(create_block_mask)(visible, None, None, length, length, device=str(device))
        times = both_ways(lambda *tensors: compiled(*tensors, block_mask=mask), sets, timer)
    except RuntimeError as error:
        rows.fail(f"{name}, FlexAttention", error)
    else:
        rows.add(f"{name}, FlexAttention, both", sum(times), "ms")


def _varlen(rows: Rows, timer: Timer, shape: Shape, first: Tensor, name: str, device: torch.device) -> None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        rows.skip(f"{name}, varlen_attn", f"PyTorch {torch.__version__} has no varlen_attn")
        return
    if device.type == "cpu":
        rows.skip(f"{name}, varlen_attn", "it has no form for the CPU")
        return
    offsets = torch.arange(shape.samples, device=device, dtype=torch.int32).unsqueeze(1) * shape.tokens
    starts = torch.cat(((offsets + first[:-1]).flatten(), first.new_tensor([shape.samples * shape.tokens])))
    longest = int((first[1:] - first[:-1]).max())
    options: dict[str, Any] = (
        {"window_size": (-1, 0)}
        if "window_size" in inspect.signature(varlen_attn).parameters
        else {"is_causal": True}
    )
    rows_of = (shape.samples * shape.tokens, shape.heads, shape.width)
    sets = [
        [torch.randn(rows_of, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        for _ in range(2)
    ]
    try:
        times = both_ways(
            lambda *tensors: varlen_attn(*tensors, starts, starts, longest, longest, **options), sets, timer
        )
    except (RuntimeError, TypeError) as error:
        rows.fail(f"{name}, varlen_attn", error)
    else:
        rows.add(f"{name}, varlen_attn, both", sum(times), "ms")


def main() -> int:
    options, device, rows = parse(__doc__)
    # A compiled backward pass may otherwise free what a second call needs.
    torch._functorch.config.donated_buffer = False
    shapes = dict(SHAPES)
    if options.rehearse:
        shapes = {name: replace(shape, samples=2, tokens=32, width=16) for name, shape in SHAPES.items()}
    timer = Timer(device, budget_seconds=0.005 if options.rehearse else 0.25)
    compare_backends(rows, timer, shapes, device)
    compare_documents(rows, timer, shapes["GPT-NeoX 1.3B"], device)
    return 1 if rows.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
