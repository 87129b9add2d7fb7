"""Exceptions of the data package; each message names the file and the remedy in one sentence."""

import re

__all__ = ["CorpusError", "DataError", "IndexedDatasetError", "OtherResultError", "TokenizerError"]


class DataError(Exception):
    """Base class of errors in a request or its data; commands exit with code 2.

    Args:
        args: the message.
        code: which check failed; by default the name of the class, such as `corpus` of `CorpusError`.
    """

    exit_code = 2

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        name = type(self).__name__.removesuffix("Error")
        self.code = code or re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


class IndexedDatasetError(DataError):
    """Raised when a `.bin`/`.idx` pair is missing, damaged or of an unsupported format."""


class TokenizerError(DataError):
    """Raised when a tokenizer cannot be loaded from its files, or cannot encode a text."""


class CorpusError(DataError):
    """Raised when a corpus file, or one line of it, cannot be read as text."""


class OtherResultError(DataError):
    """Raised when a folder contains the result of other texts or options; commands exit with code 3."""

    exit_code = 3
