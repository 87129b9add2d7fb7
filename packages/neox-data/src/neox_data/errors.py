"""Exceptions of the data package; each message names the file and the remedy in one sentence."""

__all__ = ["CorpusError", "DataError", "IndexedDatasetError", "OtherResultError", "TokenizerError"]


class DataError(Exception):
    """Base class of errors in a request or its data; commands exit with code 2."""

    exit_code = 2


class IndexedDatasetError(DataError):
    """Raised when a `.bin`/`.idx` pair is missing, damaged or of an unsupported format."""


class TokenizerError(DataError):
    """Raised when a tokenizer cannot be loaded from its files, or cannot encode a text."""


class CorpusError(DataError):
    """Raised when a corpus file, or one line of it, cannot be read as text."""


class OtherResultError(DataError):
    """Raised when a folder contains the result of other texts or options; commands exit with code 3."""

    exit_code = 3
