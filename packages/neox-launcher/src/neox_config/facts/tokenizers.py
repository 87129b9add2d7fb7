"""Tokenizers by name: their files and vocabulary sizes. neox_data.tokenizers implements them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from neox_config.files import why_not_readable

__all__ = ["TOKENIZER_FACTS", "TokenizerFacts", "TokenizerName"]

TokenizerName = Literal[
    "GPT2BPETokenizer",
    "HFTokenizer",
    "HFGPT2Tokenizer",
    "CharLevelTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
]


def _has_model(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("model"), dict)


def _has_ids_alone(content: Any) -> bool:
    return isinstance(content, dict) and bool(content) and all(isinstance(i, int) for i in content.values())


def _entries_of_vocab_json(content: Any) -> int:
    """Return the number of entries.

    Raises:
        ValueError: the content is that of a tokenizer.json.
    """
    if _has_model(content):
        raise ValueError("it is a tokenizer.json, which HFTokenizer reads")
    return len(content)


def _entries_of_tokenizer_json(content: Any) -> int:
    """Return the number of entries, including added tokens.

    Raises:
        ValueError: the content is that of a vocab.json.
    """
    if _has_ids_alone(content):
        raise ValueError("it is a vocab.json, which GPT2BPETokenizer reads with a merges.txt as merge-file")
    added = {entry["content"] for entry in content.get("added_tokens", [])}
    entries = content["model"]["vocab"]
    return len(added | {entry if isinstance(entry, str) else entry[0] for entry in entries})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """One tokenizer.

    Args:
        usual_entries: entries of the most common vocabulary.
        files: parameter -> example of the file that it must name.
        optional: parameters of files that it reads if they are given.
        doc: what its files are, for the reference.
        is_fixed: True if it always has this many entries.
        entries_of: number of entries by the content of `vocab_file`, which is JSON; None if it cannot be read
            without the tokenizer.
    """

    usual_entries: int
    doc: str
    is_fixed: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    entries_of: Callable[[Any], int] | None = None

    def reads(self, name: str) -> bool:
        """Return whether it reads the file that a parameter names."""
        return name in self.files or name in self.optional

    def read_entries(self, vocab_file: str | None) -> int | None:
        """Return the number of entries; None if it is not known, or the file does not exist.

        Raises:
            ValueError: the file exists, but is not a valid vocabulary.
        """
        if self.is_fixed:
            return self.usual_entries
        if self.entries_of is None or vocab_file is None or why_not_readable(vocab_file) is not None:
            return None
        try:
            entries = self.entries_of(json.loads(Path(vocab_file).read_bytes()))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if entries == 0:
            raise ValueError("it has no entries")
        return entries


TOKENIZER_FACTS: Mapping[str, TokenizerFacts] = {
    "GPT2BPETokenizer": TokenizerFacts(
        usual_entries=50_257,
        doc="vocab.json and merges.txt",
        files={"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        entries_of=_entries_of_vocab_json,
    ),
    "HFTokenizer": TokenizerFacts(
        usual_entries=50_277,
        doc="tokenizer.json",
        files={"vocab_file": "tokenizer.json"},
        entries_of=_entries_of_tokenizer_json,
    ),
    "HFGPT2Tokenizer": TokenizerFacts(
        usual_entries=50_258,
        doc="a folder with a tokenizer.json, or a name of the Hugging Face hub",
        optional=("vocab_file",),
    ),
    "CharLevelTokenizer": TokenizerFacts(
        usual_entries=512, doc="no file, each byte is a token", is_fixed=True
    ),
    "SentencePieceTokenizer": TokenizerFacts(
        usual_entries=32_000, doc="a .model file", files={"vocab_file": "tokenizer.model"}
    ),
    "TiktokenTokenizer": TokenizerFacts(
        usual_entries=100_277, doc="a .tiktoken file", files={"vocab_file": "cl100k_base.tiktoken"}
    ),
}
