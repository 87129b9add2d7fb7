"""Compare whole training steps on one GPU, in one process: ours in several forms and a plain PyTorch model.

    python benchmarks/one_gpu.py                                   # all cases, bf16
    python benchmarks/one_gpu.py pythia-160m/compiled pythia-160m/plain-compiled --accumulation 1
    python benchmarks/one_gpu.py neox-1.3b/compiled --set bias-gelu-fusion=true --profile traces
    python benchmarks/one_gpu.py --rehearse pythia-160m/uncompiled # test this script on the CPU

A case is SHAPE/FORM, with a number of micro-batches per update. Ours is `neox_model.Trainer`, with the data,
the clipping and the update of every run: bfloat16 weights with float32 masters and AdamW. The plain
model (plain_gpt.py) has the same architecture, and the forms plain and plain-compiled train it under autocast
over float32 weights. The form plain-fsdp2 trains it as torchtitan does: under FSDP2 over one rank, which
computes in bfloat16 and reduces gradients in float32, with each layer compiled alone. The time is that of all
measured updates together, divided by their micro-batches or by their number; the memory is the peak of
PyTorch's allocator.

MFU is 6 x (parameters of the matrices + k x layers x length x hidden) operations per token, forward and
backward, without recomputation, times tokens per second, divided by the device's peak. k is 2 for MFU (full):
attention as if every token saw the whole sequence. k is 1 for MFU (causal): without what the mask hides.
`waits` counts how often the host waits for the GPU in one call of some updates, of five micro-batches or one
update, which reads their results at its end. --profile adds the milliseconds of a micro-batch by class of
kernel (kernel_times.py), of two more updates.
"""

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_times import profiled
from plain_gpt import PlainGPT, PlainLlama
from torch import distributed, nn
from train_contenders import PLAIN_FORMS, Job, plain_step, random_corpus

import neox_model
from neox_config import NeoXConfig, Text, load_config, resolve
from neox_config.atomic import atomic_write
from neox_config.estimate import Convention, flops_per_token
from neox_model.metrics.peaks import peak_tflops
from neox_model.torch_compat import init_process_group

# Micro-batches; of at least one update each.
WARM_UP, MEASURED, WATCHED = 5, 16, 5
PROFILED_UPDATES = 2
GIB = 1 << 30
CONVENTIONS: tuple[Convention, ...] = ("full", "causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of its batch.

    Args:
        key_heads: heads of keys and values; None: as many as of queries.
        gated_width: width of a gated feed-forward block; None: a block with two matrices, four times as wide.
        settings: other parameters of ours.
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

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.length

    def operations_per_token(self, convention: Convention) -> int:
        """Return the operations of forward and backward."""
        resolved = resolve(loaded(TRAINING | self.settings | self.sizes), devices=1)
        model = resolved.model
        entries = model.embedding.entries(self.vocabulary)
        return flops_per_token(model, entries=entries, length=self.length, convention=convention)

    @property
    def sizes(self) -> dict[str, Any]:
        """The parameters of ours that set the sizes."""
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
        return sizes


def loaded(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> NeoXConfig:
    """Return a configuration of settings, and of NAME=VALUE that override them."""
    # JSON is YAML.
    return load_config([], texts=[Text(json.dumps(dict(settings)), "case")], overrides=overrides)


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
    # Some iterations are left at the end, so that no training completes.
    "train-iters": WARM_UP + MEASURED + WATCHED + PROFILED_UPDATES + 1,
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
    ),
    "neox-1.3b": Shape(
        layers=24, hidden=2048, heads=16, length=2048, batch=8, vocabulary=50_304, settings=_NEOX
    ),
}
_TINY = {"layers": 2, "hidden": 64, "heads": 4, "length": 64, "batch": 2, "vocabulary": 512}
_TINY_LLAMA = {"key_heads": 2, "gated_width": 128}
_KERNELS = ("rope-fusion", "bias-gelu-fusion", "layernorm-fusion", "rmsnorm-fusion", "glu-fusion")
_UNCOMPILED: Mapping[str, Any] = {"compile": False}
# Parameters that --set does not change, besides the sizes of a shape.
FIXED = {"gradient-accumulation-steps", "train-batch-size", "train-iters", "precision"}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "uncompiled": _UNCOMPILED,
    "compiled": {"compile": True},
    "compiled-bias-gelu": {"compile": True, "bias-gelu-fusion": True},
    "compiled-without-fused-loss": {"compile": True, "loss-fusion": False},
    "kernels": {**_UNCOMPILED, "bias-dropout-fusion": "auto", **dict.fromkeys(_KERNELS, "auto")},
    "deterministic": {"compile": True, "deterministic": True},
}


def has_form(shape: Shape, form: str) -> bool:
    """Return whether a shape can be trained in a form: a gated block adds no bias before its GELU."""
    is_required = FORMS.get(form, {}).get("bias-gelu-fusion") is True
    return shape.gated_width is None or not is_required


CASES = [
    f"{name}/{form}"
    for name, form in itertools.product(SHAPES, [*FORMS, *PLAIN_FORMS])
    if has_form(SHAPES[name], form)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured.

    Args:
        name: SHAPE/FORM.
        accumulation: micro-batches per update.
        overrides: NAME=VALUE of ours.
        traces: folder of the traces; None: nothing is profiled.
    """

    name: str
    shape: Shape
    accumulation: int
    precision: str
    overrides: Sequence[str] = ()
    traces: Path | None = None

    @property
    def form(self) -> str:
        return self.name.partition("/")[2]

    def updates(self, micro_batches: int) -> int:
        """Return the number of updates with at least as many micro-batches."""
        return -(-micro_batches // self.accumulation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a case.

    Args:
        seconds: of a micro-batch.
        peak_gib: memory; None without a GPU.
        waits: of the host for the GPU; None without a GPU.
        classes: milliseconds of a micro-batch by class of kernel; None if nothing was profiled.
    """

    seconds: float
    peak_gib: float | None
    waits: int | None
    classes: Mapping[str, float] | None


def ours(case: Case) -> Figures:
    """Train through `neox_model.Trainer`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TRAINING | case.shape.settings | case.shape.sizes | form_settings(case.form)
        settings |= {
            "data-path": str(random_corpus(Path(folder))),
            "precision": case.precision,
            "gradient-accumulation-steps": case.accumulation,
        }
        with neox_model.Trainer(loaded(settings, case.overrides)) as trainer:
            return measure(case, trainer.train)


def form_settings(form: str) -> dict[str, Any]:
    """Return the parameters of a form; kernels that it requires are used where they can be on a CPU."""
    required = (
        () if torch.cuda.is_available() else [name for name in _KERNELS if FORMS[form].get(name) is True]
    )
    return {**FORMS[form], **dict.fromkeys(required, "auto")}


def plain(case: Case) -> Figures:
    """Train the plain model in a plain loop, in a process group of one rank."""
    shape = case.shape
    job = Job(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        length=shape.length,
        batch=shape.batch,
        vocabulary=shape.vocabulary,
        precision="bf16" if case.precision == "bfloat16" else case.precision,
        device="cuda" if torch.cuda.is_available() else "cpu",
        steps=1,
        accumulation=case.accumulation,
    )
    init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    try:
        step = plain_step(job, plain_model(shape), PLAIN_FORMS[case.form])

        def train(updates: int) -> None:
            for _ in range(updates):
                step()

        return measure(case, train)
    finally:
        distributed.destroy_process_group()


def plain_model(shape: Shape) -> nn.Module:
    """Return the plain model of a shape."""
    sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "length", "vocabulary")}
    if shape.gated_width is None:
        return PlainGPT(**sizes)
    return PlainLlama(**sizes, key_heads=shape.key_heads or shape.heads, width=shape.gated_width)


def measure(case: Case, train: Callable[[int], object]) -> Figures:
    """Measure a run.

    Args:
        case: what is trained.
        train: trains for a number of updates.
    """
    train(case.updates(WARM_UP))
    synchronize()
    updates = case.updates(MEASURED)
    began = time.perf_counter()
    train(updates)
    synchronize()
    seconds = (time.perf_counter() - began) / (updates * case.accumulation)
    return Figures(
        seconds=seconds,
        peak_gib=peak_gib(),
        waits=waits_of(lambda: train(case.updates(WATCHED))),
        classes=None if case.traces is None else classes_of(case, train, case.traces),
    )


def classes_of(case: Case, train: Callable[[int], object], traces: Path) -> dict[str, float]:
    """Return the milliseconds of a micro-batch by class of kernel."""

    def work() -> None:
        train(PROFILED_UPDATES)
        synchronize()

    trace = traces / f"{case.name.replace('/', '-')}-{case.accumulation}.json.gz"
    micro_batches = PROFILED_UPDATES * case.accumulation
    return {name: milliseconds / micro_batches for name, milliseconds in profiled(work, trace).items()}


def waits_of(work: Callable[[], object]) -> int | None:
    """Return how often the host waits for the GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
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
    return Shape(settings=shape.settings, **sizes)


def row_of(case: Case, found: Figures, peak: float | None) -> dict[str, Any]:
    """Return the figures of a case as in the JSON file.

    Args:
        case: what was measured.
        found: its figures.
        peak: TFLOP/s of the device; None: it is not known.
    """
    rate = case.shape.tokens / found.seconds
    shares = {
        f"mfu_{convention}": None
        if peak is None
        else rate * case.shape.operations_per_token(convention) / (peak * 1e12)
        for convention in CONVENTIONS
    }
    return {
        "case": case.name,
        "accumulation": case.accumulation,
        "micro_batch_ms": 1e3 * found.seconds,
        "tokens_per_second": rate,
        **shares,
        "peak_gib": found.peak_gib,
        "waits": found.waits,
        "classes": found.classes,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table; the last columns are the speed as a multiple of the plain model's."""
    times = {(row["case"], row["accumulation"]): row["micro_batch_ms"] for row in rows}
    shown = [
        {
            "case": row["case"],
            "accumulation": f"{row['accumulation']}",
            "tokens/s": f"{row['tokens_per_second']:,.0f}",
            "ms per micro-batch": f"{row['micro_batch_ms']:.1f}",
            "ms per update": f"{row['accumulation'] * row['micro_batch_ms']:.1f}",
            "peak GiB": _text(row["peak_gib"], ".2f"),
            **{f"MFU ({convention})": _text(row[f"mfu_{convention}"], ".1%") for convention in CONVENTIONS},
            "waits": _text(row["waits"], "d"),
            **{f"against {peer}": _against(row, peer, times) for peer in PLAIN_FORMS},
        }
        for row in rows
    ]
    return _markdown(shown)


def classes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the profiled cases: milliseconds of a micro-batch by class of kernel."""
    return _markdown(
        [
            {"ms per micro-batch": row["case"], "accumulation": f"{row['accumulation']}"}
            | {name: f"{milliseconds:.1f}" for name, milliseconds in row["classes"].items()}
            for row in rows
            if row["classes"] is not None
        ]
    )


def _against(row: Mapping[str, Any], peer: str, times: Mapping[tuple[str, int], float]) -> str:
    """Return how many times faster a case is than a form of the same shape and accumulation."""
    other = times.get((f"{row['case'].partition('/')[0]}/{peer}", row["accumulation"]))
    return _text(None if other is None else other / row["micro_batch_ms"], ".2f")


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table; the numbers behind the first column are on the right."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---", *["--:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="SHAPE/FORM", help=f"default: all of {', '.join(CASES)}", default=CASES
    )
    parser.add_argument(
        "--accumulation", nargs="+", type=int, default=[1, 8], metavar="N", help="micro-batches per update"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of ours, as YAML"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures, after every case")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a Chrome trace of every case")
    parser.add_argument("--rehearse", action="store_true", help="run at tiny sizes on the CPU, in float32")
    options = parser.parse_args()
    for case in options.cases:
        if case not in CASES:
            parser.error(f"{case} is not a case; choose from {', '.join(CASES)}")
    if min(options.accumulation) < 1:
        parser.error("--accumulation must be at least 1")
    fixed = {name for shape in SHAPES.values() for name in shape.sizes} | FIXED
    for override in options.set:
        name = override.partition("=")[0].strip()
        if name.replace("_", "-") in fixed:
            parser.error(f"--set {name} changes what is compared; add a shape to this script instead")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs this script on the CPU")
    if options.rehearse and torch.cuda.is_available():
        parser.error("--rehearse is for the CPU; set CUDA_VISIBLE_DEVICES to nothing")
    return options


def main() -> int:
    options = parsed()
    device = None if options.rehearse else torch.cuda.get_device_name()
    precision = "fp32" if options.rehearse else "bfloat16"
    peak = peak_tflops(device, "bf16")[0]
    about = {
        "device": device or "the CPU",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "precision": precision,
    }
    print(f"{about['device']}, PyTorch {torch.__version__}, {precision}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    failed = False
    for name, accumulation in itertools.product(options.cases, options.accumulation):
        shape = SHAPES[name.partition("/")[0]]
        case = Case(
            name=name,
            shape=tiny(shape) if options.rehearse else shape,
            accumulation=accumulation,
            precision=precision,
            overrides=options.set,
            traces=options.profile,
        )
        forget()
        try:
            found = (plain if case.form in PLAIN_FORMS else ours)(case)
        except (RuntimeError, neox_model.NeoXError) as error:  # OutOfMemoryError is a RuntimeError.
            print(f"{name}, accumulation {accumulation}: failed: {error}", file=sys.stderr)
            failed = True
            continue
        rows.append(row_of(case, found, peak))
        print(f"{name}, accumulation {accumulation}: {1e3 * found.seconds:.1f} ms", file=sys.stderr)
        if options.json is not None:
            with atomic_write(options.json) as file:
                json.dump({**about, "rows": rows}, file, indent=1, allow_nan=False)
    print("\n\n".join(filter(None, (table(rows), classes_table(rows)))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
