"""Options of preprocessing, and what follows from them alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox_data.errors import CorpusError
from neox_data.pluralize import first_few, pluralize
from neox_data.preprocess.loss_mask import LossMask
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES, Remedies

__all__ = ["Options", "no_text_in", "output_prefix_of"]

# Number of files to name in an error message about all files.
_MOST_NAMED = 3


def output_prefix_of(output_prefix: Path | str, key: str) -> Path:
    """Return the prefix of the dataset with the texts of a key."""
    return Path(f"{output_prefix}_{key}_document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the conversion of a corpus to datasets.

    Attributes:
        keys: keys of the JSON lines; each becomes a dataset.
        append_end: append the end-of-document token to each document.
        workers: number of batches encoded in parallel; the output does not depend on it.
        num_documents: number of documents, for the progress; None: estimate progress by bytes.
        skip_bad_lines: skip and count documents that cannot be read.
        exact: encode with the tokenizers library even if gigatoken gives the same ids.
        max_document_bytes: maximum document size; larger documents are skipped and counted.
        split_long: split larger documents instead of skipping them.
        mend_text: repair wrongly decoded characters with ftfy.
        may_be_empty: allow a corpus without text.
        loss_mask: write tokens and labels of these documents, instead of a dataset per key.
    """

    keys: tuple[str, ...] = ("text",)
    append_end: bool = False
    workers: int = 1
    num_documents: int | None = None
    skip_bad_lines: bool = False
    exact: bool = False
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    split_long: bool = False
    mend_text: bool = False
    may_be_empty: bool = False
    loss_mask: LossMask | None = None

    @property
    def key_options(self) -> str:
        """Return the options of preprocess_data with which other keys are read, in words."""
        return "--jsonl-keys" if self.loss_mask is None else self.loss_mask.key_options

    @property
    def remedies(self) -> Remedies:
        """Return what errors of reading ask the user to do."""
        return Remedies.with_options(self.key_options)

    def described(self, key: str) -> dict[str, Any]:
        """Return the options to record in a manifest: all that affect the contents of a dataset."""
        return {
            **({} if self.loss_mask is None else {"loss_mask": self.loss_mask.described}),
            "key": key,
            "append_eod": self.append_end,
            "max_document_bytes": self.max_document_bytes,
            "split_long_documents": self.split_long,
            "ftfy": self.mend_text,
            "skip_bad_lines": self.skip_bad_lines,
        }


def no_text_in(
    names: Sequence[str],
    key: str,
    options: Options,
    passed_over: PassedOver,
    first_skipped: Sequence[str],
) -> CorpusError:
    """Return the error for a corpus whose documents yield no tokens.

    Args:
        names: its files.
        key: of the dataset without tokens.
        options: of the conversion.
        passed_over: files and members that were not read.
        first_skipped: why the first documents that could not be read were skipped.
    """
    keys = [key] if options.loss_mask is None else options.loss_mask.read_keys
    left = pluralize(passed_over.count, "file or member was", "files or members were")
    unread = f" ({left} not read, such as {passed_over.first[0]})" if passed_over.first else ""
    skipped = f"; documents were skipped, such as {first_skipped[0]}" if first_skipped else ""
    return CorpusError(
        f"no document of {first_few(names, _MOST_NAMED)} has text under {' and '.join(map(repr, keys))}"
        f"{unread}{skipped}; pass the right key with {options.key_options}, or another corpus"
    )
