"""Time the update of a run on one GPU: as it is, its passes, and without the pass that scales gradients.

    python benchmarks/gpu_update.py [--json FILE]
    python benchmarks/gpu_update.py --rehearse                       # test this script on the CPU

The parameters are those of GPT-NeoX 1.3B: bfloat16 weights with float32 masters and AdamW. Every pass is
named with the bytes that it moves per parameter.
"""

import sys
from collections.abc import Callable

import torch
from gpu_rows import Rows, Timer, parse, release
from torch.nn import Parameter

from neox_config.facts.learning_rate import Curve
from neox_model.optim.adam import adam
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.optim.mixed_precision import MixedPrecisionOptimizer
from neox_model.parallel.groups import SINGLE_PROCESS

HIDDEN, LAYERS, VOCABULARY = 2048, 24, 50_304
GIGA = 1e9
# Bytes of the passes at 2.8 TB/s, in milliseconds per 1.415e9 parameters.
RATE = 2.8e12
PASSES = {"gradients to float32": 6, "norm": 4, "scale gradients": 8, "AdamW": 28, "copy to bfloat16": 6}
# AdamW that scales also writes the scaled gradients.
SCALED_INSIDE = PASSES["norm"] + PASSES["AdamW"] + 4 + PASSES["copy to bfloat16"]


def shapes(hidden: int, layers: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a GPT-NeoX with an untied output matrix."""
    layer: list[tuple[int, ...]] = []
    for outputs, inputs in (
        (3 * hidden, hidden),
        (hidden, hidden),
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
    ):
        layer += [(outputs, inputs), (outputs,)]
    layer += [(hidden,)] * 4
    return [(vocabulary, hidden), *layer * layers, (hidden,), (hidden,), (vocabulary, hidden)]


def expected_ms(bytes_per_parameter: float, parameters: float) -> float:
    """Return the milliseconds of a pass over all parameters at the rate of the card's memory."""
    return 1e3 * bytes_per_parameter * parameters / RATE


class Update:
    """A whole update as a run makes it, and its passes.

    Args:
        sizes: shapes of the parameters.
        device: of the parameters.
    """

    def __init__(self, sizes: list[tuple[int, ...]], device: torch.device) -> None:
        self.parameters = [Parameter(0.02 * torch.randn(size, device=device)) for size in sizes]
        self._gradients = [
            torch.randn(parameter.shape, device=device, dtype=torch.bfloat16) for parameter in self.parameters
        ]
        inner = adam([{"params": list(self.parameters)}], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.optimizer = MixedPrecisionOptimizer(
            inner,
            LearningRateSchedule(inner, Constant()),
            dtype=torch.bfloat16,
            accumulation_dtype=torch.float32,
            max_norm=1.0,
            reduce=lambda gradients: None,
            groups=SINGLE_PROCESS,
        )

    def move(self) -> None:
        """Put the gradients of a micro-batch into the master weights' gradients."""
        for parameter, master, gradient in zip(
            self.parameters, self.optimizer.masters, self._gradients, strict=True
        ):
            master.grad = gradient.to(torch.float32)
            parameter.grad = None

    def whole(self) -> None:
        """Update once, from the gradients of one micro-batch."""
        self.move()
        self.optimizer.step()

    def passes(self) -> dict[str, Callable[[], object]]:
        """Return the passes of `whole` one by one, and of an update that scales inside AdamW."""
        masters = self.optimizer.masters
        gradients = [parameter.grad for parameter in masters]
        assert all(gradient is not None for gradient in gradients)
        inner = self.optimizer.optimizer
        one = torch.ones((), device=masters[0].device)

        def scaled_inside() -> None:
            norm = torch.stack(torch._foreach_norm(gradients, 2)).square().sum().sqrt()
            inner.grad_scale = (norm + 1e-6).clamp(min=1.0)  # type: ignore[attr-defined]
            inner.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
            inner.step()
            inner.grad_scale = None  # type: ignore[attr-defined]
            copy()

        def copy() -> None:
            torch._foreach_copy_([p.data for p in self.parameters], [m.data for m in masters])

        return {
            "gradients to float32": self.move,
            "norm": lambda: torch._foreach_norm(gradients, 2, dtype=torch.float32),
            "scale gradients": lambda: torch._foreach_mul_(gradients, one),
            "AdamW": inner.step,
            "copy to bfloat16": copy,
            "scaled inside AdamW": scaled_inside,
        }


class Constant(Curve):
    """A constant learning rate."""

    def rate(self, update: int) -> float:
        return 1e-4


def main() -> int:
    options, device, rows = parse(__doc__)
    sizes = shapes(64, 2, 512) if options.rehearse else shapes(HIDDEN, LAYERS, VOCABULARY)
    update = Update(sizes, device)
    count = float(sum(parameter.numel() for parameter in update.parameters))
    rows.add("parameters", count / GIGA, "billion", expected="" if options.rehearse else "1.415")
    timer = Timer(device, budget_seconds=0.02 if options.rehearse else 1.0)
    measure(rows, timer, update, count)
    release(device)
    return 1 if rows.has_failed else 0


def measure(rows: Rows, timer: Timer, update: Update, count: float) -> None:
    """Add the rows of the whole update and of its passes."""
    whole = sum(PASSES.values())
    rows.measure(
        f"update, {whole} bytes per parameter",
        lambda: timer.milliseconds([update.whole]),
        "ms",
        expected=f"{expected_ms(whole, count):.1f}",
    )
    update.move()
    for name, run in update.passes().items():
        size = PASSES.get(name, SCALED_INSIDE)
        rows.measure(
            f"{name}, {size} bytes per parameter",
            lambda r=run: timer.milliseconds([r]),
            "ms",
            expected=f"{expected_ms(size, count):.1f}",
        )


if __name__ == "__main__":
    sys.exit(main())
