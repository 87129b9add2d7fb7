"""Record the inputs, results and state of each step, for `neox-launch verify-resume`.

Every rank writes one file of JSON lines: its place in the groups, then one line per step and one per recorded
state. Tokens, random streams and tensors are recorded as digests, numbers exactly.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import Tensor

from neox_config import finite_json
from neox_launcher.protocol.verification import Recording
from neox_model.checkpoint import rng_state
from neox_model.checkpoint.blocks import block_numel
from neox_model.checkpoint.comparison import counters_of
from neox_model.checkpoint.logical import Fragment, computing_fragments, engine_fragments
from neox_model.checkpoint.replica_states import replicas_differ
from neox_model.train.data.batch import Batch
from neox_model.train.run import Callback, Run
from neox_model.train.saving import save_run
from neox_model.train.state import StepReport, TrainState
from neox_model.train.step import TrainStep

__all__ = ["RecordCallback", "digest", "sample_digests"]


class RecordCallback(Callback):
    """Writes the record of one rank. Must follow every callback that changes the state.

    Args:
        folder: receives `rank-RANK.jsonl`.
        iteration: iteration after which the state is recorded; it may be the one that the run starts at.
        snapshot: receives a checkpoint of the recorded state; None: no checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        iteration: int,
        snapshot: Path | None,
    ) -> None:
        self._folder, self._snapshot = folder, snapshot
        self._iteration = iteration
        self._samples: list[list[str]] = []
        self._random: dict[str, str] = {}
        self._settings: list[dict[str, Any]] = []

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `neox-launch verify-resume` requests it."""
        recording = Recording.from_environment()
        if recording is None:
            return None
        snapshot = None if recording.snapshot is None else Path(recording.snapshot)
        return cls(Path(recording.folder), iteration=recording.iteration, snapshot=snapshot)

    def on_load(self) -> None:
        """Create the file of this rank."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.run.groups.world.rank:05d}.jsonl"
        self._file: TextIO = (self._folder / name).open("x", encoding="utf-8")

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Record the micro-batches that a step reads."""
        return step(self._watched(batches))

    def _watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the micro-batches, recording their digests and the random streams before the step."""
        for batch in batches:
            self._random = self._random or _random_digests()
            self._samples.append(sample_digests(batch))
            yield batch

    def on_start(self) -> None:
        """Record this rank's place in the groups, and the state if the run starts at `iteration`."""
        groups = self.run.groups
        self._write(
            "place",
            rank=groups.world.rank,
            data=groups.data.rank,
            model=groups.model.rank,
            pipe=groups.pipe.rank,
            data_size=groups.data.size,
        )
        self._settings = self._optimizer_settings()
        self._record_state()

    def on_step(self, report: StepReport) -> None:
        """Record one step, and the state after `iteration`."""
        self._write(
            "step",
            iteration=self.run.state.iteration,
            samples=self._samples,
            loss=_number(report.loss),
            grad_norm=_number(report.grad_norm),
            settings=self._settings,
            counters=self._counters(self.run.state),
            random_before=self._random,
            random=_random_digests(),
            sums=self._sums_of_weights(),
        )
        self._samples, self._random = [], {}
        self._settings = self._optimizer_settings()
        self._record_state()

    def on_end(self) -> None:
        """Record the final state and close the file."""
        if self.run.state.iteration != self._iteration:
            self._write_state(self.run.state)
        self._file.close()

    def _record_state(self) -> None:
        if self.run.state.iteration != self._iteration:
            return
        self._write_state(self.run.state)
        if self._snapshot is not None:
            save_run(self.run, self._snapshot)

    def _write_state(self, state: TrainState) -> None:
        differ = replicas_differ(self.run.engine.update.optimizer)
        suffix = f" of replica {self.run.groups.data.rank}" if differ else ""
        self._write(
            "state",
            iteration=state.iteration,
            settings=self._settings,
            counters=self._counters(state),
            random=_random_digests(),
            kept=self._kept_tensors(),
            # Those of replicas with different weights have different names.
            used={
                f"{_place(fragment)}{suffix}": digest(fragment.weight)
                for fragment in computing_fragments(self.run.engine)
            },
        )

    def _optimizer_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each parameter group, such as learning rate and weight decay."""
        groups = self.run.engine.update.optimizer.param_groups
        return [
            {name: _plain(value) for name, value in group.items() if _is_plain(value)} for group in groups
        ]

    def _counters(self, state: TrainState) -> dict[str, Any]:
        """Return all counters and the loss scale; the result of a forward pass is not a counter."""
        parts: Mapping[str, Mapping[str, Any]] = {
            "training": counters_of(state.state_dict()),
            "schedule": self.run.schedule.state_dict(),
            "engine": self.run.engine.state_dict(),
        }
        return {
            f"{part}.{name}": _plain(value)
            for part, values in parts.items()
            for name, value in values.items()
            if _is_plain(value)
        }

    def _sums_of_weights(self) -> dict[str, float]:
        """Return the sum of the elements of each master weight on this rank."""
        with self.run.engine.update.in_memory():
            fragments = engine_fragments(self.run.engine)
            sums = [fragment.weight.sum(dtype=torch.float64) for fragment in fragments]
        names = (_place(fragment) for fragment in fragments)
        return dict(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))

    def _kept_tensors(self) -> dict[str, str]:
        """Return digests of the master weights and optimizer states on this rank."""
        optimizer = self.run.engine.update.optimizer
        found = {}
        with self.run.engine.update.in_memory():
            for fragment in engine_fragments(self.run.engine):
                place = _place(fragment)
                found[place] = digest(fragment.weight)
                for key, value in optimizer.state.get(fragment.held.holder, {}).items():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        is_elementwise = value.shape == fragment.held.holder.shape
                        found[f"{place}/{key}"] = digest(fragment.part_of(value) if is_elementwise else value)
                    elif isinstance(value, Tensor | int | float):
                        found[f"{place}/{key}"] = str(_number(value))
        return found

    def _write(self, kind: str, **content: Any) -> None:
        self._file.write(finite_json.dumps({"kind": kind, **content}) + "\n")
        self._file.flush()


def sample_digests(batch: Batch) -> list[str]:
    """Digest each sample of a micro-batch: tokens, labels, mask, and document and position ids if any."""
    parts = [part for part in batch if part is not None]
    return [_joined(part[row] for part in parts) for row in range(batch.tokens_BS.shape[0])]


def digest(values: Tensor) -> str:
    """Digest a tensor's bytes."""
    return _joined([values])


def _joined(tensors: Iterable[Tensor]) -> str:
    state = blake2b(digest_size=8)
    for values in tensors:
        flat = values.detach().to("cpu").contiguous().reshape(-1)
        state.update(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return state.hexdigest()


def _random_digests() -> dict[str, str]:
    return {name: digest(values) for name, values in rng_state.capture().items()}


def _place(fragment: Fragment) -> str:
    """Return a weight's name, with the held block and range unless the whole weight is held."""
    block, start, stop = fragment.range
    rows = ",".join(f"{low}:{high}" for low, high in block)
    is_whole_block = (start, stop) == (0, block_numel(block))
    is_whole = is_whole_block and block_numel(block) == prod(fragment.logical.shape)
    elements = "" if is_whole_block else f"({start}:{stop})"
    return fragment.name if is_whole else f"{fragment.name}[{rows}]{elements}"


def _number(value: Tensor | float | None) -> float | None:
    return None if value is None else float(value)


def _is_plain(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and value.numel() == 1
    is_pair = isinstance(value, tuple | list) and all(isinstance(one, int | float) for one in value)
    return value is None or isinstance(value, int | float | str) or is_number or is_pair


def _plain(value: Any) -> Any:
    """Return the value in the form in which JSON stores it."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple | list) else value
