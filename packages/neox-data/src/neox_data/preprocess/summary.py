"""The summary that a preprocessing run prints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox_data.amounts import bytes_in_words
from neox_data.counted import counted
from neox_data.preprocess.passed_over import PassedOver

__all__ = ["Summary"]

# The time of smaller inputs is that of the start.
_FEWEST_TIMED_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results of a run.

    Attributes:
        prefixes: the datasets, one per key.
        documents: documents read.
        tokens: tokens written, over all keys.
        num_bytes: bytes of (uncompressed) corpus.
        characters: characters of the texts, over all keys.
        empty: texts without tokens, which were skipped.
        skipped: documents that could not be read.
        first_skipped: reasons for the first few of these.
        null: documents with a null in place of a text.
        passed_over: files and members of archives that were not read.
        without_text: names of the files without any document that has tokens.
        too_long: documents above the maximum size.
        long_ones: how these were handled.
        encoder: the encoder, with the reason if it is the slower one.
        end_by_tokenizer: the end-of-document token if --append-eod left it to the tokenizer.
        seconds: duration of this run.
        resumed_shards: shards finished by an earlier run.
        labels: with a loss mask, the number of labels that the loss leaves out (`masked`), and of documents
            that have no others (`wholly_masked`).
        longest: with a loss mask, tokens of the longest document.
    """

    prefixes: tuple[Path, ...]
    documents: int
    tokens: int
    num_bytes: int
    characters: int
    empty: int
    skipped: int
    first_skipped: Sequence[str]
    null: int
    passed_over: PassedOver
    without_text: Sequence[str]
    too_long: int
    long_ones: str
    encoder: str
    seconds: float
    end_by_tokenizer: str | None = None
    resumed_shards: int = 0
    labels: Mapping[str, int] | None = None
    longest: int = 0

    def lines(self) -> Iterable[str]:
        """Yield the lines of the summary."""
        # With a loss mask, tokens and labels are counted together, as two datasets.
        datasets = 1 if self.labels is None else 2
        tokens, empty = self.tokens // datasets, self.empty // datasets
        speed = f" ({self.num_bytes / self.seconds / 1e6:,.1f} MB/s)"
        yield (
            f"{counted(self.documents, 'document')}, {bytes_in_words(self.num_bytes)} -> {tokens:,} tokens "
            f"({self.characters / max(self.tokens, 1):.2f} characters per token) in {self.seconds:.1f} s"
            f"{speed if self.num_bytes >= _FEWEST_TIMED_BYTES else ''}"
        )
        yield f"encoded by {self.encoder}"
        if self.end_by_tokenizer is not None:
            yield (
                f"the tokenizer itself ends each document with {self.end_by_tokenizer!r}; --append-eod added "
                "no second one"
            )
        if self.labels is not None:
            without = self.labels["wholly_masked"]
            have = counted(without, "document has", "documents have")
            yield (
                f"{tokens - self.labels['masked']:,} of {tokens:,} tokens count in the loss; "
                f"{f'{have} no token that counts; ' if without else ''}"
                f"the longest document has {self.longest:,} tokens"
            )
        if self.resumed_shards:
            yield f"{counted(self.resumed_shards, 'shard was', 'shards were')} finished by an earlier run"
        if empty:
            yield counted(
                empty, "document without tokens was skipped", "documents without tokens were skipped"
            )
        if self.null:
            having = counted(self.null, "document has", "documents have")
            yield f"{having} a null text, which is read as an empty one"
        if self.skipped:
            such_as = ", such as" if self.first_skipped else ""
            what = ("unreadable document was", "unreadable documents were")
            yield f"{counted(self.skipped, *what)} skipped{such_as}"
            yield from (f"  {reason}" for reason in self.first_skipped)
        if self.too_long:
            above = "above --max-document-bytes"
            what = (f"document {above} was", f"documents {above} were")
            yield f"{counted(self.too_long, *what)} {self.long_ones}"
        yield from self.passed_over.lines()
        if self.without_text:
            files = counted(len(self.without_text), "file contains", "files contain")
            yield f"{files} no text, such as {self.without_text[0]}"
        for prefix in self.prefixes:
            yield f"wrote {prefix}.bin and {prefix}.idx, described in {prefix}.manifest.json"
