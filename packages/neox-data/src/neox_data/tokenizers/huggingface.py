"""Tokenizers of the `tokenizers` library.

`HFTokenizer` reads a `tokenizer.json`; `HFGPT2Tokenizer` takes a Hugging Face name or folder, and adds a
padding token.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import orjson
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from neox_data.errors import TokenizerError
from neox_data.tokenizers.base import Tokenizer, flattened
from neox_data.tokenizers.files import require_files

__all__ = [
    "END_OF_DOCUMENT",
    "PADDING",
    "HFGPT2Tokenizer",
    "HFTokenizer",
    "LibraryBackedTokenizer",
    "load_tokenizer_json",
]

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
# A text, to see what the library adds to it.
_PROBE = "ab"


class LibraryBackedTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library with its special tokens.

    Args:
        tokenizer: the library's object; its truncation and padding are disabled.
        source: file or name, for messages.
        end_of_document: text of the end-of-document token.

    Raises:
        TokenizerError: the vocabulary does not contain the end-of-document token.
    """

    def __init__(
        self, tokenizer: LibraryTokenizer, *, source: str, end_of_document: str = END_OF_DOCUMENT
    ) -> None:
        # A tokenizer.json used for inference may enable both, which would silently truncate documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.library_tokenizer = tokenizer
        self._source = source
        end = tokenizer.token_to_id(end_of_document)
        if end is None:
            raise TokenizerError(
                f"{source} has no end-of-document token {end_of_document!r}; "
                f"add it to the vocabulary or use another tokenizer"
            )
        self.end_of_document: int = end
        self.padding: int | None = tokenizer.token_to_id(PADDING)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of the token with this text; None if the vocabulary does not contain it."""
        found: int | None = self.library_tokenizer.token_to_id(token)
        return found

    def entry(self, number: int) -> str | None:
        """Entry of an id in the vocabulary; None if there is none."""
        found: str | None = self.library_tokenizer.id_to_token(number)
        return found

    @cached_property
    def ends_texts(self) -> bool:
        """Whether the library appends the end-of-document token to each text."""
        (inner,) = self._without_special([_PROBE])
        end = [self.end_of_document]
        return self.encode(_PROBE)[-1:] == end != inner[-1:]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the library marks as special, of both of our own, and unused ids."""
        marked = {token["id"] for token in self._parts["added_tokens"] if token["special"]}
        unused = set(range(self.vocab_size)) - set(self.library_tokenizer.get_vocab().values())
        ours = {self.end_of_document, self.padding}
        return frozenset(number for number in marked | unused | ours if number is not None)

    @cached_property
    def description(self) -> str:
        """The library's description of the tokenizer, as JSON."""
        return self.library_tokenizer.to_str()

    @property
    def added_texts(self) -> list[str]:
        """Texts of the tokens that were added to the vocabulary."""
        return [token["content"] for token in self._parts["added_tokens"]]

    @cached_property
    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = orjson.loads(self.description)
        return parts

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the library's description, without truncation and padding, which are not used."""
        parts = {name: value for name, value in self._parts.items() if name not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are recognized.

        Raises:
            TokenizerError: the library cannot encode the text (for example, half of a surrogate pair).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed in the library's threads.

        Raises:
            TokenizerError: the library cannot encode a text (for example, half of a surrogate pair).
        """
        return [encoding.ids for encoding in self._encodings(texts, adds_special=True)]

    def encode_parts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of parts of texts, and the number of ids of each, int64.

        Tokens that the library adds to the beginning or end of a text are left out; those in it are not.

        Raises:
            TokenizerError: the library cannot encode a part.
        """
        return flattened(self._without_special(texts))

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the ids of each text, with the range of characters (first, stop) that each id stands for.

        Tokens that the library adds to the beginning or end of a text are left out; those in it are not.

        Raises:
            TokenizerError: the library cannot encode a text.
        """
        return [(each.ids, each.offsets) for each in self._encodings(texts, adds_special=False, placed=True)]

    def is_added(self, text: str) -> list[bool]:
        """Return for each id of a text whether the library adds it to the text.

        Raises:
            TokenizerError: the library cannot encode the text.
        """
        (encoding,) = self._encodings([text], adds_special=True)
        return [bool(one) for one in encoding.special_tokens_mask]

    def added_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that the library adds to the beginning and to the end of a text that is not empty.

        Raises:
            TokenizerError: it does not only add ids to those of the text.
        """
        whole, (inner,) = self.encode(text), self._without_special([text])
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return whole[:begin], whole[begin + len(inner) :]
        raise TokenizerError(
            f"{self._source} encodes {text!r} differently with its special tokens ({whole}) and without "
            f"({inner}), so that parts of a text cannot be encoded separately; use another tokenizer"
        )

    def _without_special(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(texts, adds_special=False)]

    def _encodings(self, texts: Sequence[str], *, adds_special: bool, placed: bool = False) -> list[Encoding]:
        # The fast one leaves out where tokens are in the text.
        encode = self.library_tokenizer.encode_batch if placed else self.library_tokenizer.encode_batch_fast
        try:
            encodings: list[Encoding] = encode(list(texts), add_special_tokens=adds_special)
        except Exception as error:  # tokenizers raises Exception itself.
            raise TokenizerError(
                f"{self._source} cannot encode a text: {error}; repair or skip it", code="not-encodable"
            ) from error
        return encodings

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens; ids outside the vocabulary are skipped."""
        return self.library_tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> Sequence[bytes] | None:
        """Return the bytes of each id as gigatoken reads them; None if it does not support the tokenizer."""
        try:
            entries = gigatoken.Tokenizer.from_json(self.description).vocab
        except (RuntimeError, ValueError):
            return None
        return [entries.get(number, b"") for number in range(max(entries) + 1)]


class HFTokenizer(LibraryBackedTokenizer):
    """A `tokenizer.json` of the `tokenizers` library.

    Documents end with `<|endoftext|>`; if the vocabulary lacks it, with the `eos_token` of the
    `tokenizer_config.json` next to the file.

    Args:
        vocab_file: the `tokenizer.json`.
        merge_file: must be None: `tokenizer.json` contains the merges.

    Raises:
        TokenizerError: the file is missing or unreadable, merge_file is given, or a token is missing.
    """

    def __init__(self, vocab_file: Path | None, merge_file: Path | None = None) -> None:
        if merge_file is not None:
            raise TokenizerError(
                f"HFTokenizer reads its merges from tokenizer.json, but merge_file {merge_file} was given; "
                "remove merge_file"
            )
        (file,) = require_files("HFTokenizer", {"vocab_file": (vocab_file, "tokenizer.json")})
        tokenizer = load_tokenizer_json(file)
        end_of_document = END_OF_DOCUMENT
        if tokenizer.token_to_id(END_OF_DOCUMENT) is None:
            end_of_document = _folder_end_of_document(file.parent)
        super().__init__(tokenizer, source=str(file), end_of_document=end_of_document)


class HFGPT2Tokenizer(LibraryBackedTokenizer):
    """The tokenizer in a folder or on the Hugging Face hub, with `<|padding|>` added.

    Args:
        vocab_file: the folder or name; None: `gpt2`. A name is searched in the hub's cache, then on the hub.
        merge_file: must be None.

    Raises:
        TokenizerError: the tokenizer was not found, or a required token is missing.
    """

    def __init__(self, vocab_file: Path | None = None, merge_file: Path | None = None) -> None:
        if merge_file is not None:
            raise TokenizerError(
                f"HFGPT2Tokenizer uses no merge_file, but {merge_file} was given; remove merge_file"
            )
        end_of_document = END_OF_DOCUMENT
        if vocab_file is not None and vocab_file.exists():
            tokenizer = load_tokenizer_json(vocab_file / "tokenizer.json")
            end_of_document = _folder_end_of_document(vocab_file)
        else:
            name = str(vocab_file or "gpt2")
            try:
                tokenizer = LibraryTokenizer.from_pretrained(name)
            except Exception as error:  # tokenizers raises Exception itself.
                raise TokenizerError(
                    f"the tokenizer {name!r} is not a folder and was not found on the Hugging Face hub "
                    f"({error}); set vocab_file to a folder with its tokenizer.json"
                ) from error
        tokenizer.add_special_tokens([AddedToken(PADDING, special=True)])
        super().__init__(tokenizer, source=str(vocab_file or "gpt2"), end_of_document=end_of_document)


def load_tokenizer_json(path: Path) -> LibraryTokenizer:
    """Load the library's tokenizer from a file.

    Raises:
        TokenizerError: the file is missing or not valid.
    """
    require_files("HFTokenizer", {"vocab_file": (path, "tokenizer.json")})
    try:
        return LibraryTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself.
        raise TokenizerError(
            f"{path} is not a valid tokenizer.json of the tokenizers library: {error}; "
            f"train one with neox-data train-tokenizer, or copy it again",
            code="invalid-tokenizer",
        ) from error


def _folder_end_of_document(folder: Path) -> str:
    """Return the `eos_token` of the folder's tokenizer_config.json, or the default."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return END_OF_DOCUMENT
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token") or END_OF_DOCUMENT
    except (ValueError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a JSON object ({error}); copy it again") from error
    return str(token["content"] if isinstance(token, dict) else token)
