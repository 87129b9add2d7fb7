"""Keep the failures that only the launcher knows, such as lost hosts and hangs, in the record of the run."""

from collections.abc import Sequence

from neox_config.facts.records import FAILURES
from neox_launcher.controller.terminal import print_message
from neox_launcher.protocol.background import ends_within
from neox_launcher.protocol.failure_record import record_failures
from neox_launcher.protocol.orders import Orders
from neox_launcher.protocol.outcome import Failure
from neox_launcher.worker.reporting import start_of

__all__ = ["keep_failures"]

_WRITE_SECONDS = 10.0


def keep_failures(failures: Sequence[Failure], orders: Orders) -> None:
    """Append failures to those that the agents keep in the log folder; print why if that is not possible.

    Args:
        failures: failures that the launcher found; those of workers are kept by their agents.
        orders: orders of the launch; nothing is kept without a log folder, or of a program that does not
            train.
    """
    folder = orders.record_folder
    if folder is None or not failures:
        return

    def write() -> None:
        record_failures(folder, failures, **start_of(orders.environment))

    try:
        # A file server that hangs may be the cause of the failure.
        if ends_within(_WRITE_SECONDS, write, name="failures"):
            return
        reason = "a file server may be down"
    except OSError as error:
        reason = str(error)
    print_message(f"the failure is not recorded in {folder / FAILURES}: {reason}\n")
