"""Calls from the thread of the web server to the thread that computes, and updates back.

The web server opens a call for all texts of a client's request. The computing thread takes commands, which it
shares with the other ranks of the model's copy, and delivers updates. Texts are numbered, so that one can be
cancelled before it has a ticket of the engine.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from neox_config.pluralize import pluralize
from neox_model.generate.batch import Request
from neox_model.generate.engine import Update
from neox_model.serve.errors import ApiError

__all__ = ["Call", "Calls", "Command"]


class Command(NamedTuple):
    """What all ranks do before their next step.

    Attributes:
        action: submit the request, cancel the text, or end the loop.
        text: number of the text; -1 for end.
        request: of a text that is submitted.
    """

    action: Literal["submit", "cancel", "end"]
    text: int
    request: Request | None = None


@dataclass(eq=False)
class Call:
    """The texts that are generated for one request of a client. Used in the event loop of the web server.

    Args:
        texts: their numbers.
        loop: the event loop.
    """

    texts: range
    loop: asyncio.AbstractEventLoop
    _updates: asyncio.Queue[tuple[int, Update] | ApiError] = field(default_factory=asyncio.Queue)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield updates with the place of their text in the call, until every text has its reply.

        Raises:
            ApiError: the server failed, or ended before the replies were complete.
        """
        left = len(self.texts)
        while left:
            found = await self._updates.get()
            if isinstance(found, ApiError):
                raise found
            yield found
            left -= found[1].reply is not None

    def deliver(self, found: tuple[int, Update] | ApiError) -> None:
        """Pass on an update of the text with this number, or why there are no more; from any thread."""
        if isinstance(found, tuple):
            found = found[0] - self.texts.start, found[1]
        try:
            self.loop.call_soon_threadsafe(self._updates.put_nowait, found)
        except RuntimeError:
            # The web server has ended by itself, which WebServer.check reports with the reason.
            if not self.loop.is_closed():
                raise


class Calls:
    """The calls that are not complete. Methods may be called in any thread, except where stated.

    Args:
        slots: number of texts that are decoded together.
        max_waiting: maximum number of texts that wait for one of the slots.
    """

    def __init__(self, *, slots: int, max_waiting: int) -> None:
        self._limit = slots + max_waiting
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        # Call of each text that has no reply.
        self._open: dict[int, Call] = {}
        self._number = 0
        self._is_awake = False
        self.refusal: ApiError | None = None
        """Why no calls are accepted, or None."""

    @property
    def count(self) -> int:
        """Number of texts that have no reply."""
        return len(self._open)

    def check_count(self, count: int) -> None:
        """Refuse more texts than one call can ever have.

        Raises:
            ApiError: there are more.
        """
        if count > self._limit:
            raise ApiError(
                400,
                f"{pluralize(count, 'text was', 'texts were')} requested; request at most {self._limit:,}",
            )

    def open(self, requests: Sequence[Request]) -> Call:
        """Open a call for these texts. To be called in the event loop.

        Raises:
            ApiError: too many texts wait, or the server is stopping.
        """
        count = len(requests)
        self.check_count(count)
        with self._changed:
            if self.refusal is not None:
                raise self.refusal
            if len(self._open) + count > self._limit:
                raise ApiError(
                    429,
                    f"{pluralize(len(self._open), 'text is', 'texts are')} waiting or being generated, and "
                    f"{count:,} more would "
                    f"exceed the limit of this server ({self._limit:,}); try again later",
                    code="rate_limit_exceeded",
                )
            call = Call(range(self._number, self._number + count), asyncio.get_running_loop())
            self._number += count
            for text, request in zip(call.texts, requests, strict=True):
                self._open[text] = call
                self._commands.append(Command("submit", text, request))
            self._wake()
        return call

    def cancel(self, call: Call) -> None:
        """Cancel the texts of a call that have no reply."""
        with self._changed:
            for text in call.texts:
                if self._open.pop(text, None) is not None:
                    self._commands.append(Command("cancel", text))
            self._wake()

    def refuse(self, refusal: ApiError) -> None:
        """Accept no more calls."""
        with self._changed:
            self.refusal = self.refusal or refusal

    def fail_all(self, failure: ApiError) -> int:
        """Accept no more calls, and end all open ones with an error. Returns the number of texts."""
        with self._changed:
            self.refusal = failure
            count = len(self._open)
            ended = list(dict.fromkeys(self._open.values()))
            self._commands += [Command("cancel", text) for text in self._open]
            self._open.clear()
            self._wake()
        for call in ended:
            call.deliver(failure)
        return count

    def take(self, *, timeout: float) -> list[Command]:
        """Return the new commands; wait for some at most this many seconds."""
        with self._changed:
            if not self._is_awake and timeout > 0:
                self._changed.wait(timeout)
            self._is_awake = False
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def deliver(self, text: int, update: Update) -> None:
        """Pass an update of a text to its client."""
        with self._changed:
            call = self._open.get(text)
            if call is not None and update.reply is not None:
                del self._open[text]
        if call is not None:
            call.deliver((text, update))

    def _wake(self) -> None:
        self._is_awake = True
        self._changed.notify_all()
