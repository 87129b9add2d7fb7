"""Compare a small retrieval model with BM25: sentences of held-out files, and the blocks that they are from.

The corpus is Python's standard library; a sentence is usually a line. Each sentence is taken out of its
block, and searched for among this block and all other blocks of the held-out files. BM25 (rank-bm25, with its
default parameters) reads words: letters, digits and underscores, in lower case.

    pip install rank-bm25
    python benchmarks/retrieval_model.py --iterations 400

Files of an earlier run in WORK are used again, and a finished run is only evaluated.
"""

import argparse
import re
import time
from pathlib import Path

import numpy as np
from rank_bm25 import BM25Okapi
from stdlib_files import make_corpus, make_dataset, make_tokenizer

import neox_model
from neox_config import NeoXConfig, resolve
from neox_data.inverse_cloze import InverseClozeDataset
from neox_data.splits import split_documents
from neox_data.tokenizers import build_tokenizer
from neox_model.extras.retrieval.find import Recall, find_in
from neox_model.extras.retrieval.index import index_in
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.train.data.datasets import held_out_blocks

SPLIT = "80,10,10"
BEST = [1, 5, 20]
SETTINGS = {
    "objective": "ict",
    "ict-head-size": 128,
    "ict-shared-towers": True,
    "report-topk-accuracies": BEST,
    "num-layers": 2,
    "hidden-size": 128,
    "num-attention-heads": 4,
    "seq-length": 96,
    "max-position-embeddings": 96,
    "pos-emb": "rotary",
    "split": SPLIT,
    "tokenizer-type": "HFTokenizer",
    "train-micro-batch-size-per-gpu": 128,
    "init-method-std": 0.04,
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 0.02, "adam_lr": 0.003, "betas": [0.9, 0.95], "eps": 1.0e-8},
    },
    "weight-decay": 0.1,
    "gradient-clipping": 1.0,
    "lr-decay-style": "cosine",
    "warmup": 0.05,
    "min-lr": 0.002,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "eval-iters": 10,
    "save-interval": 200,
    "log-interval": 20,
}


def main() -> None:
    """Train the model, and print the shares of the sentences that find their block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=400, help="of the run (default: 400)")
    parser.add_argument("--entries", type=int, default=4096, help="of the vocabulary (default: 4096)")
    parser.add_argument("--work", type=Path, default=Path("retrieval-model"), help="folder for all files")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    vocabulary = prepare(work, arguments.entries)
    settings = SETTINGS | {
        "vocab-file": str(vocabulary),
        "train-iters": arguments.iterations,
        "eval-interval": arguments.iterations + 1,
        "load": str(work / "checkpoints"),
    }
    began = time.monotonic()
    prefix = str(work / "stdlib_text_document")
    trained = settings | {"data-path": prefix, "save": settings["load"]}
    with neox_model.Trainer(neox_model.load_config(trained)) as trainer:
        trainer.train()
    print(f"training: {(time.monotonic() - began) / 60:.1f} minutes")
    # All blocks of the held-out files, and no others.
    searched = {"data-path": str(work / "heldout_text_document"), "split": "0,0,100"}
    index = f"{settings['load']}-index-{arguments.iterations}"
    config = neox_model.load_config(settings | searched | {"block-data-path": index})
    resolved = resolve(config, devices=1)
    index_in(SINGLE_PROCESS, resolved)
    model = find_in(SINGLE_PROCESS, resolved)
    assert isinstance(model, Recall)
    words = bm25_recall(config)
    print(f"{model.queries:,} sentences, {model.blocks:,} blocks, {arguments.iterations:,} iterations")
    print("| | " + " | ".join(f"top {k}" for k in BEST) + " |\n| --- |" + " --- |" * len(BEST))
    chance = {k: min(1.0, k / model.blocks) for k in BEST}
    for name, found in (("retrieval model", model.found), ("BM25", words), ("chance", chance)):
        print(f"| {name} | " + " | ".join(f"{100 * found[k]:.3g} %" for k in BEST) + " |")


def prepare(work: Path, entries: int) -> Path:
    """Make the datasets of all files and of the held-out ones, and return the tokenizer's file."""
    corpus, heldout = make_corpus(work), work / "heldout.jsonl"
    if not heldout.exists():
        lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
        part = split_documents(SPLIT, len(lines))["test"]
        heldout.write_text("".join(lines[part.start : part.stop]), encoding="utf-8")
    vocabulary = make_tokenizer(corpus, entries)
    for texts in (corpus, heldout):
        make_dataset(texts, vocabulary)
    return vocabulary


def bm25_recall(config: NeoXConfig) -> dict[int, float]:
    """Return the share of the sentences whose block is among the best k of BM25, by k.

    Sentences and blocks are those of `find_in`: the own block is without the sentence, all others are whole.
    """
    resolved = resolve(config, devices=1)
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=config.tokenizer.vocab_file)
    part, ((_, blocks),) = held_out_blocks(resolved.data)[0], held_out_blocks(resolved.data)[1].items()

    def words(tokens: np.ndarray) -> list[str]:
        return re.findall(r"\w+", tokenizer.decode(tokens.tolist()).lower())

    whole = BM25Okapi([words(blocks.tokens(blocks[number])) for number in range(len(blocks))])
    dataset = InverseClozeDataset(
        blocks, name=part, num_samples=1, seed=config.training.seed, query_in_block=0.0
    )
    better = []
    for item in range(len(dataset)):
        number, (query, block) = dataset.block_of(item), dataset[item]
        # Between the ends of documents around the text.
        sentence, rest = (words(row[0][1 : int(row[1].sum()) - 1]) for row in (query, block))
        own = whole.doc_freqs[number], whole.doc_len[number]
        whole.doc_freqs[number] = {word: rest.count(word) for word in rest}
        whole.doc_len[number] = len(rest)
        scores = whole.get_scores(sentence)
        better.append(int((scores >= scores[number]).sum()) - 1)
        whole.doc_freqs[number], whole.doc_len[number] = own
    return {k: float(np.mean(np.array(better) < k)) for k in BEST}


if __name__ == "__main__":
    main()
