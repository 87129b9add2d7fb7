"""GPT-2's byte-level BPE from its two original files, `vocab.json` and `merges.txt`.

`<|endoftext|>` in a text is encoded as its id, as in GPT-NeoX; until 2023 GPT-NeoX split it like other text.
"""

from pathlib import Path

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from neox_data.errors import TokenizerError
from neox_data.tokenizers.files import require_files
from neox_data.tokenizers.huggingface import END_OF_DOCUMENT, LibraryBackedTokenizer

__all__ = ["GPT2BPETokenizer"]


class GPT2BPETokenizer(LibraryBackedTokenizer):
    """Byte-level BPE; documents end with `<|endoftext|>`, which must be in the vocabulary.

    Args:
        vocab_file: `vocab.json`, token to id.
        merge_file: `merges.txt`, one merge per line, best first.

    Raises:
        TokenizerError: a file is missing or unreadable, or the vocabulary lacks `<|endoftext|>`.
    """

    def __init__(self, vocab_file: Path | None, merge_file: Path | None) -> None:
        vocabulary, merges = require_files(
            "GPT2BPETokenizer",
            {"vocab_file": (vocab_file, "vocab.json"), "merge_file": (merge_file, "merges.txt")},
        )
        try:
            tokenizer = LibraryTokenizer(BPE.from_file(str(vocabulary), str(merges)))
        except Exception as error:  # tokenizers raises Exception itself.
            raise TokenizerError(
                f"{vocabulary} and {merges} are not GPT-2's vocabulary and merges: {error}; copy them again"
            ) from error
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        # Check before marking the token as special, which would silently add a missing token.
        if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
            tokenizer.add_special_tokens([END_OF_DOCUMENT])
        super().__init__(tokenizer, source=str(vocab_file))
