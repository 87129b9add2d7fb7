"""Time the matrix products of a training step on one GPU, alone and in a layer's order for seconds.

    python benchmarks/gpu_products.py [--json FILE]
    python benchmarks/gpu_products.py --rehearse                     # test this script on the CPU

Answers whether products in a run are slower than a large square product because of their shapes or
because of the power limit: the first rows time each product alone, the last ones a layer's products in a row,
in the first and in the last second. Random data, 16,384 tokens, bfloat16.
"""

import sys
import time
from collections.abc import Callable

import torch
from gpu_rows import Rows, Timer, parse, release
from torch import Tensor
from torch.nn import functional

TOKENS = 16_384
# Of the layers of one_gpu.py's shapes: inputs and outputs of each product.
SHAPES = {
    "GPT-NeoX 1.3B, qkv": (2048, 6144),
    "GPT-NeoX 1.3B, attention output": (2048, 2048),
    "GPT-NeoX 1.3B, mlp up": (2048, 8192),
    "GPT-NeoX 1.3B, mlp down": (8192, 2048),
    "GPT-NeoX 1.3B, output matrix": (2048, 50_304),
    "Llama 1B, qkv": (2048, 3072),
    "Llama 1B, gate and up": (2048, 16_384),
    "width 5461, up": (2048, 5461),
    "width 5504, up": (2048, 5504),
}
LAYER = tuple(list(SHAPES)[:4])
SUSTAINED_SECONDS, WINDOW_SECONDS = 6.0, 1.0
SETS = 2


def operands(inputs: int, outputs: int, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return x [tokens, inputs], weight [outputs, inputs], bias and the output's gradient, in bfloat16."""
    options = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(tokens, inputs, **options), torch.randn(outputs, inputs, **options)
    return x, weight, torch.randn(outputs, **options), torch.randn(tokens, outputs, **options)


def forms(x: Tensor, weight: Tensor, bias: Tensor, above: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the products of one matrix: 2 x tokens x inputs x outputs operations each."""
    summed = torch.zeros(weight.shape, device=x.device)
    return {
        "forward": lambda: functional.linear(x, weight),
        "forward with bias": lambda: functional.linear(x, weight, bias),
        "gradient of inputs": lambda: above @ weight,
        "gradient of weights": lambda: above.t() @ x,
        "gradient of weights added in float32": lambda: torch.addmm(
            summed, above.t(), x, out_dtype=torch.float32, out=summed
        ),
    }


def sweep(rows: Rows, timer: Timer, device: torch.device, tokens: int, shrink: int) -> None:
    """Time each product alone, on data that is not in the cache."""
    for name, (inputs, outputs) in SHAPES.items():
        wide, tall = max(8, inputs // shrink), max(8, outputs // shrink)
        sets = [forms(*operands(wide, tall, tokens, device)) for _ in range(SETS)]
        operations = 2.0 * tokens * wide * tall
        for form in sets[0]:
            row = f"{name}, {form}"
            if "float32" in form and device.type == "cpu":
                rows.skip(row, "addmm with out_dtype has no form for the CPU")
                continue
            calls = [each[form] for each in sets]
            rows.measure(row, lambda c=calls, o=operations: o / timer.milliseconds(c) / 1e9, "TFLOP/s")
        del sets
        release(device)


def square(timer: Timer, device: torch.device, size: int) -> float:
    """Return the TFLOP/s of a large square product."""
    x = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2 * SETS)]
    calls = [lambda a=x[2 * i], b=x[2 * i + 1]: a @ b for i in range(SETS)]
    return 2.0 * size**3 / timer.milliseconds(calls) / 1e9


def sustained(device: torch.device, tokens: int, shrink: int, seconds: float) -> tuple[float, float, float]:
    """Return TFLOP/s of a layer's products in order: over all the time, and in the first and last second."""
    shapes = [tuple(max(8, size // shrink) for size in SHAPES[name]) for name in LAYER]
    data = [operands(*shape, tokens, device) for shape in shapes]
    products = ("forward", "gradient of inputs", "gradient of weights")
    calls = [found[name] for found in (forms(*each) for each in data) for name in products]
    operations = 2.0 * tokens * sum(inputs * outputs for inputs, outputs in shapes) * len(products)
    ends: list[float] = []
    began = time.perf_counter()
    while not ends or ends[-1] - began < seconds:
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    starts = [began, *ends[:-1]]

    def rate(first: float, last: float) -> float:
        inside = [(s, e) for s, e in zip(starts, ends, strict=True) if first <= s and e <= last]
        return operations * len(inside) / sum(e - s for s, e in inside) / 1e12

    window = min(WINDOW_SECONDS, (ends[-1] - began) / 2)
    whole = rate(began, ends[-1])
    # A round may be longer than the window on a slow machine.
    longest = max(e - s for s, e in zip(starts, ends, strict=True))
    window = max(window, longest * 1.01)
    return whole, rate(began, began + window), rate(ends[-1] - window, ends[-1])


def main() -> int:
    options, device, rows = parse(__doc__)
    tokens, shrink, seconds = (64, 64, 0.1) if options.rehearse else (TOKENS, 1, SUSTAINED_SECONDS)
    timer = Timer(device, budget_seconds=0.005 if options.rehearse else 0.3)
    size = 64 if options.rehearse else 8192
    rows.measure(
        f"square product of {size}", lambda: square(timer, device, size), "TFLOP/s", expected="798 (H100)"
    )
    release(device)
    try:
        whole, first, last = sustained(device, tokens, shrink, seconds)
    except RuntimeError as error:
        rows.fail("layer of GPT-NeoX 1.3B in order", error)
    else:
        rows.add(
            "layer of GPT-NeoX 1.3B in order",
            whole,
            "TFLOP/s",
            expected="663 if power limits it; above 720 if other kernels of the step do",
        )
        rows.add("the same, first second", first, "TFLOP/s")
        rows.add("the same, last second", last, "TFLOP/s", expected="the first second's, unless clocks fall")
    release(device)
    sweep(rows, timer, device, tokens, shrink)
    return 1 if rows.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
