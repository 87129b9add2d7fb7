"""How long to train, on how much at a time, and how often to evaluate."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["TrainingSection"]


class TrainingSection(Section, resume="training"):
    """Iterations, batch sizes, seed and evaluation."""

    train_iters: int = param(
        origin="Meg",
        gt=0,
        doc="Updates of the weights over the whole life of this training, restarts included.",
    )
    train_batch_size: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="micro-batch * accumulation * data-parallel size",
        doc="Samples of one update over all devices.",
    )
    train_micro_batch_size_per_gpu: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="train_batch_size / (accumulation * data-parallel size)",
        doc="Samples that a device handles at once.",
    )
    gradient_accumulation_steps: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="train_batch_size / (micro-batch * data-parallel size), or 1",
        doc="Micro-batches whose gradients are summed for one update.",
    )
    loss_normalization: Literal["micro_batch", "global"] = param(
        "micro_batch",
        origin="ours",
        doc="What the loss is a mean over: the unmasked tokens of each micro-batch and then these "
        "means, or all "
        "unmasked tokens of the global batch.",
    )
    seed: int = param(
        1234,
        origin="Meg",
        ge=0,
        lt=2**32,
        doc="Start of every random number: weights, dropout and data order.",
    )
    nonfinite_patience: int = param(
        3,
        origin="ours",
        resume="free",
        gt=0,
        doc="The training ends with an error after this many updates in a row that were not applied because "
        "a loss or a gradient was not finite. In float16 they count only while the loss scale cannot fall.",
    )
    eval_iters: int = param(
        100, origin="Meg", resume="free", ge=0, doc="Batches of one evaluation; 0 evaluates nothing."
    )
    eval_interval: int = param(1000, origin="Meg", resume="free", gt=0, doc="Iterations between evaluations.")
    exit_interval: int | None = param(
        None,
        origin="Meg",
        resume="free",
        gt=0,
        none_means="train to the end",
        doc="Save and stop at the first iteration that this divides, after an evaluation that is due there.",
    )
    adlr_autoresume: bool = param(
        False, origin="Meg", resume="free", doc="Ask NVIDIA's ADLR cluster service when to stop."
    )
    adlr_autoresume_interval: int = param(
        1000,
        origin="Meg",
        resume="free",
        gt=0,
        used_when="adlr_autoresume is true",
        doc="Iterations between those questions.",
    )
