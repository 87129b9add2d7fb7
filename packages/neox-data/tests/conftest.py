from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from neox_data.indexed import IndexedDatasetWriter
from neox_data.tokenizers.train import train_byte_level_bpe

SENTENCES = [
    "def sum_of(values):\n    return sum(value for value in values)\n",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f680 \u00a0 tabs\tand  spaces",
]


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., Path]:
    def write(documents: Sequence[Sequence[int]], dtype: str = "uint16", name: str = "corpus") -> Path:
        prefix = tmp_path / name
        with IndexedDatasetWriter(prefix, dtype=dtype) as writer:
            for document in documents:
                writer.append(np.array(document, dtype=np.int64))
        return prefix

    return write


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(SENTENCES, vocab_size=300, output=path)
    return path
