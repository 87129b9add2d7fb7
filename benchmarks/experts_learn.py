"""Compare a dense model with mixtures of experts of as many active parameters, after the same tokens.

The corpus and the settings are those of benchmarks/muon.py, with AdamW. The dense feed-forward block is wider
by as many parameters as the router has, so that the active parameters are equal to the last one.

    OMP_NUM_THREADS=1 nice -n 19 python benchmarks/experts_learn.py --iterations 600

It ends with an error if the first mixture has not learned better with every seed. A finished training in WORK
is not repeated.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from muon import ADAM, SETTINGS, loss
from stdlib_files import make_corpus, make_dataset, make_tokenizer

import neox_model
from neox_config.estimate.resolved import estimate_resolved
from neox_config.spec.resolve import resolve

WIDTH, ENTRIES, NUMBER, CHOSEN, RATE = 128, 2048, 8, 2, 0.003
OPTIMIZER = {"type": "AdamW", "params": {"lr": RATE, **ADAM}}
SHARED = {
    **SETTINGS,
    "optimizer": OPTIMIZER,
    "min-lr": RATE / 10,
    "use-bias-in-mlp": False,
}
EXPERTS = {"moe-num-experts": NUMBER, "moe-top-k": CHOSEN, "moe-expert-width": WIDTH}
LOSS = {"moe-router-type": "topk", "moe-balance-loss": 0.01, "moe-router-z-loss": 0.001}
BIAS = {"moe-router-type": "topk", "moe-expert-bias": True, "moe-scores": "sigmoid"}
NORMALIZED = {"moe-normalize-weights": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"mlp-width": CHOSEN * WIDTH + NUMBER // 2},
    "experts, balance loss": EXPERTS | LOSS | NORMALIZED,
    "experts, expert bias": EXPERTS | BIAS | NORMALIZED,
    "experts, balance loss, weights not normalized": EXPERTS | LOSS,
    "experts, GPT-NeoX's sinkhorn": EXPERTS,
}


def main() -> None:
    """Train every model with every seed, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=600, help="of each training (default: 600)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--work", type=Path, default=Path("experts"), help="folder for all files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    corpus = make_corpus(work)
    vocabulary = make_tokenizer(corpus, ENTRIES)
    data = {"data-path": make_dataset(corpus, vocabulary), "vocab-file": str(vocabulary)}
    found: dict[str, list[float]] = {}
    print("| model | parameters | active | validation loss by seed | mean | less than dense |")
    print("| --- | --: | --: | --- | --: | --: |")
    for name, model in MODELS.items():
        settings = {**SHARED, **data, **model, "train-iters": arguments.iterations}
        counted = estimate_resolved(resolve(neox_model.load_config(settings), devices=1))[0]
        found[name] = [loss(work, name, settings | {"seed": seed}) for seed in range(1, arguments.seeds + 1)]
        values = " ".join(f"{value:.4f}" for value in found[name])
        mean, dense = (statistics.mean(found[each]) for each in (name, "dense"))
        counts = f"{counted.total_parameters:,} | {counted.active_parameters:,}"
        print(f"| {name} | {counts} | {values} | {mean:.4f} | {dense - mean:.4f} |", flush=True)
    better = [one < other for one, other in zip(found["experts, balance loss"], found["dense"], strict=True)]
    if not all(better):
        raise SystemExit("the mixture has not learned better than the dense model")


if __name__ == "__main__":
    main()
