"""The summary that a preprocessing run prints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox_data.amounts import bytes_in_words
from neox_data.indexed.index import read_index
from neox_data.pluralize import pluralize
from neox_data.preprocess.options import Options
from neox_data.preprocess.passed_over import PassedOver
from neox_data.tokenizers.base import Tokenizer

__all__ = ["Summary", "end_by_tokenizer"]

# The time of smaller inputs is that of the start.
_FEWEST_TIMED_BYTES = 1_000_000


def end_by_tokenizer(tokenizer: Tokenizer, options: Options) -> str | None:
    """Return the token that is not appended, because the tokenizer appends it itself; None otherwise.

    With a loss mask, texts are encoded without the tokens that the tokenizer adds to them.
    """
    is_doubled = options.append_end and options.loss_mask is None and tokenizer.ends_texts
    return tokenizer.decode([tokenizer.end_of_document]) if is_doubled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The results of a run.

    Attributes:
        prefixes: the datasets, one per key.
        options: of the run.
        tokenizer: with which the datasets were made.
        encoder: the encoder, with the reason if it is the slower one.
        counts: those in the manifest of each dataset.
        first_skipped: why the first few documents that could not be read were skipped.
        passed_over: files and members of archives that were not read.
        without_text: names of the files without any document that has tokens.
        seconds: duration of this run.
        resumed_shards: shards finished by an earlier run.
    """

    prefixes: tuple[Path, ...]
    options: Options
    tokenizer: Tokenizer
    encoder: str
    counts: Sequence[Mapping[str, int]]
    first_skipped: Sequence[str]
    passed_over: PassedOver
    without_text: Sequence[str]
    seconds: float
    resumed_shards: int = 0

    @property
    def documents(self) -> int:
        """Return the number of documents that were read."""
        return self.counts[0]["documents"] + self.counts[0]["empty"]

    def lines(self) -> Iterable[str]:
        """Yield the lines of the summary."""
        mask, first = self.options.loss_mask, self.counts[0]
        # Tokens and labels are of the same documents.
        tokens, characters, empty = (
            sum(each[name] for each in (self.counts if mask is None else self.counts[:1]))
            for name in ("tokens", "characters", "empty")
        )
        num_bytes, seconds = first["bytes"], max(self.seconds, 1e-9)
        speed = f" ({num_bytes / seconds / 1e6:,.1f} MB/s)" if num_bytes >= _FEWEST_TIMED_BYTES else ""
        yield (
            f"{pluralize(self.documents, 'document')}, {bytes_in_words(num_bytes)} -> {tokens:,} tokens "
            f"({characters / max(tokens, 1):.2f} characters per token) in {seconds:.1f} s{speed}"
        )
        yield f"encoded by {self.encoder}"
        if end := end_by_tokenizer(self.tokenizer, self.options):
            yield f"the tokenizer itself ends each document with {end!r}; --append-eod added no second one"
        if mask is not None:
            without = self.counts[1]["wholly_masked"]
            have = pluralize(without, "document has", "documents have")
            yield (
                f"{tokens - self.counts[1]['masked']:,} of {tokens:,} tokens count in the loss; "
                f"{f'{have} no token that counts; ' if without else ''}"
                f"the longest document has {read_index(self.prefixes[0]).sizes.max(initial=0):,} tokens"
            )
        earlier, large = "finished by an earlier run", "above --max-document-bytes"
        done = "split" if self.options.split_long else "skipped"
        skipped = "skipped, such as" if self.first_skipped else "skipped"
        null = "a null text, which is read as an empty one"
        for number, one, many in (
            (self.resumed_shards, f"shard was {earlier}", f"shards were {earlier}"),
            (empty, "document without tokens was skipped", "documents without tokens were skipped"),
            (first["null"], f"document has {null}", f"documents have {null}"),
            (first["too_long"], f"document {large} was {done}", f"documents {large} were {done}"),
            (first["skipped"], f"unreadable document was {skipped}", f"unreadable documents were {skipped}"),
        ):
            if number:
                yield pluralize(number, one, many)
        yield from (f"  {reason}" for reason in self.first_skipped)
        yield from self.passed_over.lines()
        if self.without_text:
            files = pluralize(len(self.without_text), "file contains", "files contain")
            yield f"{files} no text, such as {self.without_text[0]}"
        for prefix in self.prefixes:
            yield f"wrote {prefix}.bin and {prefix}.idx, described in {prefix}.manifest.json"
