"""Compare the losses of compressed quickstart models with that of the model that they start from.

    python benchmarks/compression.py --load quickstart/checkpoints [--iterations 400] [--work compressed]

Train `make quickstart` first. Each compression loads the weights of that training and is trained for
--iterations; so is the first row, which compresses nothing: it is what the others are compared with. A loss
is that of the whole validation at the end of a training. Two processes train at ZeRO stage 0.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/quickstart.yml"
LOSS = "loss/validation"


def part(name: str, shared: dict[str, Any], modules: list[str], **params: Any) -> dict[str, Any]:
    """Return a part of compression_training with one group."""
    return {
        name: {
            "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
            "different_groups": {"all": {"modules": modules, "params": params}},
        }
    }


def weights(bits: int, groups: int) -> dict[str, Any]:
    """Return the quantization of all matrices of the layers."""
    shared = {"quantize_weight_in_forward": True, "quantize_groups": groups}
    return part("weight_quantization", shared, ["*"], start_bits=bits, target_bits=bits)


# Compression -> its block, and the limit of its loss over that of the first row; 1024 groups of the matrices
# of a width of 256 have 64 to 256 weights.
VARIANTS: dict[str, tuple[dict[str, Any], float | None]] = {
    "none": ({}, None),
    "8-bit weights": (weights(8, 256), 1.01),
    "4-bit weights in groups": (weights(4, 1024), 1.05),
    "2:4 sparse": (
        part(
            "sparse_pruning",
            {"method": "snip_momentum", "block_pattern": "2:4", "schedule_offset": 20},
            ["*"],
            dense_ratio=0.5,
        ),
        None,
    ),
    "30 % of heads (1 of 4)": (
        part(
            "head_pruning",
            {"num_heads": 4, "schedule_offset": 20},
            [r"attention\.dense"],
            dense_ratio=0.7,
        ),
        None,
    ),
}


def main() -> int:
    """Train the variants and print a table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, default=Path("quickstart/checkpoints"))
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--work", type=Path, default=Path("compressed"), help="folder for all files")
    chosen = parser.parse_args()
    losses = {
        name: trained(number, block, chosen) for number, (name, (block, _)) in enumerate(VARIANTS.items())
    }
    print("| compression | validation loss | change | limit |\n| --- | ---: | ---: | ---: |")
    is_within = True
    for name, (_, limit) in VARIANTS.items():
        ratio = losses[name] / losses["none"]
        is_within &= limit is None or ratio <= limit
        shown = "" if limit is None else f"{limit - 1:+.0%}"
        print(f"| {name} | {losses[name]:.4f} | {ratio - 1:+.2%} | {shown} |")
    return 0 if is_within else 1


def trained(number: int, block: dict[str, Any], chosen: argparse.Namespace) -> float:
    """Train a variant; return its validation loss."""
    folder = chosen.work.resolve() / str(number)
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted measurement
    folder.mkdir(parents=True)
    changes = {
        "load": str(chosen.load.resolve()),
        "finetune": True,
        "save": str(folder / "checkpoints"),
        "log-dir": str(folder),
        "tensorboard-dir": None,
        "train-iters": chosen.iterations,
        "eval-interval": chosen.iterations,
        "zero-optimization.stage": 0,
        "optimizer.params.lr": 0.001,
        "min-lr": 0.0001,
    } | ({"compression_training": block} if block else {})
    values = [each for name, value in changes.items() for each in ("--set", f"{name}={json.dumps(value)}")]
    subprocess.run(["neox-launch", "--config", str(CONFIG), *values], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return float([line[LOSS] for line in lines if LOSS in line][-1])


if __name__ == "__main__":
    sys.exit(main())
