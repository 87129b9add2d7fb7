"""Write metrics as TensorBoard events."""

from collections.abc import Mapping
from pathlib import Path

from neox_model.optional import require

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes scalars; a resumed run hides the events after its iteration.

    Args:
        folder: folder of the event files.
        iteration: the run continues after this iteration.

    Raises:
        MissingPackageError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, iteration: int) -> None:
        require("tensorboard", because="writing TensorBoard events", install="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=iteration + 1 if iteration else None)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)

    def flush(self) -> None:
        """Write the events to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
