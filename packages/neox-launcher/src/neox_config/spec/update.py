"""How weights are updated, and the data that they are updated with, as plain frozen values.

A section of the configuration that is used as it was given is stored unchanged.
"""

from dataclasses import dataclass
from typing import Literal

from neox_config.extras.data_efficiency.fields import DataEfficiencySection
from neox_config.facts.learning_rate import Curve
from neox_config.schema.sections.data import DataSection
from neox_config.schema.sections.objective import ObjectiveSection
from neox_config.schema.sections.optimizer import Optimizer
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_config.spec.values import of

__all__ = ["DataSpec", "LossScaling", "UpdateSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """The number that multiplies the loss, so that small gradients do not vanish in float16.

    Args:
        initial: initial scale; constant if the scale is not dynamic.
        is_dynamic: change the scale after overflows.
        window: updates without overflow after which the scale doubles.
        hysteresis: the scale halves at this overflow and at every later one, until the count starts again.
        consecutive_hysteresis: every update without overflow starts the count again; else doubling does.
        minimum: lower bound of a dynamic scale.
        maximum: upper bound of a dynamic scale; None: there is none.
    """

    initial: float = of("fp16.initial_scale_power", "fp16.loss_scale", "amp.loss_scale")
    is_dynamic: bool = of("fp16.loss_scale", "amp.loss_scale")
    window: int = of("fp16.loss_scale_window", default=1000)
    hysteresis: int = of("fp16.hysteresis", default=2)
    consecutive_hysteresis: bool = of("fp16.consecutive_hysteresis", default=False)
    minimum: float = of("fp16.min_loss_scale", "amp.min_loss_scale", default=1.0)
    maximum: float | None = of("amp.max_loss_scale", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """How weights are updated.

    Args:
        iterations: updates of the run; None: not known before the data is read (train_epochs).
        decay_iterations: iterations over which the learning rate decays, with the warmup; None: likewise.
        curve: learning rate and momentum by update; None: likewise.
        optimizer: the optimizer and its arguments.
        clipping: largest norm of the gradient; 0: no limit.
        normalization: whether losses are averaged over tokens of a micro-batch, or of the whole batch.
        scaling: scale of the loss; None: it is not scaled.
    """

    iterations: int | None = of("train_iters", "train_epochs")
    decay_iterations: int | None = of("lr_decay_iters", "lr_decay_fraction")
    curve: Curve | None = of("lr_decay_style", "scheduler")
    optimizer: Optimizer = of("optimizer")
    clipping: float = of("gradient_clipping")
    normalization: Literal["micro_batch", "global"] = of("loss_normalization")
    scaling: LossScaling | None = of("fp16.enabled", "amp.enabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The samples.

    Args:
        length: tokens of a sample that the model sees.
        behind_input: tokens of a sample behind the model's input, which are predicted alone.
        objective: what is predicted.
        seed: the random seed.
        files: datasets, and how samples are cut from them.
        targets: settings of the objectives.
        tokenizer: the tokenizer.
        efficiency: curricula, which choose samples or shorten them.
    """

    length: int = of("seq_length")
    behind_input: int = of("objective")
    objective: Literal["causal", "masked", "ict"] = of("objective")
    seed: int = of("seed")
    files: DataSection = of("data_path")
    targets: ObjectiveSection = of("objective")
    tokenizer: TokenizerSection = of("tokenizer_type")
    efficiency: DataEfficiencySection = of("curriculum_learning")
