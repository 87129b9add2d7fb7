"""Time products in 8 bits and products of experts on one GPU, as multiples of the same products in bfloat16.

    python benchmarks/gpu_low_precision.py [--json FILE]
    python benchmarks/gpu_low_precision.py --rehearse                # test this script on the CPU

What training in float8 and a mixture of experts can gain. The operands are cast before; the cast, with the
largest magnitude that a scale needs, is a row by itself.
"""

import sys
from collections.abc import Callable

import torch
from gpu_products import LAYER, SHAPES, TOKENS
from gpu_rows import Rows, Timer, parse, release
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
BLOCK = 128
EXPERTS = 8
SETS = 2


def to_float8(x: Tensor, scale: Tensor) -> Tensor:
    """Cast to float8."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


def tensorwise(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return a product with one scale for each operand."""
    one = torch.ones((), device=x.device)
    left, right = to_float8(x, one), to_float8(weight, one)
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def rowwise(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return a product with a scale for each row of both operands."""
    one = torch.ones((), device=x.device)
    left, right = to_float8(x, one), to_float8(weight, one)
    scale_a, scale_b = torch.ones(len(x), 1, device=x.device), torch.ones(1, len(weight), device=x.device)
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def blockwise(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return a product with a scale for 128 inputs of a token, and for 128 x 128 of a weight."""
    one = torch.ones((), device=x.device)
    left, right = to_float8(x, one), to_float8(weight, one)
    blocks = x.shape[1] // BLOCK
    padded = -(-blocks // 4) * 4
    # The layouts that PyTorch requires: the scales of one block of inputs are adjacent.
    scale_a = torch.ones(blocks, len(x), device=x.device).t()
    scale_b = torch.ones(len(weight) // BLOCK, padded, device=x.device).t()
    kind = functional.ScalingType
    return lambda: functional.scaled_mm(
        left,
        right.t(),
        scale_a,
        kind.BlockWise1x128,
        scale_b,
        kind.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )


FORMS: dict[str, Callable[[Tensor, Tensor], Callable[[], Tensor]]] = {
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "blocks of 128": blockwise,
}
FORMS_OF_CPU = ("tensorwise", "rowwise") if torch.__version__ >= (2, 13) else ("tensorwise",)
# Shares of the bfloat16 product's time that others report for layers of this size.
EXPECTED = {"tensorwise": "1.4 (nanochat, mlp)", "rowwise": "0.9 to 1.1", "blocks of 128": ""}


def compare_products(rows: Rows, timer: Timer, device: torch.device, tokens: int, shrink: int) -> None:
    """Time the products of a layer in float8 against bfloat16."""
    for name in LAYER:
        inputs, outputs = (size // shrink for size in SHAPES[name])
        options = {"device": device, "dtype": torch.bfloat16}
        pairs = [
            (torch.randn(tokens, inputs, **options), torch.randn(outputs, inputs, **options))
            for _ in range(SETS)
        ]
        plain = timer.milliseconds([lambda x=x, w=w: functional.linear(x, w) for x, w in pairs])
        rows.add(f"{name}, bfloat16", plain, "ms")
        for form, make in FORMS.items():
            row = f"{name}, float8 {form}, bfloat16 / float8"
            if form not in FORMS_OF_CPU and device.type == "cpu":
                rows.skip(row, f"PyTorch {torch.__version__} has no form for the CPU")
                continue
            rows.measure(
                row,
                lambda m=make, p=pairs, t=plain: t / timer.milliseconds([m(x, w) for x, w in p]),
                "times as fast",
                expected=EXPECTED[form],
            )
        release(device)


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8 and the scale that it was multiplied by, from its largest magnitude."""
    scale = LARGEST / x.abs().amax().float().clamp(min=1e-12)
    return to_float8(x, scale), scale


def time_cast(rows: Rows, timer: Timer, device: torch.device, tokens: int, shrink: int) -> None:
    """Time the cast of activations to float8, compiled: read twice, written once."""
    compiled = torch.compile(cast, backend="inductor" if device.type == "cuda" else "eager")
    width = SHAPES["GPT-NeoX 1.3B, mlp down"][0] // shrink
    sets = [torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for _ in range(SETS)]
    size = 5.0 * tokens * width
    rows.measure(
        "cast of activations to float8, compiled",
        lambda: size / timer.milliseconds([lambda x=x: compiled(x) for x in sets]) / 1e6,
        "GB/s",
        expected="2,650 (H100)",
    )


def compare_experts(rows: Rows, timer: Timer, device: torch.device, tokens: int, shrink: int) -> None:
    """Time the products of experts in one call against one product with as many operations."""
    inputs, outputs = 2048 // shrink, 8192 // shrink
    options = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(tokens, inputs, **options), torch.randn(EXPERTS, inputs, outputs, **options)
    plain = timer.milliseconds([lambda: x @ weight[0]])
    rows.add("one expert for all tokens", plain, "ms")
    grouped = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        rows.skip("experts in one call", f"PyTorch {torch.__version__} has no grouped_mm")
        return
    shares = {
        "equal": torch.full((EXPERTS,), 1.0 / EXPERTS),
        "unequal": torch.arange(1, EXPERTS + 1) / (EXPERTS * (EXPERTS + 1) / 2),
    }
    for kind, share in shares.items():
        # Offsets are multiples of 16, which products in 8 bits require.
        ends = (share.cumsum(0) * tokens / 16).round().to(torch.int32) * 16
        ends = ends.clamp(max=tokens).to(device)
        rows.measure(
            f"{EXPERTS} experts, {kind} numbers of tokens, one product / experts",
            lambda e=ends: plain / timer.milliseconds([lambda: grouped(x, weight, offs=e)]),
            "times as fast",
            expected="0.8 to 1",
        )


def main() -> int:
    options, device, rows = parse(__doc__)
    tokens, shrink = (128, 16) if options.rehearse else (TOKENS, 1)
    timer = Timer(device, budget_seconds=0.005 if options.rehearse else 0.2)
    compare_products(rows, timer, device, tokens, shrink)
    compare_experts(rows, timer, device, tokens, shrink)
    release(device)
    time_cast(rows, timer, device, tokens, shrink)
    return 1 if rows.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
