"""Compare the output of a forward pass when a checkpoint is saved and after it is loaded."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import Any, Self

from neox_model.checkpoint.errors import CheckpointError
from neox_model.parallel.control import all_gather_object
from neox_model.train.callbacks.record import sample_digests
from neox_model.train.evaluate import Evaluator
from neox_model.train.run import Callback, Run

__all__ = ["ForwardCheck"]

logger = logging.getLogger(__name__)

# Largest relative differences of the same weights' losses on different layouts and devices.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


class ForwardCheck(Callback):
    """Evaluates the model on the first batch of the training data, without dropout and without an update.

    The result depends on every weight and on the program. It is saved with a checkpoint, and compared after
    loading.

    Args:
        mean_loss: returns the mean loss of the first batch, the same on every rank; collective over all of
            them.
        digest: returns a digest of that batch, the same on every rank and layout; collective, too.
        samples: number of samples of that batch; a batch of another size has another loss.
        computes_in: precision of the forward pass.
    """

    def __init__(
        self,
        mean_loss: Callable[[], float],
        digest: Callable[[], str],
        *,
        samples: int,
        computes_in: str,
    ) -> None:
        self._mean_loss = mean_loss
        self._compute_digest = digest
        self._samples = samples
        self._computes_in = computes_in

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if `checkpoint_validation_with_forward_pass` is set."""
        if not run.config.checkpoint.checkpoint_validation_with_forward_pass:
            return None
        batch = run.resolved.run.batch
        evaluator = Evaluator(
            run.step.evaluate,
            run.streams,
            iterations=1,
            accumulation=batch.accumulation,
            samples_per_iteration=batch.whole,
        )

        def digest_of_first_batch() -> str:
            with closing(run.streams["train"](0)) as stream:
                batches = list(islice(stream, batch.accumulation))
            held = [digest for batch in batches for digest in sample_digests(batch)]
            found = {digest for digests in all_gather_object(run.groups.control, held) for digest in digests}
            return sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]

        return cls(
            lambda: evaluator.evaluate("train", 0).loss,
            digest_of_first_batch,
            samples=batch.whole,
            computes_in=run.resolved.run.precision.computes_in,
        )

    def on_load(self) -> None:
        """Compare the loaded model with the saved result."""
        section = self.run.config.checkpoint
        if self.run.resumes and not section.finetune:
            self.compare(
                self.run.state.forward_pass, source=f"{section.load}, iteration {self.run.state.iteration}"
            )
        self.run.state.forward_pass = None

    def before_save(self) -> None:
        """Compute the result of the state that is saved."""
        self.run.state.forward_pass = self.result()

    def result(self) -> dict[str, Any]:
        """Return what is saved with a checkpoint. Collective over all ranks."""
        return {
            "samples": self._samples,
            "loss": self._mean_loss(),
            "batch": self._digest,
            "precision": self._computes_in,
        }

    def compare(self, saved: Mapping[str, Any] | None, *, source: str) -> None:
        """Compare with the result that was saved. Collective over all ranks.

        Args:
            saved: the result; None: the checkpoint contains none.
            source: the checkpoint, for messages.

        Raises:
            CheckpointError: the loaded model has another loss.
        """
        why = self._why_not(saved)
        if saved is None or why is not None:
            logger.warning("the forward pass after loading %s cannot be compared: %s", source, why)
            return
        before, now = float(saved["loss"]), self._mean_loss()
        precision = saved["precision"]
        tolerance = max(_TOLERANCES[each] for each in (precision, self._computes_in))
        if not math.isclose(before, now, rel_tol=tolerance):
            raise CheckpointError(
                f"the model loaded from {source} has the loss {now:.9g} on the first batch of the training "
                f"data in {self._computes_in}, but {before:.9g} in {precision} when it was saved (relative "
                f"tolerance {tolerance:g}); its weights or the program differ: resume from another "
                "checkpoint, or with the program that saved it, or set "
                "checkpoint-validation-with-forward-pass: false to use it as it is"
            )
        logger.info("the forward pass after loading %s has the loss %.9g, as when it was saved", source, now)

    @cached_property
    def _digest(self) -> str:
        return self._compute_digest()

    def _why_not(self, saved: Mapping[str, Any] | None) -> str | None:
        if saved is None:
            return "it contains no result"
        if saved["samples"] != self._samples:
            return "the batch size has changed"
        if saved["batch"] != self._digest:
            return "the first batch of the training data has changed"
        if saved.get("micro_batch"):
            return "its loss is a mean over micro-batches, as an older version computed it"
        return None if saved["precision"] in _TOLERANCES else "its precision is unknown"
