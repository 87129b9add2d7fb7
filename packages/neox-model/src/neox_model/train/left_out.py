"""The samples that a training leaves out, and the file that passes them from one attempt to the next."""

import json
from collections.abc import Iterable
from pathlib import Path

from neox_config.atomic import atomic_write
from neox_config.facts.spikes import LEFT_OUT
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train.data.position import Ranges, as_ranges

__all__ = ["forget_left_out", "merged", "read_left_out", "write_left_out"]

_KEY = "left_out"


def write_left_out(folder: Path, ranges: Ranges) -> None:
    """Write the ranges of samples that attempts which resume from this folder leave out."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / LEFT_OUT, is_durable=True) as file:
        json.dump({_KEY: [list(each) for each in ranges]}, file, allow_nan=False)
        file.write("\n")


def read_left_out(folder: Path) -> Ranges:
    """Return the ranges of samples that attempts which resume from this folder leave out.

    Raises:
        CheckpointError: the file exists and cannot be read, or is damaged.
    """
    path = folder / LEFT_OUT
    try:
        return as_ranges(json.loads(path.read_text(encoding="utf-8"))[_KEY])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}); it lists the samples that a rollback left out; "
            "delete it to train on them"
        ) from error


def forget_left_out(folder: Path) -> None:
    """Delete the file of an earlier training, before a new one saves to its folder."""
    (folder / LEFT_OUT).unlink(missing_ok=True)


def merged(*ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return all ranges, each once, in order."""
    return tuple(sorted({each for some in ranges for each in some}))
