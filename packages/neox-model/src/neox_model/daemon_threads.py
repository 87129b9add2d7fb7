"""Functions in threads that the end of the process does not wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

__all__ = ["in_daemon_thread"]


def in_daemon_thread(action: Callable[[], None]) -> Future[None]:
    """Start a function in a thread that the end of this process does not wait for.

    If it may be inside torch then, the process must end by `exit_worker`: a finalization of Python that ends
    such a thread aborts.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            action()
            future.set_result(None)
        except Exception as error:  # Raised again where the result is read.
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
