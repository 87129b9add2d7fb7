"""The samples that a training leaves out, and the file that passes them from one attempt to the next."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from neox_config.atomic import atomic_write
from neox_config.facts.spikes import LEFT_OUT
from neox_model.checkpoint.contents import are_ranges
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train.data.position import Ranges, as_ranges

__all__ = ["Owner", "forget_left_out", "merged", "read_left_out", "write_left_out"]

Owner = Callable[[int], Mapping[str, str]]
"""Returns what identifies a training and the order of its first samples, of which the number is given."""


def write_left_out(folder: Path, ranges: Ranges, owner: Owner) -> None:
    """Write the ranges of samples that later attempts of this training leave out."""
    content = {"left_out": [list(each) for each in ranges], "owner": owner(_end(ranges))}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / LEFT_OUT, is_durable=True) as file:
        json.dump(content, file, allow_nan=False)
        file.write("\n")


def read_left_out(folder: Path, owner: Owner) -> Ranges | None:
    """Return the ranges of samples to leave out; None if the file belongs to another training.

    Raises:
        CheckpointError: the file exists and cannot be read, or is damaged.
    """
    path = folder / LEFT_OUT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({type(error).__name__})") from error
    if not isinstance(content, dict) or not isinstance(content.get("owner"), dict):
        raise _damaged(path, "owner is missing")
    if not are_ranges(content.get("left_out")):
        raise _damaged(path, "left_out is not an ordered list of ranges [first, stop] with first < stop")
    ranges = as_ranges(content["left_out"])
    return ranges if content["owner"] == owner(_end(ranges)) else None


def forget_left_out(folder: Path) -> None:
    """Delete the file of another training, before this one saves to its folder."""
    (folder / LEFT_OUT).unlink(missing_ok=True)


def merged(*ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all ranges, each once, in order."""
    return tuple(sorted({each for some in ranges for each in some}))


def _end(ranges: Ranges) -> int:
    return max((stop for _, stop in ranges), default=0)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}, the list of samples that a rollback left out, is damaged: {why}; delete it to train on them"
    )
