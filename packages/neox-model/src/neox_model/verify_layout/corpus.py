"""A small tokenizer and corpus for comparisons, the same on every machine, with documents of all lengths."""

from pathlib import Path

import numpy as np

from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers import build_tokenizer
from neox_data.tokenizers.train import train_byte_level_bpe

__all__ = ["write_corpus"]

# With all bytes and two more, a prime number of entries: it requires padding on every tensor-parallel size.
_SPECIAL = ("<|mask|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|unused|>")
_ENTRIES = 263
_DOCUMENTS, _LONGEST, _SENTENCE = 400, 60, 6


def write_corpus(folder: Path) -> None:
    """Write `tokenizer.json`, and datasets with the prefixes `corpus`, `labels` (of it) and `titles`.

    Args:
        folder: folder of the files.
    """
    file = folder / "tokenizer.json"
    train_byte_level_bpe(["text"], vocab_size=_ENTRIES, output=file, special=_SPECIAL)
    tokenizer = build_tokenizer("HFTokenizer", vocab_file=file)
    stop, space = tokenizer.encode(". ")
    generator = np.random.default_rng(0)
    with (
        IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as corpus,
        IndexedDatasetWriter(folder / "labels", dtype=np.int32) as labels,
        IndexedDatasetWriter(folder / "titles", dtype=np.uint16) as titles,
    ):
        for _ in range(_DOCUMENTS):
            text = generator.integers(len(_SPECIAL) + 2, _ENTRIES, size=generator.integers(3, _LONGEST))
            # Sentences, as the inverse cloze task requires.
            text[_SENTENCE - 2 :: _SENTENCE], text[_SENTENCE - 1 :: _SENTENCE] = stop, space
            document = np.append(text, tokenizer.end_of_document)
            corpus.append(document.astype(np.uint16))
            is_left_out = generator.random(document.size) < 0.3
            labels.append(np.where(is_left_out, -100, document).astype(np.int32))
            titles.append(document[:3].astype(np.uint16))
