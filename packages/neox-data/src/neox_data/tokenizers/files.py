"""Check that the files of a tokenizer are given and exist; messages name them as parameters."""

from collections.abc import Mapping
from pathlib import Path

from neox_data.errors import TokenizerError

__all__ = ["require_files"]


def require_files(kind: str, given: Mapping[str, tuple[Path | None, str]]) -> list[Path]:
    """Return the files of a tokenizer.

    Args:
        kind: the tokenizer.
        given: parameter -> the file that it names, and the name that such a file usually has.

    Raises:
        TokenizerError: names all that are not given, are folders or do not exist.
    """
    found, problems = [], []
    for name, (path, usual) in given.items():
        if path is not None and path.is_file():
            found.append(path)
        else:
            wrong = "is not given" if path is None else f"{path} is not a file"
            problems.append(f"{name} {wrong}; give the path of {usual}")
    if problems:
        raise TokenizerError(f"{kind}: {', and '.join(problems)}", code="missing-file")
    return found
