"""Compare the losses of compressed quickstart models with that of the model that they start from.

    python benchmarks/compression.py [--quickstart quickstart] [--iterations 250] [--work compressed]

Run `make quickstart` first. Each compression starts from the weights of that training and is trained for
--iterations; so is the first row, which compresses nothing. A loss is that of the validation at the end of a
run. Models with quantized weights are then written with packed weights, which compares their logits.

The exit code is 1 if a loss exceeds the limit in its row. Only quantized weights have one: 1 % for 8 bits and
5 % for 4. The losses of pruned models are reported, not judged.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yml"
LOSS = "loss/validation"


@dataclass(frozen=True)
class Variant:
    """A compression.

    Args:
        parts: of compression_training.
        limit: of its loss, over that of the quickstart's model.
        is_packed: True if its weights can be packed.
    """

    parts: dict[str, Any]
    limit: float | None = None
    is_packed: bool = False


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


# The mask is made of the gradients of the iterations before it.
SNIP = {"method": "snip_momentum", "block_pattern": "2:4", "schedule_offset": 10}
SPARSE = part("sparse_pruning", SNIP, ["*"], dense_ratio=0.5)
HEADS = part("head_pruning", {"num_heads": 4}, [r"attention\.dense"], dense_ratio=0.7)
# The matrices of a width of 128 have 128 to 512 weights in each of 128 groups, and 32 to 128 in each of 512.
VARIANTS = {
    "none": Variant({}),
    "8-bit weights": Variant(weights(8, 128), 1.01, is_packed=True),
    "4-bit weights in groups": Variant(weights(4, 512), 1.05, is_packed=True),
    "2:4 sparse": Variant(SPARSE),
    "1 of 4 heads": Variant(HEADS),
    "2:4 sparse and 1 of 4 heads": Variant(SPARSE | HEADS),
}


def main() -> int:
    """Train the variants and print a table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", type=Path, default=Path("quickstart"), help="its folder")
    parser.add_argument("--iterations", type=int, default=250)
    parser.add_argument("--work", type=Path, default=Path("compressed"), help="folder for all files")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="a row of the table; default: all")
    chosen = parser.parse_args()
    model = last_loss(chosen.quickstart)
    write(f"The model: {model:.4f}\n")
    write(
        "| compression | validation loss | change | limit | packed matrices | largest difference of logits |"
    )
    write("| --- | ---: | ---: | ---: | ---: | ---: |")
    is_within = True
    for name in chosen.only or VARIANTS:
        variant = VARIANTS[name]
        folder = chosen.work.resolve() / name.replace(" ", "-").replace(":", "-")
        train(folder, variant.parts, chosen)
        ratio = last_loss(folder) / model
        is_within &= variant.limit is None or ratio <= variant.limit
        cells = [name, f"{last_loss(folder):.4f}", f"{ratio - 1:+.2%}"]
        cells += ["" if variant.limit is None else f"{variant.limit - 1:+.0%}"]
        cells += packed(folder) if variant.is_packed else ["", ""]
        write(f"| {' | '.join(cells)} |")
    return 0 if is_within else 1


def write(line: str) -> None:
    """Write a line of the report."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def train(folder: Path, parts: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Train a variant."""
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted measurement
    folder.mkdir(parents=True)
    changes = {
        "load": str((chosen.quickstart / "checkpoints").resolve()),
        "finetune": True,
        "save": str(folder / "checkpoints"),
        "log-dir": str(folder),
        "tensorboard-dir": None,
        "train-iters": chosen.iterations,
        "eval-interval": chosen.iterations,
        # One process evaluates on as many samples as the two of the quickstart.
        "num-gpus": 1,
        "eval-iters": 180,
        "optimizer.params.lr": 0.004,
        "optimizer.params.adam_lr": 0.0006,
        "min-lr": 0.0004,
    } | ({"compression_training": parts} if parts else {})
    values = [each for name, value in changes.items() for each in ("--set", f"{name}={json.dumps(value)}")]
    subprocess.run(["neox-launch", "--config", str(CONFIG), *values], check=True, stdout=subprocess.DEVNULL)


def last_loss(folder: Path) -> float:
    """Return the last validation loss that a run logged."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return float([line[LOSS] for line in lines if LOSS in line][-1])


def packed(folder: Path) -> list[str]:
    """Write a model with packed weights; return the bytes of its matrices, and the difference of logits."""
    output = folder / "packed"
    arguments = ["--load", str(folder / "checkpoints"), "--output", str(output), "--packed"]
    subprocess.run(["neox-convert", "compress", *arguments], check=True, stdout=subprocess.DEVNULL)
    result = json.loads((output / "verification.json").read_text())
    before, after = result["bytes_of_packed_matrices"]
    difference = result["largest_differences"]["logits"]
    return [f"{before:,} to {after:,} bytes, {before / after:.2f} times smaller", f"{difference:.1e}"]


if __name__ == "__main__":
    sys.exit(main())
