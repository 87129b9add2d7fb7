"""Tokenizers that the `tokenizers` library runs, whatever files they come from.

`HFTokenizer` is one `tokenizer.json`; `HFGPT2Tokenizer` is a tokenizer by the name or folder that Hugging
Face gives it, with a padding token added.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import gigatoken
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer

__all__ = ["END_OF_DOCUMENT", "PADDING", "HFGPT2Tokenizer", "HFTokenizer", "LibraryBackedTokenizer"]

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"


class LibraryBackedTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, with the meaning of its special tokens.

    Args:
        tokenizer: the library's object; truncation and padding that it may carry are switched off.
        source: where it comes from, for messages.
        end_of_document: the text of the token that ends a document.

    Raises:
        TokenizerError: the vocabulary has no such token.
    """

    def __init__(
        self, tokenizer: LibraryTokenizer, *, source: str, end_of_document: str = END_OF_DOCUMENT
    ) -> None:
        # A tokenizer.json may carry both from its days in inference; documents would be cut without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.library_tokenizer = tokenizer
        self._source = source
        end = tokenizer.token_to_id(end_of_document)
        if end is None:
            raise TokenizerError(
                f"{source} has no token {end_of_document!r}, which ends a document; "
                f"add it to the vocabulary or use another tokenizer"
            )
        self._end_of_document: int = end
        self._padding: int | None = tokenizer.token_to_id(PADDING)
        self._vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added ones included."""
        return self._vocab_size

    @property
    def end_of_document(self) -> int:
        """The id of the token that ends a document."""
        return self._end_of_document

    @property
    def padding(self) -> int | None:
        """The id of `<|padding|>`; None where the vocabulary has none."""
        return self._padding

    @property
    def fingerprint(self) -> str:
        """A hash of the library's own description, but for truncation and padding, which are not used."""
        description = json.loads(self.library_tokenizer.to_str())
        parts = {name: value for name, value in description.items() if name not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens written in it are recognised.

        Raises:
            TokenizerError: the library cannot encode it (half of a surrogate pair, say).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, worked out in the library's threads.

        Raises:
            TokenizerError: the library cannot encode one of them (half of a surrogate pair, say).
        """
        try:
            encodings: list[Encoding] = self.library_tokenizer.encode_batch_fast(list(texts))
        except Exception as error:  # The library raises nothing more specific.
            raise TokenizerError(
                f"{self._source} cannot encode a text: {error}; repair or skip it"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special ones included; ids outside of the vocabulary give nothing."""
        return self.library_tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> Sequence[bytes] | None:
        """The bytes of each id as gigatoken reads them; None where it does not know such a tokenizer."""
        try:
            entries = gigatoken.Tokenizer.from_json(self.library_tokenizer.to_str()).vocab
        except (RuntimeError, ValueError):
            return None
        return [entries.get(number, b"") for number in range(max(entries) + 1)]


class HFTokenizer(LibraryBackedTokenizer):
    """A `tokenizer.json` of the `tokenizers` library; documents end with `<|endoftext|>`.

    Args:
        vocab_file: the `tokenizer.json`.
        merge_file: must be None: merges are inside.

    Raises:
        TokenizerError: a file is missing, unreadable or too many, or a needed token is not in it.
    """

    def __init__(self, vocab_file: Path | None, merge_file: Path | None = None) -> None:
        if merge_file is not None:
            raise TokenizerError(
                f"HFTokenizer finds its merges in tokenizer.json, and merge_file {merge_file} was given; "
                "leave it out"
            )
        if vocab_file is None:
            raise TokenizerError("HFTokenizer needs vocab_file: the path of a tokenizer.json; set it")
        super().__init__(_load_tokenizer_json(vocab_file), source=str(vocab_file))


class HFGPT2Tokenizer(LibraryBackedTokenizer):
    """The tokenizer of a folder, or of a name on the Hugging Face hub, plus an added `<|padding|>`.

    Args:
        vocab_file: the folder or name; None: `gpt2`. A name is looked up in the hub's cache, then on the
            network.
        merge_file: must be None.

    Raises:
        TokenizerError: there is no such tokenizer, or a needed token is not in it.
    """

    def __init__(self, vocab_file: Path | None = None, merge_file: Path | None = None) -> None:
        if merge_file is not None:
            raise TokenizerError(
                f"HFGPT2Tokenizer takes a folder or name alone, and merge_file {merge_file} was given; leave "
                "it out"
            )
        end_of_document = END_OF_DOCUMENT
        if vocab_file is not None and vocab_file.is_dir():
            tokenizer = _load_tokenizer_json(vocab_file / "tokenizer.json")
            end_of_document = _folder_end_of_document(vocab_file)
        else:
            tokenizer = _load_from_hub(str(vocab_file or "gpt2"))
        tokenizer.add_special_tokens([AddedToken(PADDING, special=True)])
        super().__init__(tokenizer, source=str(vocab_file or "gpt2"), end_of_document=end_of_document)


def _load_tokenizer_json(path: Path) -> LibraryTokenizer:
    if not path.is_file():
        raise TokenizerError(f"vocab_file {path} does not exist; give the path of a tokenizer.json")
    try:
        return LibraryTokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more specific.
        raise TokenizerError(
            f"{path} is not a tokenizer.json that the tokenizers library reads: {error}; "
            f"make it with neox-data train-tokenizer or copy it again"
        ) from error


def _load_from_hub(name: str) -> LibraryTokenizer:
    try:
        return LibraryTokenizer.from_pretrained(name)
    except Exception as error:  # The library raises nothing more specific.
        raise TokenizerError(
            f"the tokenizer {name!r} is no folder here and was not found on the Hugging Face hub ({error}); "
            f"give a folder that holds its tokenizer.json"
        ) from error


def _folder_end_of_document(folder: Path) -> str:
    """The `eos_token` that the folder's tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return END_OF_DOCUMENT
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token") or END_OF_DOCUMENT
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{path} is not a JSON object ({error}); copy it again") from error
    return str(token["content"] if isinstance(token, dict) else token)
