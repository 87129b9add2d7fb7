"""Write JSON without NaN and Infinity, which JSON does not have and many readers refuse.

A number that is not finite is written as null, and the object gets a flag `nonfinite` with the same structure
that names it: `{"iteration": 3, "loss": null, "nonfinite": {"loss": "nan"}}`. `loads` restores the number.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["FLAG", "dumps", "loads", "restored"]

FLAG = "nonfinite"


def dumps(value: Mapping[str, Any], **options: Any) -> str:
    """Return the JSON text of an object, with numbers that are not finite as null and a flag.

    Args:
        value: the object; its keys are strings.
        options: arguments of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        finite, flags = _split(value)
        return json.dumps({**finite, FLAG: flags} if flags else finite, allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """Parse JSON, and restore the numbers of an object that `dumps` wrote.

    Raises:
        ValueError: the text is not JSON, or its flag does not fit.
    """
    value = json.loads(text)
    return restored(value) if isinstance(value, dict) and FLAG in value else value


def restored(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its flagged numbers, without the flag.

    Raises:
        ValueError: the flag does not fit.
    """
    rest = {key: each for key, each in value.items() if key != FLAG}
    return _merge(rest, value[FLAG]) if FLAG in value else rest


def _split(value: Any) -> tuple[Any, Any]:
    """Return the value with null for each number that is not finite, and the flags of these; None if none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, str(value)
    if isinstance(value, Mapping):
        parts = {key: _split(each) for key, each in value.items()}
        kept: Any = {key: part[0] for key, part in parts.items()}
    elif isinstance(value, list | tuple):
        parts = {str(index): _split(each) for index, each in enumerate(value)}
        kept = [part[0] for part in parts.values()]
    else:
        return value, None
    return kept, {key: part[1] for key, part in parts.items() if part[1] is not None} or None


def _merge(value: Any, flags: Any) -> Any:
    if value is None and flags in ("nan", "inf", "-inf"):
        return float(flags)
    if isinstance(value, dict) and isinstance(flags, dict) and flags.keys() <= value.keys():
        return value | {key: _merge(value[key], flag) for key, flag in flags.items()}
    if (
        isinstance(value, list)
        and isinstance(flags, dict)
        and flags.keys() <= set(map(str, range(len(value))))
    ):
        return [_merge(each, flags[str(n)]) if str(n) in flags else each for n, each in enumerate(value)]
    raise ValueError(f"the flag {FLAG!r} does not fit its object")
