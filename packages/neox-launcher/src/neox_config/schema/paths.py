"""Paths in a configuration: the type of their parameters, and `~` and variables in them.

They are expanded when a file is read, on the host that reads it: all later steps, other hosts and records
have the expanded path.
"""

import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic.fields import FieldInfo

from neox_config.facts.stores import is_url

__all__ = ["PathError", "PathText", "expand_path", "expand_paths", "is_path", "written_paths"]


@dataclass(frozen=True, slots=True)
class _Path:
    """Mark of the type of a path."""


PathText = Annotated[str, _Path()]
"""Text that is the path of a file, a folder or the beginning of such names; some may also be URLs."""

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\}|)")


class PathError(ValueError):
    """Raised when a path cannot be expanded.

    Args:
        what: what is wrong, as the continuation of a sentence.
        remedy: what to do.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


def is_path(declared: FieldInfo) -> bool:
    """Return whether a parameter is a path, or a list of paths."""
    return any(map(_has_mark, (*declared.metadata, declared.annotation)))


def _has_mark(part: Any) -> bool:
    return isinstance(part, _Path) or any(map(_has_mark, get_args(part)))


def expand_paths(value: Any) -> Any:
    """Return a value as given for a path or a list of paths, with expanded texts.

    Raises:
        PathError: see `expand_path`.
    """
    if isinstance(value, list):
        return [expand_paths(each) for each in value]
    return expand_path(value) if isinstance(value, str) else value


def expand_path(text: str) -> str:
    """Return a path with the home folder for `~` or `~USER` and the values of `$NAME` and `${NAME}`.

    `$$` is a dollar. Values are not expanded again, and URLs not at all.

    Raises:
        PathError: a variable or a user does not exist, or a dollar begins no variable.
    """
    if is_url(text):
        return text
    first, slash, rest = text.partition("/")
    if not first.startswith("~"):
        return _VARIABLE.sub(_value_of, text)
    home = os.path.expanduser(first)
    if home == first:
        raise PathError(
            f"begins with {first}, which is not the home of a user",
            f"write the folder, or ./{first} for one of this name",
        )
    return (home.rstrip("/") + slash if slash else home) + _VARIABLE.sub(_value_of, rest)


def _value_of(found: re.Match[str]) -> str:
    dollar, *names = found.groups()
    if dollar:
        return dollar
    name = names[0] or names[1]
    if name is None:
        raise PathError(
            "has a $ without the name of a variable", "write $NAME or ${NAME}, or $$ for a dollar"
        )
    if name not in os.environ:
        raise PathError(
            f"contains ${name}, which is not set in the environment",
            f"set it (export {name}=...), or write $$ for a dollar",
        )
    return os.environ[name]


def written_paths(value: Any) -> Any:
    """Return an expanded path, or a list of them, as written in a configuration."""
    if isinstance(value, list | tuple):
        return [written_paths(each) for each in value]
    if not isinstance(value, str) or is_url(value):
        return value
    return ("./" if value.startswith("~") else "") + value.replace("$", "$$")
