"""Trace some iterations with PyTorch's profiler, on every rank.

A trace is a file in Chrome's trace format (JSON, compressed with gzip), for chrome://tracing, Perfetto and
Holistic Trace Analysis.
"""

import gzip
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from neox_config.atomic import written_aside
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport

__all__ = ["ProfileHook", "name_of"]

_OPERATORS_IN_LOG = 15
# As the command gzip; Python's default takes several times as long for files that are hardly smaller.
_COMPRESSION = 6
# The end of a whole trace: its last key, and a path.
_LAST_KEY, _END_BYTES = b'"traceName"', 8192

logger = logging.getLogger(__name__)


class ProfileHook(Hook):
    """Traces a range of iterations; outside of it, it costs one comparison per iteration.

    The iteration before the first one is traced and discarded, if this process runs it, because the profiler
    starts slowly. A training that resumes inside the range traces the rest of it, and one that ends inside
    the range writes what it has traced.

    It must be the last hook: a traced iteration includes what all hooks do in it, and one of them may end the
    training.

    Args:
        iterations: to trace.
        folders: receive the same trace each.
        rank: this process's rank; rank 0 logs the operators that take the most time.
        device: of the model.
        is_of_memory: trace what operators allocate, too.
        while_writing: function of the iteration that returns a context manager around the writing.
    """

    def __init__(
        self,
        iterations: range,
        folders: Sequence[Path],
        *,
        rank: int,
        device: torch.device,
        is_of_memory: bool = False,
        while_writing: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._iterations = iterations
        self._folders = folders
        self._rank = rank
        self._is_on_gpu = device.type == "cuda"
        self._is_of_memory = is_of_memory
        self._while_writing = while_writing
        self._profiler: profile | None = None
        self._span: record_function | None = None
        self._first = 0

    def on_start(self, state: TrainState) -> None:
        """Start if the first iteration of this process is in the range, or the one before the range."""
        if state.iteration >= self._iterations[-1]:
            logger.info("nothing is traced: iteration %d, the last to trace, is past", self._iterations[-1])
        self._prepare(state)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Start before the range; write the trace after its last iteration."""
        if self._profiler is None:
            if state.iteration + 2 >= self._iterations.start:
                self._prepare(state)
            return
        self._end_span()
        if state.finished or state.iteration >= self._iterations[-1]:
            self._finish(state.iteration)
            return
        self._profiler.step()
        self._begin_span(state.iteration + 1)

    def close(self) -> None:
        """Discard an unfinished trace after an error."""
        self._end_span()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _prepare(self, state: TrainState) -> None:
        following = state.iteration + 1
        starts = following == self._iterations.start - 1 or following in self._iterations
        if state.finished or not starts:
            return
        self._first = max(following, self._iterations.start)
        warms_up = following < self._first
        activities = [ProfilerActivity.CPU]
        if self._is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=len(self._iterations), repeat=1) if warms_up else None,
            record_shapes=True,
            profile_memory=self._is_of_memory,
        )
        self._profiler.start()
        self._begin_span(following)

    def _begin_span(self, iteration: int) -> None:
        """Name the iteration in the trace; PyTorch's own ProfilerStep counts from the profiler's start."""
        self._span = record_function(f"iteration {iteration}")
        self._span.__enter__()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _finish(self, last: int) -> None:
        """Write the trace; a failure is logged, because a full disk must not end a long training."""
        assert self._profiler is not None
        started = time.perf_counter()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if last < self._first:
            return
        with self._while_writing(last):
            try:
                self._write(
                    profiler, name_of(self._rank, f"iterations-{self._first}-{last}", "pt.trace.json.gz")
                )
            except OSError as error:
                logger.error(
                    "the trace of rank %d was not written, training continues: %s", self._rank, error
                )
            if self._rank == 0:
                logger.info("%s", self._table(profiler, last))
        if self._rank == 0:
            logger.info("writing the trace took %.1f s", time.perf_counter() - started)

    def _write(self, profiler: profile, name: str) -> None:
        """Export the trace into the first folder, because PyTorch does so once, and compress it into all."""
        self._folders[0].mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self._folders[0], prefix=f".{os.getpid()}.") as aside:
            exported = Path(aside, "trace.json")
            profiler.export_chrome_trace(str(exported))
            _check_whole(exported)
            for folder in self._folders:
                self._compress(exported, folder / name)

    def _compress(self, exported: Path, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (
                written_aside(path) as aside,
                exported.open("rb") as source,
                gzip.open(aside, "wb", compresslevel=_COMPRESSION) as target,
            ):
                shutil.copyfileobj(source, target)
        except OSError as error:
            logger.error("the trace %s was not written, training continues: %s", path, error)
        else:
            if self._rank == 0:
                logger.info("trace of rank 0: %s", path)

    def _table(self, profiler: profile, last: int) -> str:
        """Return the operators that take the most time, as PyTorch formats them."""
        table = profiler.key_averages().table(
            sort_by="self_device_time_total" if self._is_on_gpu else "self_cpu_time_total",
            row_limit=_OPERATORS_IN_LOG,
            max_name_column_width=40,
        )
        return f"operators of iterations {self._first} to {last} on rank 0, by their own time:\n{table}"


def _check_whole(exported: Path) -> None:
    """Raise an OSError if the trace is not whole: on a full disk PyTorch only prints a message."""
    size = exported.stat().st_size if exported.exists() else 0
    end = b""
    if size:
        with exported.open("rb") as file:
            file.seek(max(0, size - _END_BYTES))
            end = file.read().rstrip()
    if not (_LAST_KEY in end and end.endswith(b"}")):
        raise OSError(f"PyTorch wrote only {size:,} bytes of it to {exported.parent.parent}; free disk space")


def name_of(rank: int, what: str, suffix: str) -> str:
    """Return the name of a rank's file about something, such as a range of iterations."""
    return f"rank-{rank:05d}.{what}.{suffix}"
