"""Trace iterations with PyTorch's profiler, write snapshots of the GPU's memory, time collective operations.

A trace is a file in Chrome's trace format (JSON, compressed with gzip), for chrome://tracing, Perfetto and
Holistic Trace Analysis. A snapshot, in PyTorch's format for https://docs.pytorch.org/memory_viz, shows what
is allocated, and which code allocated it.
"""

import gzip
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from neox_config.atomic import written_aside
from neox_config.derive.profiling import memory_folder, profiled_iterations, trace_folder
from neox_config.schema.sections.logging import LoggingSection
from neox_model.metrics.collective_times import CollectiveTimes
from neox_model.torch_compat import (
    dump_memory_snapshot,
    on_out_of_memory,
    record_memory_history,
    stop_memory_history,
    watched_collectives,
)
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport

__all__ = ["CollectivesCallback", "MemoryCallback", "ProfileCallback", "recorded_memory"]

# The end of a whole trace: its last key, and a path.
_LAST_KEY, _END_BYTES = b'"traceName"', 8192

logger = logging.getLogger(__name__)


class ProfileCallback(Callback):
    """Traces a range of iterations; outside of it, it costs one comparison per iteration.

    The iteration before the first one is traced and discarded, if this process runs it, because the profiler
    starts slowly. A run that resumes inside the range traces the rest of it, and one that ends inside
    the range writes what it has traced.

    It must be the last callback: a traced iteration includes what all callbacks do in it, and one of them may
    end the run.

    Args:
        iterations: to trace.
        folders: receive the same trace each.
        rank: this process's rank; rank 0 logs the operators that take the most time.
        device: of the model.
        is_of_memory: trace what operators allocate, too.
    """

    def __init__(
        self,
        iterations: range,
        folders: Sequence[Path],
        *,
        rank: int,
        device: torch.device,
        is_of_memory: bool = False,
    ) -> None:
        self._iterations = iterations
        self._folders = folders
        self._rank = rank
        self._is_on_gpu = device.type == "cuda"
        self._is_of_memory = is_of_memory
        self._profiler: profile | None = None
        self._span: record_function | None = None
        self._first = 0

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `profile` is set, or `memory_profiling` on a host, whose memory has no snapshots."""
        section, device = run.config.logging, run.engine.device
        traces_memory = section.memory_profiling and device.type != "cuda"
        folders = [
            trace_folder(section) if section.profile else None,
            memory_folder(section) if traces_memory else None,
        ]
        if not (section.profile or traces_memory):
            return None
        return cls(
            profiled_iterations(section, run.state.last_iteration),
            list(dict.fromkeys(folder for folder in folders if folder is not None)),
            rank=run.groups.world.rank,
            device=device,
            is_of_memory=traces_memory,
        )

    def on_start(self) -> None:
        """Start if the first iteration of this process is in the range, or the one before the range."""
        if self.run.state.iteration >= self._iterations[-1]:
            logger.info("nothing is traced: iteration %d, the last to trace, is past", self._iterations[-1])
        self._prepare()

    def on_step(self, report: StepReport) -> None:
        """Start before the range; write the trace after its last iteration."""
        state = self.run.state
        if self._profiler is None:
            if state.iteration + 2 >= self._iterations.start:
                self._prepare()
            return
        self._end_span()
        if state.finished or state.iteration >= self._iterations[-1]:
            self._finish()
            return
        self._profiler.step()
        self._begin_span(state.iteration + 1)

    def close(self) -> None:
        """Discard an unfinished trace after an error."""
        self._end_span()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _prepare(self) -> None:
        following = self.run.state.iteration + 1
        starts = following == self._iterations.start - 1 or following in self._iterations
        if self.run.state.finished or not starts:
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

    def _finish(self) -> None:
        """Write the trace; a failure is logged, because a full disk must not end a long run."""
        assert self._profiler is not None
        started, last = time.perf_counter(), self.run.state.iteration
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if last < self._first:
            return
        with self.run.progress.repeated(last):
            try:
                self._write(
                    profiler, _name_of(self._rank, f"iterations-{self._first}-{last}", "pt.trace.json.gz")
                )
            except OSError as error:
                logger.error(
                    "the trace of rank %d was not written, training continues: %s", self._rank, error
                )
            if self._rank == 0:
                table = profiler.key_averages().table(
                    sort_by="self_device_time_total" if self._is_on_gpu else "self_cpu_time_total",
                    row_limit=15,
                    max_name_column_width=40,
                )
                what = f"iterations {self._first} to {last} on rank 0, by their own time"
                logger.info("operators of %s:\n%s", what, table)
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
            # As the command gzip; Python's default takes several times as long for hardly smaller files.
            with (
                written_aside(path) as aside,
                exported.open("rb") as source,
                gzip.open(aside, "wb", compresslevel=6) as target,
            ):
                shutil.copyfileobj(source, target)
        except OSError as error:
            logger.error("the trace %s was not written, training continues: %s", path, error)
        else:
            if self._rank == 0:
                logger.info("trace of rank 0: %s", path)


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


def _name_of(rank: int, what: str, suffix: str) -> str:
    """Return the name of a rank's file about something, such as a range of iterations."""
    return f"rank-{rank:05d}.{what}.{suffix}"


class MemoryCallback(Callback):
    """Records allocations until an iteration, and writes a snapshot after it.

    Allocations are recorded from `start`, before the model is built, so that a snapshot after running out of
    memory shows them. After the last recorded iteration such a snapshot is still written, but shows only what
    is allocated. A run that resumes after that iteration stops recording when it has loaded.

    Args:
        last: the last recorded iteration.
        folder: receives the snapshots.
        rank: this process's rank.
    """

    def __init__(
        self,
        last: int,
        folder: Path,
        *,
        rank: int,
    ) -> None:
        self._last = last
        self._folder = folder
        self._rank = rank
        self._is_recording = False
        self._ran_out = False
        self._first = 1

    def start(self) -> None:
        """Start recording."""
        on_out_of_memory(self._write_out_of_memory)
        # As in GPT-NeoX.
        record_memory_history(100_000)
        self._is_recording = True

    def on_start(self) -> None:
        """Stop recording if the last recorded iteration is past."""
        state = self.run.state
        self._first = state.iteration + 1
        if state.iteration >= self._last:
            logger.info("no allocations are recorded: iteration %d, the last to record, is past", self._last)
            self.close()
        elif state.finished:
            self.close()

    def on_step(self, report: StepReport) -> None:
        """Write the snapshot after the last recorded iteration, or the end of the run."""
        state = self.run.state
        if not self._is_recording or (state.iteration < self._last and not state.finished):
            return
        with self.run.progress.repeated(state.iteration):
            self._write(_name_of(self._rank, f"iterations-{self._first}-{state.iteration}", "memory.pickle"))
        self.close()

    def close(self) -> None:
        """Stop recording."""
        if self._is_recording:
            stop_memory_history()
            self._is_recording = False

    def _write_out_of_memory(self) -> None:
        """Write the first one only: a program may catch the error and run out of memory many times.

        The allocator calls this, and an exception would end the process instead of the run.
        """
        if self._ran_out:
            return
        self._ran_out = True
        try:
            self._write(_name_of(self._rank, "out-of-memory", "pickle"))
        except (RuntimeError, MemoryError, TypeError, ValueError):  # Of torch, the host and pickle.
            logger.exception("the memory snapshot after running out of memory was not written")

    def _write(self, name: str) -> None:
        """Write a snapshot; a failure is logged, because a full disk must not end a long run."""
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                dump_memory_snapshot(aside)
        except OSError as error:
            logger.error("the memory snapshot %s was not written: %s", path, error)
        else:
            logger.info("memory snapshot of rank %d: %s", self._rank, path)


class CollectivesCallback(Callback):
    """Times the operations between the start and the end of the loop.

    It must be the last callback, so that the table at the end includes the last evaluation and the last save.
    After an error it logs the table, too.

    Args:
        times: receives the operations.
        interval: iterations between tables; None: only at the end.
        rank: this process's rank; rank 0 logs its own operations.
    """

    def __init__(self, times: CollectiveTimes, *, interval: int | None, rank: int) -> None:
        self._times = times
        self._interval = interval
        self._rank = rank
        self._watching = ExitStack()
        self._is_watching = False

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `comms_logger` is enabled."""
        comms, groups = run.config.engine.comms_logger, run.groups
        if not comms.enabled:
            return None
        # The later ones count: over gloo the control group is the world, which an axis of all ranks is, too.
        of_experts = {"experts": groups.experts, "copies of experts": groups.copies_of(is_expert=True)}
        axes = of_experts | {"data": groups.data, "model": groups.model, "pipe": groups.pipe}
        named = {"control": groups.control, "world": groups.world}
        named |= {name: group for name, group in axes.items() if group.size > 1}
        times = CollectiveTimes(
            named,
            operations=None if comms.prof_all else frozenset(comms.prof_ops),
            synchronize=torch.cuda.synchronize if run.engine.device.type == "cuda" else lambda: None,
            is_verbose=comms.verbose,
            names_callers=comms.debug,
        )
        interval = run.config.logging.log_interval if comms.verbose else None
        return cls(times, interval=interval, rank=groups.world.rank)

    def on_start(self) -> None:
        """Start to time."""
        self._watching.enter_context(watched_collectives(self._times.watch))
        self._is_watching = True

    def on_step(self, report: StepReport) -> None:
        """Log the table once per interval."""
        if self._interval is not None and self.run.state.iteration % self._interval == 0:
            self._log(f"to iteration {self.run.state.iteration}")

    def on_end(self) -> None:
        """Log the table, and stop."""
        self._stop("in all")

    def close(self) -> None:
        """Log the table and stop, unless the run has ended without an error."""
        self._stop("until the error")

    def _stop(self, when: str) -> None:
        if self._is_watching:
            self._is_watching = False
            self._watching.close()
            self._log(when)

    def _log(self, when: str) -> None:
        if self._rank == 0:
            logger.info("collective operations of rank 0 %s:\n%s", when, self._times.table())


def recorded_memory(section: LoggingSection, *, rank: int, last_iteration: int) -> MemoryCallback | None:
    """Record allocations on this process's GPU from now on; None: it is not requested."""
    folder = memory_folder(section)
    if not section.memory_profiling or folder is None or not torch.cuda.is_available():
        return None
    callback = MemoryCallback(profiled_iterations(section, last_iteration)[-1], folder, rank=rank)
    callback.start()
    return callback
