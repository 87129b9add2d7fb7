"""What differs between runs, or the attempts of one: configuration, data, layout, packages and code."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from neox_model.report.markup import plain
from neox_model.report.reading import Attempt, Run

__all__ = ["Change", "changes", "differences", "flattened"]

_DATA = ("data", "split", "vocab_file", "merge_file", "tokenizer", "seed", "sample_order", "weight")
_SUBJECTS = ("configuration", "data", "layout", "packages", "code", "device")
_PARAMETERS = ("configuration", "data")


Change = tuple[Attempt, str, str, str]
"""Something that an attempt has otherwise than the one before: the attempt, the name of the parameter (of
anything else its subject and name, such as `packages: torch`), and both values, the earlier one first."""


def changes(run: Run) -> list[Change]:
    """Return what changed from one attempt of a run to the next, parameters first.

    The host of rank 0, which a scheduler may choose anew at every start, is no change.
    """
    found = []
    for before, after in pairwise(one for one in run.attempts if one.start):
        for subject, rows in differences([before.start, after.start]).items():
            prefix = "" if subject in _PARAMETERS else f"{subject}: "
            found += [(after, prefix + name, old, new) for name, old, new in rows if name != "host"]
    return found


def differences(abouts: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, ...]]]:
    """Return for each subject the rows that differ between starts: name, then the value of each."""
    found: dict[str, list[tuple[str, ...]]] = {subject: [] for subject in _SUBJECTS}
    tables = [_facts(about) for about in abouts]
    for subject, name in sorted({key for table in tables for key in table}):
        values = tuple(table.get((subject, name), "not recorded") for table in tables)
        if len(set(values)) > 1:
            found[subject].append((name, *values))
    return found


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _facts(about: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    found = {}
    for name, value in flattened(about.get("config", {})).items():
        is_data = any(part in name for part in _DATA)
        found["data" if is_data else "configuration", name] = plain(value)
    derived, attention = about.get("derived", {}), about.get("attention") or {}
    others = {
        **{subject: about.get(subject, {}) for subject in ("packages", "code")},
        "layout": {
            **about.get("layout", {}),
            **{name: derived[name] for name in ("train_batch_size",) if name in derived},
        },
        "device": {
            **{f"attention backend, {kind}": backend for kind, backend in attention.items()},
            **{name: about[name] for name in ("device", "devices", "host") if name in about},
        },
    }
    return found | {(what, name): str(value) for what, row in others.items() for name, value in row.items()}
