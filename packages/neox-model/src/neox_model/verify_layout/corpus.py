"""A small tokenizer and corpus for comparisons, the same on every machine, with documents of all lengths."""

import json
from pathlib import Path

import numpy as np

from neox_data.indexed import IndexedDatasetWriter

__all__ = ["write_corpus"]

_SPECIAL = ("<|endoftext|>", "<|mask|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_DOCUMENTS, _LONGEST = 400, 60


def write_corpus(folder: Path, *, entries: int) -> None:
    """Write `tokenizer.json`, and a dataset with the prefix `corpus`.

    Args:
        folder: folder of the files.
        entries: number of entries of the vocabulary.
    """
    words = [*_SPECIAL, *(f"w{number}" for number in range(entries - len(_SPECIAL)))]
    vocabulary = {word: number for number, word in enumerate(words)}
    special = [
        {
            "id": number,
            "content": word,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, word in enumerate(_SPECIAL)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    generator = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "corpus", dtype=np.uint16) as writer:
        for _ in range(_DOCUMENTS):
            text = generator.integers(len(_SPECIAL), entries, size=generator.integers(3, _LONGEST))
            writer.append(np.append(text, 0).astype(np.uint16))
