"""Trace a run of a small GPT on the CPU: which files pass the configuration on, and which run."""

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import torch

from neox_data.indexed import IndexedDatasetWriter
from neox_model import Trainer, load_config
from size_holders import is_whole

__all__ = ["Traces", "trace"]

# The plain GPT of two layers: what is not stated has its default.
_SETTINGS = {
    "num-layers": 2,
    "hidden-size": 16,
    "num-attention-heads": 2,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "tokenizer-type": "CharLevelTokenizer",
    "split": "100,0,0",
    "train-micro-batch-size-per-gpu": 2,
    "train-iters": 2,
    "eval-iters": 0,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}
Profile = Callable[[FrameType, str, Any], None]


class Traces:
    """What was found. Files are relative to the folder `src` of their package.

    Attributes:
        steps: file of the caller and of the function, for each call between two files within `build_model`
            that passes a whole configuration or specification, or an object that holds one. Calls through
            other packages count as calls of the last file of ours; the object of a method is not counted.
        forward: files that the forward pass of the model enters, in evaluation.
        stack: files on the stack when `Loop.run` has called the engine's `train_batch`, from the first to
            the last.
        between: files that were entered in between, also those that have returned before.
    """

    def __init__(self, packages: Path, holders: Collection[str]) -> None:
        self.steps: set[tuple[str, str]] = set()
        self.forward: set[str] = set()
        self.stack: list[str] = []
        self.between: set[str] = set()
        self.model: Any = None
        self._is_building = False
        self._entered: set[str] = set()
        self._holders = holders
        self._file_of = cache(lambda path: _file_in(packages, path))
        self._carries = cache(self._is_carrier)

    def watch_training(self, frame: FrameType, event: str, value: Any) -> None:
        """Follow one event of `sys.setprofile` in a run."""
        file, name = self._file_of(frame.f_code.co_filename), frame.f_code.co_qualname
        if file is None:
            return
        if name == "build_model":
            self._is_building = event == "call"
            self.model = value
        if event != "call":
            return
        caller = self._caller(frame)
        if caller is not None and caller.f_code.co_qualname == "Loop.run":
            self._entered.clear()
        self._entered.add(file)
        if name.endswith(".train_batch"):
            self.stack = self._files_since_loop(frame)
            self.between = {*self.stack, *self._entered}
        if self._is_building and caller is not None and self._passes_it(frame):
            self.steps |= {(self._file_of(caller.f_code.co_filename), file)} - {(file, file)}

    def watch_forward(self, frame: FrameType, event: str, value: Any) -> None:
        """Follow one event of `sys.setprofile` in a forward pass."""
        file = self._file_of(frame.f_code.co_filename)
        if event == "call" and file is not None:
            self.forward.add(file)

    def _caller(self, frame: FrameType) -> FrameType | None:
        caller = frame.f_back
        while caller is not None and self._file_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        return caller

    def _files_since_loop(self, frame: FrameType) -> list[str]:
        files: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            file = self._file_of(caller.f_code.co_filename)
            if file is not None and file not in files:
                files.insert(0, file)
            if caller.f_code.co_qualname == "Loop.run":
                return files
            caller = self._caller(caller)
        return []

    def _passes_it(self, frame: FrameType) -> bool:
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(self._carries(type(values.get(name))) for name in names if name != "self")

    def _is_carrier(self, kind: type) -> bool:
        name = f"{kind.__module__}.{kind.__qualname__}"
        return name in self._holders or is_whole(name)


def _file_in(packages: Path, path: str) -> str | None:
    """Return a source file of the packages relative to its folder `src`; None for other files."""
    return path.partition("/src/")[2] or None if path.startswith(f"{packages}/") else None


@contextmanager
def _profiled(watch: Profile) -> Iterator[None]:
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def trace(packages: Path, holders: Collection[str]) -> Traces:
    """Train two iterations and compute logits once, with the packages of this environment.

    Args:
        packages: the folder that they are installed from.
        holders: classes that hold a whole configuration or specification, by dotted name.
    """
    found = Traces(packages, holders)
    # It warns that nothing is saved.
    logging.getLogger("neox_model").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        prefix, path = Path(folder) / "corpus", Path(folder) / "plain.yml"
        with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
            for _ in range(20):
                writer.append(np.arange(97, 117, dtype=np.uint16))
        path.write_text(json.dumps(_SETTINGS | {"data-path": str(prefix)}))
        config = load_config(path)
        with _profiled(found.watch_training), Trainer(config) as trainer:
            trainer.train()
    if found.model is None or not found.stack:
        raise RuntimeError(
            f"build_model, or Loop.run and train_batch, of {packages} did not run; run make install there, "
            "or write their new names into tools/size_trace.py"
        )
    model = found.model.eval()
    with torch.no_grad(), _profiled(found.watch_forward):
        model(torch.zeros(1, 8, dtype=torch.long))
    return found
