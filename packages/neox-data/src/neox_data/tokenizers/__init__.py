"""Tokenizers by name; each is made from the files that its name implies."""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer
from neox_data.tokenizers.char_level import CharLevelTokenizer
from neox_data.tokenizers.gpt2_bpe import GPT2BPETokenizer
from neox_data.tokenizers.huggingface import HFGPT2Tokenizer, HFTokenizer
from neox_data.tokenizers.ranked_files import SentencePieceTokenizer, TiktokenTokenizer

__all__ = ["TOKENIZERS", "Tokenizer", "build_tokenizer"]

TOKENIZERS: dict[str, Callable[[Path | None, Path | None], Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "HFTokenizer": HFTokenizer,
    "HFGPT2Tokenizer": HFGPT2Tokenizer,
    "CharLevelTokenizer": CharLevelTokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "TiktokenTokenizer": TiktokenTokenizer,
}


def build_tokenizer(
    kind: str, *, vocab_file: Path | str | None = None, merge_file: Path | str | None = None
) -> Tokenizer:
    """The tokenizer of a kind, from its files.

    Args:
        kind: a key of `TOKENIZERS`.
        vocab_file: the vocabulary; what it is depends on the kind.
        merge_file: the merges, where the kind keeps them apart.

    Raises:
        TokenizerError: no such kind, or its files are missing or unreadable.
    """
    if kind not in TOKENIZERS:
        close = get_close_matches(kind, TOKENIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise TokenizerError(
            f"tokenizer_type {kind!r} is not known; {hint}use one of {', '.join(TOKENIZERS)}"
        )
    paths = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    return TOKENIZERS[kind](*paths)
