"""What can go wrong with data, each as one sentence that names the file and the remedy."""

__all__ = ["CorpusError", "DataError", "IndexedDatasetError", "TokenizerError"]


class DataError(Exception):
    """Base of every error that a caller of neox-data can cause; a command ends with exit code 2 after it."""

    exit_code = 2


class IndexedDatasetError(DataError):
    """A `.bin`/`.idx` pair is missing, damaged, or of a kind that cannot be read."""


class TokenizerError(DataError):
    """A tokenizer cannot be made from these files, or cannot handle this input."""


class CorpusError(DataError):
    """A corpus file, or one line of it, cannot be read as text."""
