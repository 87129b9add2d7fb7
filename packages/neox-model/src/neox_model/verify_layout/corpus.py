"""A small tokenizer and corpus for comparisons, the same on every machine, with documents of all lengths."""

from pathlib import Path

import numpy as np

from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers.train import write_words

__all__ = ["write_corpus"]

_SPECIAL = ("<|endoftext|>", "<|mask|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_DOCUMENTS, _LONGEST = 400, 60


def write_corpus(folder: Path, *, entries: int) -> None:
    """Write `tokenizer.json`, and a dataset with the prefix `corpus`.

    Args:
        folder: folder of the files.
        entries: number of entries of the vocabulary.
    """
    words = [f"w{number}" for number in range(entries - len(_SPECIAL))]
    write_words(words, special=_SPECIAL, output=folder / "tokenizer.json")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as writer:
        for _ in range(_DOCUMENTS):
            text = generator.integers(len(_SPECIAL), entries, size=generator.integers(3, _LONGEST))
            writer.append(np.append(text, 0).astype(np.uint16))
