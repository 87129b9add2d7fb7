"""Tokenizers by name."""

from collections.abc import Callable
from pathlib import Path

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from neox_data.tokenizers.huggingface import HFGPT2Tokenizer, HFTokenizer
from neox_data.tokenizers.ranked_files import SentencePieceTokenizer, TiktokenTokenizer

__all__ = ["GPT_NEOX_NAMES", "TOKENIZERS", "Tokenizer", "build_tokenizer"]

TOKENIZERS: dict[str, Callable[[Path | None, Path | None], Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "HFTokenizer": HFTokenizer,
    "HFGPT2Tokenizer": HFGPT2Tokenizer,
    "CharLevelTokenizer": CharLevelTokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "TiktokenTokenizer": TiktokenTokenizer,
}
# Names that only GPT-NeoX uses.
GPT_NEOX_NAMES = {"SPMTokenizer": "SentencePieceTokenizer"}


def build_tokenizer(
    kind: str, *, vocab_file: Path | str | None = None, merge_file: Path | str | None = None
) -> Tokenizer:
    """Build a tokenizer of the given kind from its files.

    Args:
        kind: a key of `TOKENIZERS` or `GPT_NEOX_NAMES`.
        vocab_file: the vocabulary file, in the format of the kind.
        merge_file: the merges file, if the kind has one.

    Raises:
        TokenizerError: no such kind, or its files are missing or unreadable.
    """
    kind = GPT_NEOX_NAMES.get(kind, kind)
    if kind not in TOKENIZERS:
        raise TokenizerError(f"unknown tokenizer_type {kind!r}; use one of {', '.join(TOKENIZERS)}")
    paths = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    return TOKENIZERS[kind](*paths)
