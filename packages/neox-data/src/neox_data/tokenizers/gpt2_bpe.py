"""GPT-2's byte-level BPE from its two original files, `vocab.json` and `merges.txt`.

`<|endoftext|>` in a text is encoded as its id, as in GPT-NeoX; until 2023 GPT-NeoX split it like other text.
"""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from neox_data.errors import TokenizerError
from neox_data.tokenizers.huggingface import END_OF_DOCUMENT, LibraryBackedTokenizer, is_tokenizer_json

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
        _check_files({"--vocab-file": vocab_file, "--merge-file": merge_file})
        try:
            tokenizer = LibraryTokenizer(BPE.from_file(str(vocab_file), str(merge_file)))
        except Exception as error:  # tokenizers raises Exception itself.
            is_other = vocab_file is not None and is_tokenizer_json(vocab_file)
            remedy = f"use HFTokenizer for {vocab_file}" if is_other else "copy them again"
            raise TokenizerError(
                f"{vocab_file} and {merge_file} are not GPT-2's vocabulary and merges: {error}; {remedy}"
            ) from error
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        # Check before marking the token as special, which would silently add a missing token.
        if tokenizer.token_to_id(END_OF_DOCUMENT) is not None:
            tokenizer.add_special_tokens([END_OF_DOCUMENT])
        super().__init__(tokenizer, source=str(vocab_file))


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Check that both files are given and exist.

    Raises:
        TokenizerError: names all that are missing.
    """
    absent = [name for name, path in files.items() if path is None]
    lost = [f"{name} {path}" for name, path in files.items() if path is not None and not path.is_file()]
    problems = [f"requires {' and '.join(absent)}"] if absent else []
    problems += [f"cannot find {' and '.join(lost)}"] if lost else []
    if not problems:
        return
    vocabulary = files["--vocab-file"]
    remedy = "give vocab.json and merges.txt"
    if vocabulary is not None and vocabulary.is_file() and is_tokenizer_json(vocabulary):
        remedy = f"{vocabulary} is a tokenizer of HFTokenizer: use that --tokenizer-type"
    raise TokenizerError(f"GPT2BPETokenizer {' and '.join(problems)}; {remedy}")
