"""The parts of a training, which the functions that set it up share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from neox_config import NeoXConfig, Resolved
from neox_config.extras.data_efficiency.difficulty import DifficultySchedule
from neox_config.spec.resume import recorded_values
from neox_data.tokenizers import Tokenizer
from neox_launcher.worker.reporting import Progress
from neox_model.checkpoint.comparison import ATTENTION_BACKENDS, DOCUMENTS, SAMPLES_DIGEST
from neox_model.checkpoint.parts import RunParts
from neox_model.checkpoint.uploads import Uploads
from neox_model.metrics.events import Events
from neox_model.metrics.writers.base import MetricWriter
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import Groups
from neox_model.scoring.evaluation import TextEvaluation
from neox_model.train.compression import TrainedCompression
from neox_model.train.data.datasets import Datasets
from neox_model.train.data.documents import digest_of_samples, documents_in
from neox_model.train.data.position import Position
from neox_model.train.eigenvalues import Eigenvalues
from neox_model.train.hooks.base import Hook
from neox_model.train.state import TrainState

__all__ = ["NO_ADDITIONS", "Additions", "Outputs", "Training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a program adds to a configured training.

    Args:
        hooks: called after all others.
        difficulties: the schedules of curricula with `schedule_type: custom`, by the name of their block.
        fill: fills the model's parameters before the training, in place of their initialization; receives
            the model and this rank's process groups.
        source: what `fill` fills it with, for the record; None: nothing.
    """

    hooks: Sequence[Hook] = ()
    difficulties: Mapping[str, DifficultySchedule] = field(default_factory=dict)
    fill: Callable[[nn.Module, Groups], None] = lambda model, groups: None
    source: str | None = None


NO_ADDITIONS = Additions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(RunParts):
    """The parts of a training that the functions of several modules use.

    Args:
        schedule: the learning rates.
        state: position and counters.
        resolved: the configuration.
        tokenizer: the tokenizer of the data.
        datasets: the data by part (train, valid, test).
        load: local folder of the checkpoints to continue from; None: a new training.
        uploads: uploads to an object store, on rank 0 if they are configured.
        base: what a checkpoint of adapters records about the model that they are added to; empty without.
        difficulties: the schedules of custom curricula, by the name of their block.
        texts: evaluates tasks and texts; None: none are configured.
        compression: compresses the model; None: it is not compressed.
        eigenvalues: measures eigenvalues; None: none are measured.
        attention: backend of scaled_dot_product_attention by kind of attention.
    """

    schedule: LearningRateSchedule
    state: TrainState
    resolved: Resolved
    tokenizer: Tokenizer
    datasets: Datasets
    load: Path | None
    uploads: Uploads | None
    base: dict[str, Any] = field(default_factory=dict)
    difficulties: Mapping[str, DifficultySchedule] = field(default_factory=dict)
    texts: TextEvaluation | None = None
    compression: TrainedCompression | None = None
    eigenvalues: Eigenvalues | None = None
    attention: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> NeoXConfig:
        """Return the configuration before anything was derived."""
        return self.resolved.config

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where hooks report what happens.

    Args:
        writers: receive metrics; empty on ranks other than 0.
        progress: reports to the agent of this worker.
        events: receives events of the run.
    """

    writers: Sequence[MetricWriter]
    progress: Progress
    events: Events
