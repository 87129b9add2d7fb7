"""Runs `neox-data prepare`, which is in another package, and reads its result."""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neox_config.errors import LaunchError

__all__ = ["PreparationError", "Prepared", "prepare_texts"]

# Written last by `neox-data prepare`.
_RESULT = "prepared.json"
# Exit code of `neox-data prepare` for a folder with the result of other texts or options.
_OTHER_RESULT = 3


class PreparationError(LaunchError):
    """`neox-data prepare` failed.

    Args:
        status: its exit code; the negative number of the signal that ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"neox-data prepare was ended by signal {-status}; start the same command again")
        self.exit_code = status if status > 0 else 128 - status
        if status == _OTHER_RESULT:
            self.exit_code = LaunchError.exit_code
        self.is_reported = status > 0
        """It has printed why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The dataset and the tokenizer of the texts.

    Args:
        data_path: prefix of the dataset.
        split: numbers of documents for training, validation and test.
        vocab_file: the tokenizer.
        tokenizer_type: its type.
        entries: its number of entries.
        training_tokens: tokens for training.
        validation_tokens: tokens for validation.
    """

    data_path: str
    split: str
    vocab_file: str
    tokenizer_type: str
    entries: int
    training_tokens: int
    validation_tokens: int


def prepare_texts(
    texts: Sequence[Path],
    output: Path,
    *,
    key: str,
    tokenizer: Path | None,
    vocab_size: int | None,
    quiet: bool,
) -> Prepared:
    """Make a tokenizer and a dataset of texts in a folder; steps of an earlier run are not repeated.

    Args:
        texts: files and folders.
        output: the folder.
        key: key of the text in JSON lines and tables.
        tokenizer: a tokenizer.json; None trains one.
        vocab_size: entries of a tokenizer that is trained; None: by the size of the texts.
        quiet: show no progress.

    Raises:
        PreparationError: neox-data failed, or was interrupted by Ctrl-C and has reported it.
        KeyboardInterrupt: neox-data was interrupted and has not reported it, or only this process was.
        LaunchError: neox-data is not installed, or has another version.
    """
    if importlib.util.find_spec("neox_data") is None:
        raise LaunchError(
            "init requires the package neox-data, which reads texts; install it with pip install "
            "./packages/neox-data in the repository"
        )
    command = [sys.executable, "-m", "neox_data", "prepare", "--output", str(output), "--jsonl-key", key]
    command += [f"--input={path}" for path in texts]
    command += [] if tokenizer is None else ["--vocab-file", str(tokenizer)]
    command += [] if vocab_size is None else ["--vocab-size", str(vocab_size)]
    command += ["--quiet"] if quiet else []
    with _ctrl_c_for_the_process() as received:
        done = subprocess.run(command, check=False)
    # Ctrl-C ends neox-data at once while it trains a tokenizer; a signal to this process alone, or one that
    # came when the other was complete, does not.
    if done.returncode == -signal.SIGINT or (received and not done.returncode):
        raise KeyboardInterrupt
    if done.returncode:
        raise PreparationError(done.returncode)
    path = output / _RESULT
    try:
        result = json.loads(path.read_bytes())
        return Prepared(
            data_path=result["data_path"],
            split=result["split"],
            vocab_file=result["vocab_file"],
            tokenizer_type=result["tokenizer_type"],
            entries=result["entries"],
            training_tokens=result["tokens"]["train"],
            validation_tokens=result["tokens"]["valid"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{path} is damaged, or was written by another version of neox-data; delete it, and start the "
            "same command again"
        ) from error


@contextmanager
def _ctrl_c_for_the_process() -> Iterator[list[int]]:
    """Leave Ctrl-C to a process that this one waits for: it removes what is incomplete, and reports it.

    Yields the signals that this process has received.
    """
    received: list[int] = []
    # Not SIG_IGN, which the process would inherit.
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
