"""Compare a small masked model with a unigram model: perplexity of the same masked tokens of held-out files.

The corpus is Python's standard library, with a vocabulary of byte pairs that has a mask token. The unigram
model knows how frequent each token is in the files of the run. Both predict the tokens that the
validation masks.

    python benchmarks/masked_model.py --iterations 600

Files of an earlier run in WORK are used again, and a finished run is only evaluated.
"""

import argparse
import math
from contextlib import closing
from pathlib import Path

import numpy as np
from stdlib_files import make_corpus, make_dataset, make_tokenizer

import neox_model
from neox_config import NeoXConfig, resolve
from neox_data.indexed import open_indexed
from neox_data.splits import split_documents
from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.data.objective import samples_of_objective
from neox_model.train.data.streams import build_datasets, open_streams

SPLIT = "90,10,0"
SETTINGS = {
    "objective": "masked",
    "num-layers": 2,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "pos-emb": "rotary",
    "reset-attention-mask": True,
    "loss-normalization": "global",
    "split": SPLIT,
    "tokenizer-type": "HFTokenizer",
    "train-micro-batch-size-per-gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.98]}},
    "weight-decay": 0.01,
    "gradient-clipping": 1.0,
    "warmup": 0.05,
    "min-lr": 0.0003,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "eval-iters": 20,
    "save-interval": 200,
    "log-interval": 50,
}


def main() -> None:
    """Train the model, and print both perplexities."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=600, help="of the run (default: 600)")
    parser.add_argument("--entries", type=int, default=2048, help="of the vocabulary (default: 2048)")
    parser.add_argument("--work", type=Path, default=Path("masked-model"), help="folder for all files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    prefix, vocabulary = prepare(work, arguments.entries)
    checkpoints = str(work / "checkpoints")
    config = neox_model.load_config(
        SETTINGS
        | {
            "data-path": prefix,
            "vocab-file": str(vocabulary),
            "train-iters": arguments.iterations,
            # Evaluated at the end alone, on the first samples of the validation.
            "eval-interval": arguments.iterations + 1,
            "save": checkpoints,
            "load": checkpoints,
        }
    )
    with neox_model.Trainer(config) as trainer:
        trainer.train()
        loss = trainer.losses["valid"]
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=vocabulary)
    unigram, count = unigram_loss(config, prefix, tokenizer)
    print(f"{count:,} masked tokens of held-out files, {arguments.iterations:,} iterations")
    print("| model | loss, nats | perplexity |\n| --- | --- | --- |")
    for name, value in (("masked model", loss), ("unigram model", unigram)):
        print(f"| {name} | {value:.3f} | {math.exp(value):.1f} |")


def prepare(work: Path, entries: int) -> tuple[str, Path]:
    """Return the prefix of the dataset and the tokenizer's file, which are made if they do not exist."""
    corpus = make_corpus(work)
    vocabulary = make_tokenizer(corpus, entries, "--special-token", "<|mask|>")
    return make_dataset(corpus, vocabulary), vocabulary


def unigram_loss(config: NeoXConfig, prefix: str, tokenizer: Tokenizer) -> tuple[float, int]:
    """Return the loss of the frequencies on the masked tokens of the validation, and their number.

    Every token of the vocabulary is counted once more than it occurs.
    """
    indexed = open_indexed(prefix)
    training = split_documents(SPLIT, len(indexed))["train"]
    counts = np.ones(tokenizer.vocab_size)
    for document in training:
        counts += np.bincount(indexed[document], minlength=len(counts))
    losses = -np.log(counts / counts.sum())
    resolved = resolve(config, devices=1)
    datasets = samples_of_objective(build_datasets(resolved, ("valid",)), resolved.data, tokenizer)
    streams = open_streams(
        resolved.data,
        resolved.run,
        datasets,
        SINGLE_PROCESS,
        vocab_size=len(counts),
        end_of_document=tokenizer.end_of_document,
    )
    found: list[np.ndarray] = []
    with closing(streams["valid"](0)) as stream:
        for _ in range(config.training.eval_iters * resolved.run.batch.accumulation):
            batch = next(stream)
            found.append(losses[batch.labels_BS[batch.loss_mask_BS == 1].numpy()])
    every = np.concatenate(found)
    return float(every.mean()), len(every)


if __name__ == "__main__":
    main()
