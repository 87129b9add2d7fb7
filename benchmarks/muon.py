"""Compare AdamW with two forms of Muon: validation losses of a small model after the same tokens.

The corpus is Python's standard library, as in `make quickstart`, and so are the settings, of a smaller model
(configs/quickstart.yml). The forms of Muon are the former one (quintic coefficients, query, key and value
together) and today's default (Polar Express, separate).

    OMP_NUM_THREADS=1 nice -n 15 python benchmarks/muon.py --iterations 200

A finished training in WORK is not repeated.
"""

import argparse
import statistics
from pathlib import Path

from stdlib_files import make_corpus, make_dataset, make_tokenizer

import neox_model

SETTINGS = {
    "num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "pos-emb": "rotary",
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "init-method-std": 0.04,
    "split": "80,10,10",
    "tokenizer-type": "HFTokenizer",
    "train-micro-batch-size-per-gpu": 8,
    "weight-decay": 0.1,
    "gradient-clipping": 1.0,
    "lr-decay-style": "cosine",
    "warmup": 0.05,
    "eval-iters": 40,
    "log-interval": 50,
}
ADAM = {"betas": [0.9, 0.95], "eps": 1e-8}
OLD = {"coefficients": "quintic", "qkv": "together"}
MATCHED = {"scale": "match_rms_adamw"}


def muon(lr: float, **params: object) -> dict:
    """Return Muon with its learning rate, and the quickstart's of Adam."""
    return {"type": "Muon", "params": {"lr": lr, "adam_lr": 0.003, **ADAM, **params}}


OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.003, **ADAM}},
    "Muon, former": muon(0.02, **OLD),
    "Muon": muon(0.02),
    "Muon, per head": muon(0.02, qkv="per_head"),
    "Muon, rate of AdamW": muon(0.003, **MATCHED),
    "Muon, rate of AdamW, rows, cautious": muon(0.003, **MATCHED, row_beta=0.95, cautious_decay=True),
}


def main() -> None:
    """Train every optimizer with every seed, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=200, help="of each training (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--work", type=Path, default=Path("muon"), help="folder for all files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    corpus = make_corpus(work)
    vocabulary = make_tokenizer(corpus, 2048)
    data = {"data-path": make_dataset(corpus, vocabulary), "vocab-file": str(vocabulary)}
    found: dict[str, list[float]] = {}
    print("| optimizer | validation loss by seed | mean | to AdamW |\n| --- | --- | --: | --: |")
    for name, optimizer in OPTIMIZERS.items():
        settings = {**SETTINGS, **data, "train-iters": arguments.iterations, "optimizer": optimizer}
        settings["min-lr"] = optimizer["params"]["lr"] / 10
        found[name] = [loss(work, name, settings | {"seed": seed}) for seed in range(1, arguments.seeds + 1)]
        values = " ".join(f"{value:.4f}" for value in found[name])
        mean, reference = (statistics.mean(found[each]) for each in (name, "AdamW"))
        print(f"| {name} | {values} | {mean:.4f} | {mean / reference:.4f} |", flush=True)


def loss(work: Path, name: str, settings: dict) -> float:
    """Return the validation loss at the end of a training, and store it."""
    stored = work / f"{name}-{settings['train-iters']}-{settings['seed']}.txt"
    if not stored.exists():
        # Evaluated at the end alone.
        config = neox_model.load_config(settings | {"eval-interval": settings["train-iters"] + 1})
        with neox_model.Trainer(config) as trainer:
            trainer.train()
            stored.write_text(str(trainer.losses["valid"]))
    return float(stored.read_text())


if __name__ == "__main__":
    main()
