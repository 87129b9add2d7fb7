"""A training run: its parts, and the callbacks that act around its iterations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import nn

from neox_config import NeoXConfig, Resolved
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule
from neox_config.spec.resume import recorded_values
from neox_data.tokenizers import Tokenizer
from neox_launcher.worker.reporting import Progress
from neox_model.checkpoint.comparison import ATTENTION_BACKENDS, DOCUMENTS, SAMPLES_DIGEST
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.uploads import Uploads
from neox_model.metrics.bus import Metrics
from neox_model.metrics.events import Events
from neox_model.metrics.throughput import Throughput
from neox_model.metrics.timers import Timers
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.parallel.logical import LogicalState
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.data.batch import Batch
from neox_model.train.data.datasets import Datasets
from neox_model.train.data.documents import digest_of_samples, documents_in, documents_of
from neox_model.train.data.position import Position
from neox_model.train.data.streams import Stream
from neox_model.train.evaluate import EVALUATIONS, Evaluator
from neox_model.train.state import StepReport, TrainState
from neox_model.train.step import EngineStep, TrainStep

T = TypeVar("T", bound="Callback")

__all__ = ["NO_EXTENSIONS", "Callback", "Extensions", "Run"]


class Callback:
    """Acts around the iterations of a run; every method does nothing unless overridden.

    All ranks have the same callbacks in the same order, so a callback may communicate.

    Attributes:
        run: the run that it was added to.
    """

    run: "Run"

    @classmethod
    def from_run(cls, run: "Run") -> Self | None:
        """Build the callback from the run's configuration; None if nothing requests it.

        Called after the model and the engine are built, before a checkpoint is loaded.
        """
        raise NotImplementedError

    def states(self) -> Sequence[LogicalState]:
        """Return the tensors that checkpoints contain of it; a load changes them in place."""
        return ()

    def on_load(self) -> None:
        """Run once, after the checkpoint was loaded, if there is one."""

    def on_start(self) -> None:
        """Run before the first iteration of this process."""

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Run an iteration by calling `step`. The last callback is the outermost one."""
        return step(batches)

    def on_step(self, report: StepReport) -> None:
        """Run after every iteration, which `run.state` already counts."""

    def before_save(self) -> None:
        """Run before every save. Collective.

        Raises:
            CheckpointError: this state must not be saved; on all ranks or on none.
        """

    def after_save(self, iteration: int) -> None:
        """Run when the checkpoint of an iteration is complete."""

    def on_copy(self, model: nn.Module) -> None:
        """Let a copy of the model, which has its weights, compute as it does now. Collective."""

    def settle(self) -> None:
        """Complete what is under way, before an error or a save by a program. Collective."""

    def on_pause(self) -> None:
        """Undo what the callback changed in this process, such as signal handlers.

        Called after `on_end` of all callbacks, when a program leaves the loop after an iteration and may
        continue it later, and when it continues itself after an error. May be called twice.
        """

    def on_resume(self) -> None:
        """Run before the next iteration after `on_pause`."""

    def on_end(self) -> None:
        """Run after the last iteration of this process; not called after an error."""

    def close(self) -> None:
        """Release resources; called once, also after an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """What a program adds to a configured run.

    Args:
        callbacks: called after all others.
        difficulties: the schedules of curricula with `schedule_type: custom`, by the name of their block.
        fill: fills the model's parameters before the first iteration, in place of their initialization;
            receives the model and this rank's process groups.
        source: what `fill` fills it with, for the record; None: nothing.
    """

    callbacks: Sequence[Callback] = ()
    difficulties: Mapping[str, DifficultySchedule] = field(default_factory=dict)
    fill: Callable[[nn.Module, Groups], None] = lambda model, groups: None
    source: str | None = None


NO_EXTENSIONS = Extensions()


@dataclass(slots=True, kw_only=True)
class Run(RunParts):
    """A training run in this process.

    Args:
        resolved: the configuration.
        schedule: the learning rates.
        state: position and counters.
        tokenizer: the tokenizer of the data.
        datasets: the data by part (train, valid, test).
        streams: part -> function of the first sample that opens this rank's micro-batches.
        step: runs one iteration; the innermost of all steps.
        evaluator: evaluates, and has the results of the last evaluations.
        metrics: writes metrics.
        progress: reports to the agent of this worker.
        throughput: computes rates from tokens and time.
        timers: activities that do not count as training time.
        events: records events of the run.
        load: local folder of the checkpoints to continue from; None: a new run.
        uploads: uploads to an object store, on rank 0 if they are configured.
        base: what a checkpoint of adapters records about the model that they are added to; empty without.
        texts: evaluates tasks and texts; None: none are configured.
        difficulties: the schedules of custom curricula, by the name of their block.
        attention: backend of scaled_dot_product_attention by kind of attention.
        resumes: a checkpoint was loaded.
        callbacks: act around the iterations, in this order.
    """

    resolved: Resolved
    schedule: LearningRateSchedule
    state: TrainState
    tokenizer: Tokenizer
    datasets: Datasets
    streams: Mapping[str, Callable[..., Stream]]
    step: EngineStep
    evaluator: Evaluator
    metrics: Metrics
    progress: Progress
    throughput: Throughput
    timers: Timers = field(default_factory=Timers)
    events: Events = field(default_factory=Events)
    load: Path | None = None
    uploads: Uploads | None = None
    base: dict[str, Any] = field(default_factory=dict)
    texts: TextEvaluation | None = None
    difficulties: Mapping[str, DifficultySchedule] = field(default_factory=dict)
    attention: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = False
    callbacks: list[Callback] = field(default_factory=list)

    @property
    def config(self) -> NeoXConfig:
        """Return the configuration before anything was derived."""
        return self.resolved.config

    @property
    def result(self) -> str | None:
        """Return the last evaluations, one per line; None if the run was stopped before its end."""
        results = self.evaluator.results
        if self.state.stop_reason is not None:
            return None
        lines = [f"{name} {results[part]}" for part, name in EVALUATIONS.items() if part in results]
        return "\n".join(f"{line}, after iteration {self.state.iteration:,}" for line in lines) or None

    def documents(self, samples: range) -> str:
        """Name the documents of training samples."""
        return documents_of(self.datasets.get("train"), samples)

    def add(self, callback: Callback) -> None:
        """Add a callback after the others; checkpoints contain its states."""
        callback.run = self
        self.callbacks.append(callback)
        self.model_states.extend(callback.states())

    def callback(self, kind: type[T]) -> T | None:
        """Return the callback of a class; None if there is none."""
        return next((each for each in self.callbacks if isinstance(each, kind)), None)

    def before_save(self) -> None:
        """Prepare a save; may refuse it. Collective."""
        for callback in self.callbacks:
            callback.before_save()

    def after_save(self, iteration: int) -> None:
        """Report to the callbacks that the checkpoint of an iteration is complete."""
        for callback in self.callbacks:
            callback.after_save(iteration)

    def on_copy(self, model: nn.Module) -> None:
        """Let a copy of the model, which has its weights, compute as it does now. Collective."""
        for callback in self.callbacks:
            callback.on_copy(model)

    def settle(self) -> None:
        """Complete what is under way, before an error or a save by a program. Collective."""
        for callback in self.callbacks:
            callback.settle()

    def recorded(self, position: Position) -> dict[str, Any]:
        """Return the values that a checkpoint at this position records about the run."""
        values = (
            recorded_values(
                self.resolved, fingerprint=self.tokenizer.fingerprint, vocab_size=self.tokenizer.vocab_size
            )
            | self.base
        )
        values[ATTENTION_BACKENDS] = dict(self.attention)
        if self.groups.world.rank == 0:
            values[SAMPLES_DIGEST] = {
                part: digest_of_samples(self.datasets[part], count)
                for part, count in (("train", position.samples), ("valid", position.validation_samples))
                if part in self.datasets
            }
            if "train" in self.datasets:
                values[DOCUMENTS] = documents_in(self.datasets["train"])
        return values
