"""Compare whole training steps on one GPU, in one process: ours in several forms and a plain PyTorch model.

    python benchmarks/one_gpu.py                                   # all cases, bf16
    python benchmarks/one_gpu.py pythia-160m/compiled pythia-160m/plain-compiled
    python benchmarks/one_gpu.py --rehearse pythia-160m/uncompiled # test this script on the CPU

A case is SHAPE/FORM. Ours is `neox_model.Trainer`, with the data, the clipping and the update of every
training: bfloat16 weights with float32 masters and AdamW. The plain model (plain_gpt.py) is a GPT-NeoX,
trained under autocast over float32 weights; the shape llama-3.2-1b has none. The time is that of all measured
steps together divided by their number; the memory is the peak of PyTorch's allocator.

MFU is 6 x (parameters of the matrices + layers x length x hidden) operations per token, forward and backward,
with causal attention and without recomputation, times tokens per second, divided by the device's peak.
`waits` counts how often the host waits for the GPU in one call of five iterations, which reads their results
at its end.
"""

import argparse
import gc
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from train_contenders import Job, plain_step, random_corpus

import neox_model
from neox_model.metrics.peaks import peak_tflops

WARM_UP, STEPS, WATCHED = 5, 12, 5
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of its batch.

    Args:
        key_heads: heads of keys and values; None: as many as of queries.
        gated_width: width of a gated feed-forward block; None: a block with two matrices, four times as wide.
        settings: other parameters of ours.
        has_plain: whether the plain model has this architecture.
    """

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    vocabulary: int
    settings: Mapping[str, Any]
    key_heads: int | None = None
    gated_width: int | None = None
    has_plain: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def operations_per_token(self) -> float:
        """Operations of forward and backward, 2 and 4 per multiplication; attention is causal."""
        square = self.hidden**2
        attention = 2 * square + 2 * square * (self.key_heads or self.heads) // self.heads
        block = 3 * self.hidden * self.gated_width if self.gated_width else 8 * square
        matrices = self.layers * (attention + block) + self.vocabulary * self.hidden
        return 6.0 * (matrices + self.layers * self.length * self.hidden)

    def configuration(self) -> dict[str, Any]:
        """Return the parameters of ours."""
        sizes = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "seq-length": self.length,
            "max-position-embeddings": self.length,
            "make-vocab-size-divisible-by": self.vocabulary,
            "train-micro-batch-size-per-gpu": self.batch,
        }
        if self.key_heads:
            sizes["num-kv-heads"] = self.key_heads
        if self.gated_width:
            sizes["mlp-width"] = self.gated_width
        return TRAINING | sizes | self.settings


TRAINING = {
    "tokenizer-type": "CharLevelTokenizer",
    "pos-emb": "rotary",
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "gradient-clipping": 1.0,
    "num-gpus": 1,
    "eval-iters": 0,
    "log-interval": 1000,
    # One iteration is left at the end, so that no training completes.
    "train-iters": WARM_UP + STEPS + WATCHED + 1,
}
_NEOX = {"gpt-j-residual": True, "no-weight-tying": True}
SHAPES = {
    "pythia-160m": Shape(
        layers=12,
        hidden=768,
        heads=12,
        length=2048,
        batch=16,
        vocabulary=50_304,
        settings={**_NEOX, "rotary-pct": 0.25},
    ),
    "llama-3.2-1b": Shape(
        layers=16,
        hidden=2048,
        heads=32,
        key_heads=8,
        gated_width=8192,
        length=4096,
        batch=4,
        vocabulary=128_256,
        settings={
            "rotary-emb-base": 500_000,
            "norm": "rmsnorm",
            "activation": "swiglu",
            "use-bias-in-mlp": False,
            "use-bias-in-attn-linear": False,
        },
        has_plain=False,
    ),
    "neox-1.3b": Shape(
        layers=24, hidden=2048, heads=16, length=2048, batch=8, vocabulary=50_304, settings=_NEOX
    ),
}
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "length": 64, "batch": 2, "vocabulary": 512}
_TINY_LLAMA = {"key_heads": 2, "gated_width": 128}
_KERNELS = ("rope-fusion", "bias-gelu-fusion", "layernorm-fusion", "rmsnorm-fusion", "glu-fusion")
_UNCOMPILED: Mapping[str, Any] = {"compile": False}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "uncompiled": _UNCOMPILED,
    "compiled": {"compile": True},
    "compiled-without-fused-loss": {"compile": True, "loss-fusion": False},
    "kernels": {**_UNCOMPILED, "bias-dropout-fusion": "auto", **dict.fromkeys(_KERNELS, "auto")},
    "deterministic": {"compile": True, "deterministic": True},
}
PLAIN = {"plain": False, "plain-compiled": True}
CASES = [
    f"{shape}/{form}"
    for shape, form in itertools.product(SHAPES, [*FORMS, *PLAIN])
    if form not in PLAIN or SHAPES[shape].has_plain
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a case; memory and waits only on a GPU."""

    seconds: float
    peak_gib: float | None = None
    waits: int | None = None


def ours(shape: Shape, form: str, *, precision: str) -> Figures:
    """Train through `neox_model.Trainer`."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"data-path": str(random_corpus(Path(folder))), "precision": precision}
        config = neox_model.load_config(shape.configuration() | places | dict(FORMS[form]))
        with neox_model.Trainer(config) as trainer:
            seconds = timed(trainer.train)
            return Figures(seconds=seconds, peak_gib=peak_gib(), waits=waits_of(trainer.train))


def plain(shape: Shape, form: str, *, precision: str) -> Figures:
    """Train the plain model in a plain loop."""
    job = Job(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        length=shape.length,
        batch=shape.batch,
        vocabulary=shape.vocabulary,
        precision="bf16" if precision == "bfloat16" else precision,
        device="cuda" if torch.cuda.is_available() else "cpu",
        steps=WARM_UP + STEPS,
    )
    step = plain_step(job, is_compiled=PLAIN[form])

    def train(steps: int) -> None:
        for _ in range(steps):
            step()

    seconds = timed(train)
    return Figures(seconds=seconds, peak_gib=peak_gib())


def timed(train: Callable[[int], object]) -> float:
    """Return the mean seconds of a step after the warm-up."""
    train(WARM_UP)
    synchronize()
    began = time.perf_counter()
    train(STEPS)
    synchronize()
    return (time.perf_counter() - began) / STEPS


def waits_of(train: Callable[[int], object]) -> int | None:
    """Return how often the host waits for the GPU in one call of five iterations; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(WATCHED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(found.message) for found in caught)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None


def forget() -> None:
    """Free what the last case has left, so that it costs the next one nothing."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def tiny(shape: Shape) -> Shape:
    """Return the architecture at a size for a rehearsal on the CPU."""
    sizes = _TINY | (_TINY_LLAMA if shape.gated_width else {})
    kept = {name: getattr(shape, name) for name in ("settings", "has_plain")}
    return Shape(**kept, **sizes)


def table(measured: Mapping[str, Figures], shapes: Mapping[str, Shape], peak: float | None) -> str:
    """Return a Markdown table; the last columns are the speed as a multiple of the plain model's."""
    head = ["case", "tokens/s", "ms", "peak GiB", "MFU", "waits", *(f"against {name}" for name in PLAIN)]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for case, found in measured.items():
        name = case.partition("/")[0]
        shape = shapes[name]
        rate = shape.tokens / found.seconds
        peers = [measured.get(f"{name}/{peer}") for peer in PLAIN]
        rows.append(
            [
                case,
                f"{rate:,.0f}",
                f"{1e3 * found.seconds:.1f}",
                "" if found.peak_gib is None else f"{found.peak_gib:.2f}",
                "" if peak is None else f"{rate * shape.operations_per_token / (peak * 1e12):.1%}",
                "" if found.waits is None else f"{found.waits}",
                *("" if peer is None else f"{peer.seconds / found.seconds:.2f}" for peer in peers),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="SHAPE/FORM", help=f"default: all of {', '.join(CASES)}", default=CASES
    )
    parser.add_argument("--rehearse", action="store_true", help="run at tiny sizes on the CPU, in float32")
    options = parser.parse_args()
    for case in options.cases:
        if case not in CASES:
            parser.error(f"{case} is not a case; choose from {', '.join(CASES)}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs this script on the CPU")
    if options.rehearse and torch.cuda.is_available():
        parser.error("--rehearse is for the CPU; set CUDA_VISIBLE_DEVICES to nothing")
    return options


def main() -> int:
    options = parsed()
    device = None if options.rehearse else torch.cuda.get_device_name()
    precision = "fp32" if options.rehearse else "bfloat16"
    shapes = {name: tiny(shape) if options.rehearse else shape for name, shape in SHAPES.items()}
    print(f"{device or 'the CPU'}, PyTorch {torch.__version__}, {precision}", file=sys.stderr)
    measured: dict[str, Figures] = {}
    failed = False
    for case in options.cases:
        name, _, form = case.partition("/")
        forget()
        try:
            measured[case] = (plain if form in PLAIN else ours)(shapes[name], form, precision=precision)
        except (RuntimeError, neox_model.NeoXError) as error:  # OutOfMemoryError is a RuntimeError.
            print(f"{case}: failed: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"{case}: {1e3 * measured[case].seconds:.1f} ms", file=sys.stderr)
    print(table(measured, shapes, peak_tflops(device, "bf16")[0]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
