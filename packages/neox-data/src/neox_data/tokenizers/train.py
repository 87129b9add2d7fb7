"""Train a byte-level BPE vocabulary on a corpus."""

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import current_thread, main_thread

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from neox_data.errors import TokenizerError
from neox_data.tokenizers.huggingface import END_OF_DOCUMENT, PADDING
from neox_data.whole_files import written_aside

__all__ = ["FEWEST_ENTRIES", "MOST_ENTRIES", "ended_by_ctrl_c", "train_byte_level_bpe"]

_SPECIAL = [END_OF_DOCUMENT, PADDING]

FEWEST_ENTRIES = 256 + len(_SPECIAL)
"""Size of the smallest vocabulary: all bytes, and the tokens for the ends of documents and for padding."""
MOST_ENTRIES = 2**24
"""Size of the largest one: the library reserves memory for all entries."""


def train_byte_level_bpe(
    texts: Iterable[str], *, vocab_size: int, output: Path, special: Sequence[str] = ()
) -> int:
    """Train and write a `tokenizer.json` for HFTokenizer; return its vocabulary size.

    Any text can be encoded and is decoded unchanged: all 256 bytes are in the vocabulary, and texts are not
    normalized.

    Args:
        texts: the corpus.
        vocab_size: requested size, including the special tokens; a small corpus may yield fewer.
        output: the file, written atomically.
        special: special tokens in addition to those of the ends of documents and of padding.

    Raises:
        TokenizerError: `vocab_size` is too small for the bytes and the special tokens, or no text has a
            character.
    """
    alphabet = ByteLevel.alphabet()
    special = list(dict.fromkeys((*_SPECIAL, *special)))
    least = len(alphabet) + len(special)
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small for {len(alphabet)} bytes and {len(special)} special "
            "tokens; "
            f"use at least {least}"
        )
    texts = filter(None, texts)
    first = next(texts, None)
    if first is None:
        raise TokenizerError("the corpus has no text to train a tokenizer on; give files with texts")
    tokenizer = LibraryTokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    with ended_by_ctrl_c():
        tokenizer.train_from_iterator(chain((first,), texts), trainer)
    output.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(output) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    return int(tokenizer.get_vocab_size())


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process immediately, during a library call that does not handle it.

    No cleanup runs, so the block must write files atomically.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
