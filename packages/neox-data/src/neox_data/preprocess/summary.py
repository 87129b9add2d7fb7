"""What a preprocessing run did, for a reader."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did.

    Attributes:
        prefixes: the datasets, one per key.
        documents: documents read.
        tokens: tokens written, all keys together.
        num_bytes: bytes of (unpacked) corpus.
        characters: of the texts, all keys together.
        empty: texts that gave no token and were left out.
        skipped: documents that could not be read.
        first_skipped: why the first few of them could not.
        too_long: documents above the size allowed.
        long_ones: what was done with them.
        encoder: what made the tokens, and why where that is the slower way.
        seconds: how long it took, in this run.
        resumed_shards: shards that an earlier run had finished.
    """

    prefixes: tuple[Path, ...]
    documents: int
    tokens: int
    num_bytes: int
    characters: int
    empty: int
    skipped: int
    first_skipped: Sequence[str]
    too_long: int
    long_ones: str
    encoder: str
    seconds: float
    resumed_shards: int = 0

    def lines(self) -> Iterable[str]:
        """The summary for a reader."""
        yield (
            f"{self.documents:,} documents, {self.num_bytes / 1e6:,.1f} MB -> {self.tokens:,} tokens "
            f"({self.characters / max(self.tokens, 1):.2f} characters per token) in {self.seconds:.1f} s "
            f"({self.num_bytes / self.seconds / 1e6:,.1f} MB/s)"
        )
        yield f"encoded by {self.encoder}"
        if self.resumed_shards:
            yield f"{self.resumed_shards:,} shards were finished by an earlier run"
        if self.empty:
            yield f"{self.empty:,} documents without any token were left out"
        if self.skipped:
            such_as = ", such as" if self.first_skipped else ""
            yield f"{self.skipped:,} unreadable documents were skipped{such_as}"
            yield from (f"  {reason}" for reason in self.first_skipped)
        if self.too_long:
            yield f"{self.too_long:,} documents above --max-document-bytes were {self.long_ones}"
        for prefix in self.prefixes:
            yield f"wrote {prefix}.bin and {prefix}.idx, and what they are made of in {prefix}.manifest.json"
