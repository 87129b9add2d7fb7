"""Compare predicted times of training with those that others published.

    python benchmarks/published_runs.py [FILE.yml] [--leave-one-out]

For each row of the file the published and the predicted seconds per update and the error are
printed, then the median and the largest error. Rows with a feature that the prediction does not
know are listed and not counted. A row that gives no micro-batch or no recomputation is predicted
with the fastest that fits in memory.

Fields: `gpu`; the model (`model`, or `layers`, `hidden`, `heads`, `vocab`, `seq`); `gpus`, `tp`,
`pp`, `vp` (parts of the model per stage), `dp` or `fsdp`; `batch` (samples per update) or
`local_batch` (of a data-parallel rank), `micro`; `recompute`, `sequence_parallel`, `compiled`; and
one of `TF` (TFLOP/s per GPU by the formula of arXiv:2104.04473, with recomputation), `s` (seconds
per update) and `tok` (tokens per second and GPU).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from predicted_durations import DEVICES, Constants, Device, Execution, predict

from neox_config import Text, load_config, resolve
from neox_config.estimate.memory import device_memory
from neox_config.estimate.setup import Setup, setup_of

ROWS = Path(__file__).with_name("published-runs.yml")
USABLE_MEMORY = 0.94
# Layers, width, width of the MLP, and heads.
LLAMA = {
    "8B": (32, 4096, 14336, 32),
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}
TRAINING = {
    "train-micro-batch-size-per-gpu": 1,
    "train-iters": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0e-3}},
    "precision": "bfloat16",
    "data-types": {"grad-accum-dtype": "bf16"},
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "make-vocab-size-divisible-by": 1,
}
KNOWN = {
    *(
        "src",
        "gpu",
        "model",
        "layers",
        "hidden",
        "heads",
        "vocab",
        "seq",
        "gpus",
        "tp",
        "pp",
        "vp",
        "dp",
        "fsdp",
    ),
    *(
        "batch",
        "local_batch",
        "micro",
        "recompute",
        "sequence_parallel",
        "compiled",
        "precision",
        "TF",
        "s",
        "tok",
    ),
}
RECOMPUTED = {"full": "all", "none": "none", False: "none"}
FITTED = ("products", "half", "sustained")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=ROWS, help=f"rows (default: {ROWS.name})")
    parser.add_argument(
        "--leave-one-out",
        action="store_true",
        help="fit the constants to the other rows before each prediction",
    )
    arguments = parser.parse_args()
    rows = yaml.safe_load(arguments.file.read_text())
    known = [row for row in rows if unknown(row) is None]
    errors = []
    for row in rows:
        why = unknown(row)
        if why is not None:
            print(f"{label(row)}: not counted: {why}")
            continue
        fitted = fit([other for other in known if other is not row]) if arguments.leave_one_out else {}
        theirs, ours = published(row), predicted(row, fitted)
        errors.append(ours / theirs - 1)
        print(f"{label(row)}: published {theirs:.3f} s, predicted {ours:.3f} s, error {errors[-1]:+.1%}")
    sizes = [abs(error) for error in errors]
    print(f"{len(errors)} rows: error {median(sizes):.1%} in the median, {max(sizes):.1%} at most")


def label(row: dict[str, Any]) -> str:
    """Return the row's source, model, devices and layout."""
    model = row.get("model") or f"{row['layers']} x {row['hidden']}"
    names = [f"{name} {row[name]}" for name in ("tp", "pp", "vp", "dp", "fsdp", "recompute") if name in row]
    return f"{row['src']} {model} on {row['gpus']} {row['gpu']}, {', '.join(names)}"


def unknown(row: dict[str, Any]) -> str | None:
    """Return what of a row the prediction does not know; None if it knows all."""
    if row.get("precision", "bf16") not in ("bf16", "fp16"):
        return f"precision {row['precision']}"
    if row["gpu"] not in DEVICES:
        return f"the GPU {row['gpu']}"
    others = sorted(name for name in row.keys() - KNOWN if row[name])
    return ", ".join(others) or None


def published(row: dict[str, Any]) -> float:
    """Return the published seconds per update."""
    if "s" in row:
        return float(row["s"])
    setup = setup_of_row(row)
    samples = row["batch"] if "batch" in row else row["local_batch"] * copies_of(row)
    length = setup.run.batch.length
    if "tok" in row:
        return samples * length / (row["tok"] * row["gpus"])
    layers, width = len(setup.model.layers), setup.model.width
    factor = 1 + length / (6 * width) + setup.entries / (16 * layers * width)
    return 96 * samples * length * layers * width**2 * factor / (row["gpus"] * row["TF"] * 1e12)


def predicted(row: dict[str, Any], fitted: dict[str, float]) -> float:
    """Return the predicted seconds per update.

    Args:
        row: the run.
        fitted: constants that are not the usual ones; `sustained` is that of the H100.
    """
    device = device_of(row, fitted)
    constants = Constants(**{name: value for name, value in fitted.items() if name != "sustained"})
    found = list(candidates(row))
    fitting = [each for each in found if fits(each[0], device)]
    # A run of which nothing fits by the estimate was fuller, but was run.
    return min(predict(setup, device, execution, constants).total for setup, execution in fitting or found)


def device_of(row: dict[str, Any], fitted: dict[str, float]) -> Device:
    """Return the row's GPU."""
    device = DEVICES[row["gpu"]]
    if "sustained" not in fitted or device.sustained == 1:
        return device
    return replace(device, sustained=fitted["sustained"])


def setup_of_row(row: dict[str, Any]) -> Setup:
    """Return the row's model, on one device."""
    if "model" in row:
        layers, width, inner, heads = LLAMA[row["model"]]
        others = {
            "num-kv-heads": 8, "mlp-width": inner, "activation": "swiglu", "norm": "rmsnorm",
            "pos-emb": "rotary", "use-bias-in-mlp": False, "use-bias-in-attn-linear": False,
            "no-weight-tying": True,
        }  # fmt: skip
        return setup_with(layers, width, heads, 8192, 128_256, json.dumps(others))
    stored = json.dumps({"scaled-upper-triang-masked-softmax-fusion": True})
    return setup_with(row["layers"], row["hidden"], row["heads"], row["seq"], row["vocab"], stored)


@cache
def setup_with(layers: int, width: int, heads: int, length: int, vocab_size: int, others: str) -> Setup:
    """Return the setup of a model with these sizes and other parameters."""
    sizes = {
        "num-layers": layers, "hidden-size": width, "num-attention-heads": heads, "seq-length": length,
        "max-position-embeddings": length,
    }  # fmt: skip
    text = json.dumps(TRAINING | sizes | json.loads(others))
    return setup_of(resolve(load_config([], texts=[Text(text, "row")]), devices=1), vocab_size=vocab_size)


def copies_of(row: dict[str, Any]) -> int:
    """Return the data-parallel size."""
    return int(row.get("fsdp") or row["dp"])


def candidates(row: dict[str, Any]) -> Iterator[tuple[Setup, Execution]]:
    """Yield the ways in which the row can have been run."""
    is_sharded, ranks = "fsdp" in row, row.get("tp", 1)
    own = row["local_batch"] if "local_batch" in row else row["batch"] // copies_of(row)
    micro_batches = [row["micro"]] if "micro" in row else [own] if is_sharded else divisors(own)
    for recomputed in recomputations(row):
        for micro in micro_batches:
            setup = setup_of_row(row).changed(
                layout={
                    "tensor": ranks,
                    "stages": row.get("pp", 1),
                    "data": copies_of(row),
                    "zero": 3 if is_sharded else 0,
                    "splits_sequence": row.get("sequence_parallel", is_sharded and ranks > 1),
                },
                batch={"micro": micro, "accumulation": own // micro},
                recomputation={"segment": 1 if recomputed == "all" else None},
            )
            setup = replace(setup, reduced_bytes=4 if is_sharded else 2)
            is_fused = bool(row.get("compiled")) if is_sharded else True
            yield setup, Execution(recomputed=recomputed, chunks=row.get("vp", 1), is_fused=is_fused)


def recomputations(row: dict[str, Any]) -> Sequence[Any]:
    """Return what can have been recomputed."""
    given = row.get("recompute")
    partial = "half" if "fsdp" in row else "core"
    if given is None:
        return ("none", "all") if "fsdp" in row else ("none", partial, "all")
    return (RECOMPUTED.get(given, partial),)


def divisors(number: int) -> list[int]:
    """Return the micro-batch sizes to try."""
    return [each for each in (1, 2, 4, 8) if number % each == 0]


def fits(setup: Setup, device: Device) -> bool:
    """Return whether the first stage fits in memory."""
    return device_memory(setup).total <= USABLE_MEMORY * device.memory


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the constants with the least sum of squared logarithms of the ratios, by coordinate descent."""
    start = {
        "products": Constants().products,
        "half": Constants().half,
        "sustained": DEVICES["H100-500W"].sustained,
    }

    def loss(steps: dict[str, float]) -> float:
        values = {name: start[name] * exp(step) for name, step in steps.items()}
        # The second term keeps constants that the rows do not determine.
        kept = sum(0.05 * step**2 for step in steps.values())
        return kept + sum(log(predicted(row, values) / published(row)) ** 2 for row in rows)

    best, size = dict.fromkeys(FITTED, 0.0), 0.1
    least = loss(best)
    while size > 0.005:
        tried = [best | {name: best[name] + step} for name in FITTED for step in (size, -size)]
        nearest = min(tried, key=loss)
        if loss(nearest) < least:
            best, least = nearest, loss(nearest)
        else:
            size /= 2
    return {name: start[name] * exp(step) for name, step in best.items()}


if __name__ == "__main__":
    main()
