"""Compare the output of a forward pass when a checkpoint is saved and after it is loaded."""

import logging
import math
from collections.abc import Callable, Mapping

from neox_model.checkpoint.errors import CheckpointError

__all__ = ["ForwardCheck"]

logger = logging.getLogger(__name__)


class ForwardCheck:
    """Evaluates the model on the first batch of the training data, without dropout and without an update.

    The result depends on every weight and on the program. It is saved with a checkpoint.

    Args:
        mean_loss: returns the mean loss of the first batch, the same on every rank; collective over all of
            them.
        samples: number of samples of that batch; a batch of another size has another loss.
        tolerance: largest relative difference of equal weights on different layouts and devices.
    """

    def __init__(self, mean_loss: Callable[[], float], *, samples: int, tolerance: float) -> None:
        self._mean_loss = mean_loss
        self._samples = samples
        self._tolerance = tolerance

    def result(self) -> dict[str, float]:
        """Return what is saved with a checkpoint. Collective over all ranks."""
        return {"samples": self._samples, "loss": self._mean_loss()}

    def compare(self, saved: Mapping[str, float] | None, *, source: str) -> None:
        """Compare with the result that was saved. Collective over all ranks.

        Args:
            saved: the result; None: the checkpoint contains none.
            source: the checkpoint, for messages.

        Raises:
            CheckpointError: the loaded model has another loss.
        """
        if saved is None or saved.get("samples") != self._samples:
            why = "it contains no result" if saved is None else "the batch size has changed"
            logger.warning("the forward pass after loading %s cannot be compared: %s", source, why)
            return
        before, now = float(saved["loss"]), self._mean_loss()
        if not math.isclose(before, now, rel_tol=self._tolerance):
            raise CheckpointError(
                f"the model loaded from {source} has the loss {now:.9g} on the first batch of the training "
                f"data, but {before:.9g} when it was saved (relative tolerance {self._tolerance:g}); its "
                "weights or the program differ: resume from another checkpoint, or with the program that "
                "saved it"
            )
        logger.info("the forward pass after loading %s has the loss %.9g, as when it was saved", source, now)
