import json
from pathlib import Path

from neox_data.errors import TokenizerError
from neox_data.tokenizers.train import train_byte_level_bpe
from support.refusals import refused


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    texts = ["the cat and the hat and the bat " * 4, "def f(x):\n    return x\n"]
    for name in "ab":
        assert train_byte_level_bpe(texts, vocab_size=270, output=tmp_path / name) == 270
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    vocabulary = json.loads((tmp_path / "a").read_text())["model"]["vocab"]
    assert (vocabulary["<|endoftext|>"], vocabulary["<|padding|>"]) == (0, 1)
    assert "he" in vocabulary


def test_a_vocabulary_that_does_not_hold_the_bytes_is_refused(tmp_path: Path) -> None:
    with refused(TokenizerError, "256 bytes", "2 special", "least 258"):
        train_byte_level_bpe(["a"], vocab_size=257, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
