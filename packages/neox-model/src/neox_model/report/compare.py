"""What differs between several runs: configuration, data, packages and code."""

from collections.abc import Mapping, Sequence
from typing import Any

from neox_model.report.markup import plain
from neox_model.report.reading import Run

__all__ = ["differences", "flattened"]

_DATA = ("data", "split", "vocab_file", "merge_file", "tokenizer", "seed", "sample_order", "weight")
_SUBJECTS = ("configuration", "data", "layout", "packages", "code", "device")


def differences(runs: Sequence[Run]) -> dict[str, list[tuple[str, ...]]]:
    """Return for each subject the rows that differ: name, then the value of each run."""
    found: dict[str, list[tuple[str, ...]]] = {subject: [] for subject in _SUBJECTS}
    tables = [_facts(run) for run in runs]
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


def _facts(run: Run) -> dict[tuple[str, str], str]:
    about = run.about
    found = {}
    for name, value in flattened(about.get("config", {})).items():
        is_data = any(part in name for part in _DATA)
        found["data" if is_data else "configuration", name] = plain(value)
    for subject in ("layout", "packages", "code"):
        for name, value in about.get(subject, {}).items():
            found[subject, name] = str(value)
    for name in ("device", "devices", "host"):
        if name in about:
            found["device", name] = str(about[name])
    return found
