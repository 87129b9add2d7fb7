"""Rules about batches, checkpoints and the engine."""

from collections.abc import Iterator

from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig


def micro_batch_or_batch_is_given(c: NeoXConfig) -> Iterator[Problem]:
    """One of the two sizes is the least that a run needs."""
    training = c.training
    sizes = (training.train_batch_size, training.train_micro_batch_size_per_gpu)
    if sizes == (None, None) and not c.elasticity.elasticity.enabled:
        yield Problem(
            "train_micro_batch_size_per_gpu",
            "is missing, and so is train-batch-size",
            "add train-micro-batch-size-per-gpu: 4 (samples that a device handles at once)",
            value="",
        )


def saving_needs_an_interval(c: NeoXConfig) -> Iterator[Problem]:
    """A folder for checkpoints comes with how often to write them."""
    if c.checkpoint.save is not None and c.checkpoint.save_interval is None:
        yield Problem(
            "save", "needs save-interval", "add save-interval: 1000 (iterations between checkpoints)"
        )


def deepspeed_is_the_engine(c: NeoXConfig) -> Iterator[Problem]:
    """There is no other engine."""
    if not c.engine.deepspeed:
        yield Problem("deepspeed", "cannot be false: there is no other engine", "leave it out")
