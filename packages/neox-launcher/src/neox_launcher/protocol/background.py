"""Output in the background: a thread writes what a bounded queue holds, so that no writer waits for a reader.

A reader that stops (a pager, a stalled connection) and a file system that hangs block only the thread. What
does not fit into the queue is dropped, and a line in its place states how much. While a reader is only slow
(`is_behind`), a writer may read less itself, so that nothing is lost.
"""

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from neox_launcher.protocol.stop_signals import signals_blocked

__all__ = ["BackgroundQueue", "LossyFile", "describe_loss", "ends_within", "start_thread"]

Item = TypeVar("Item")

_POLL_SECONDS = 0.05
_STOPPED_SECONDS = 2.0


class BackgroundQueue(Generic[Item]):
    """A bounded queue and the thread that delivers its items in order.

    Args:
        deliver: delivers one item; called in the thread, and may block. If it raises, everything that waits
            is discarded, and `put` and `check` raise the same exception.
        limit: bytes that may wait; more are dropped until half of them are delivered.
        loss_item: returns the item that replaces dropped ones, given their size in bytes.
        name: name of the thread.
    """

    def __init__(
        self, deliver: Callable[[Item], None], *, limit: int, loss_item: Callable[[int], Item], name: str
    ) -> None:
        self._deliver, self._limit, self._loss_item, self._name = deliver, limit, loss_item, name
        self._items: deque[tuple[Item, int]] = deque()
        self._urgent: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._waiting = self._lost = self._delivered = 0
        self._is_dropping = False
        self._current: list[Item] = []
        self._delivered_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """Whether everything has been delivered."""
        with self._changed:
            return not self._has_items and not self._current

    @property
    def is_behind(self) -> bool:
        """Whether more than half of the limit waits, and the destination still takes items."""
        with self._changed:
            is_taking = time.monotonic() - self._delivered_at < _STOPPED_SECONDS
            return is_taking and self._waiting > self._limit // 2

    def put(self, item: Item, size: int, *, is_kept: bool = False, is_urgent: bool = False) -> bool:
        """Add an item; never waits.

        Args:
            item: the item.
            size: its size in bytes.
            is_kept: add it even if the queue is full.
            is_urgent: deliver it before everything that is not urgent.

        Returns:
            Whether it was added, and not dropped.
        """
        self.check()
        with self._changed:
            self._is_dropping = self._waiting + size > (
                self._limit // 2 if self._is_dropping else self._limit
            )
            is_added = is_kept or not self._is_dropping
            if is_added:
                self._add(item, size, is_urgent=is_urgent)
            else:
                self._lost += size
            self._changed.notify_all()
            if self._thread is None:
                self._thread = start_thread(self._run, self._name)
        return is_added

    def wait(self, seconds: float, *, is_patient: bool = False) -> bool:
        """Wait until everything has been delivered, and return whether it has.

        Args:
            seconds: longest time to wait.
            is_patient: start again with every item that is delivered.
        """
        deadline, seen = time.monotonic() + seconds, self._delivered
        while not self.is_empty and self._error is None and time.monotonic() < deadline:
            with self._changed:
                self._changed.wait(_POLL_SECONDS)
            if is_patient and self._delivered != seen:
                deadline, seen = time.monotonic() + seconds, self._delivered
        return self.is_empty

    def check(self) -> None:
        """Raise the exception that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def discard(self) -> list[Item]:
        """Remove and return the items that wait, and the one that is being delivered.

        If something was dropped, the last item states how much.
        """
        with self._changed:
            self._replace_lost()
            items = [*self._current, *(item for item, _ in (*self._urgent, *self._items))]
            self._current = []
            self._clear()
        return items

    def _add(self, item: Item, size: int, *, is_urgent: bool) -> None:
        if not self._has_items and not self._current:
            self._delivered_at = time.monotonic()
        if is_urgent:
            self._urgent.append((item, size))
        else:
            self._replace_lost()
            self._items.append((item, size))
        self._waiting += size

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current = []
                self._changed.notify_all()
                while not self._has_items:
                    self._changed.wait()
                if not self._urgent and not self._items:
                    self._replace_lost()
                item, size = (self._urgent or self._items).popleft()
                self._waiting -= size
                self._current = [item]
            try:
                self._deliver(item)
            except Exception as error:
                with self._changed:
                    self._error = error
                    self._current = []
                    self._clear()
                    self._changed.notify_all()
                return
            self._delivered += 1
            self._delivered_at = time.monotonic()

    @property
    def _has_items(self) -> bool:
        return bool(self._urgent or self._items or self._lost)

    def _clear(self) -> None:
        self._urgent.clear()
        self._items.clear()
        self._waiting = self._lost = 0

    def _replace_lost(self) -> None:
        if self._lost:
            self._items.append((self._loss_item(self._lost), 0))
            self._lost = 0


class LossyFile:
    """Writes to a descriptor; data that cannot be written is counted, and one line replaces it later.

    Args:
        descriptor: open for writing; not closed.
        report: called with the first error, and with the first one after each success.
    """

    def __init__(self, descriptor: int, *, report: Callable[[OSError], None]) -> None:
        self._descriptor, self._report = descriptor, report
        self._lost, self._reason = 0, ""

    def write(self, data: bytes) -> None:
        """Write all data, or count it as lost."""
        notice = describe_loss(self._lost, self._reason) if self._lost else b""
        rest = memoryview(notice + data)
        try:
            while rest:
                rest = rest[self._write_some(rest) :]
        except OSError as error:
            is_first = not self._lost
            # With what was lost before, unless the line about it is written.
            self._lost = len(rest) if len(rest) <= len(data) else self._lost + len(data)
            self._reason = error.strerror or str(error)
            if is_first:
                self._report(error)
        else:
            self._lost = 0

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:
            # Another process that shares the terminal has made it non-blocking.
            select.select([], [self._descriptor], [])
            return 0


def describe_loss(size: int, reason: str) -> bytes:
    """Return the line that replaces lost output."""
    return f"\n[neox-launch: {size:,} bytes of output are missing here: {reason}]\n".encode()


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that receives no signals: these are for the main thread."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    # The thread inherits the mask.
    with signals_blocked(signal.valid_signals()):
        thread.start()
    return thread


def ends_within(seconds: float, act: Callable[[], object], *, name: str) -> bool:
    """Call a function in a thread, because a file server may hang; return whether it has ended in time.

    Args:
        seconds: longest time to wait.
        act: the function; an exception that it raises in time is raised here.
        name: name of the thread.
    """

    def call(_: None) -> None:
        act()

    queue = BackgroundQueue[None](call, limit=0, loss_item=lambda size: None, name=name)
    queue.put(None, 0, is_kept=True)
    has_ended = queue.wait(seconds)
    queue.check()
    return has_ended
