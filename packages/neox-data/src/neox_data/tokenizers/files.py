"""Check that the files of a tokenizer are given and exist; messages name them as parameters."""

from collections.abc import Mapping
from pathlib import Path

from neox_data.errors import TokenizerError

__all__ = ["require_files"]

_TRAIN = "train one with neox-data train-tokenizer"


def require_files(kind: str, given: Mapping[str, tuple[Path | None, str]]) -> list[Path]:
    """Return the files of a tokenizer.

    Args:
        kind: the tokenizer.
        given: parameter -> the file that it names, and the name that such a file usually has.

    Raises:
        TokenizerError: names all that are not given, are folders or do not exist.
    """
    absent = [name for name, (path, _) in given.items() if path is None]
    problems = [f"{kind} requires {' and '.join(absent)}"] if absent else []
    found, remedies, can_train = [], [], False
    for name, (path, usual) in given.items():
        if path is not None and path.is_file():
            found.append(path)
            continue
        inside = None if path is None else path / usual
        if path is not None:
            problems.append(f"{name} {path} {'is a folder' if path.is_dir() else 'does not exist'}")
        if inside is not None and inside.is_file():
            remedies.append(f"give {inside}")
        else:
            remedies.append(f"give the path of {usual}")
            can_train = can_train or name == "vocab_file"
    if problems:
        hint = f", or {_TRAIN}{'' if kind == 'HFTokenizer' else ' for HFTokenizer'}" if can_train else ""
        raise TokenizerError(f"{', '.join(problems)}; {' and '.join(remedies)}{hint}")
    return found
