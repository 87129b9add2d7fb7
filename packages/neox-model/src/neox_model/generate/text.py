"""The text of a reply while its tokens arrive: whole characters, and where a stop string ends it."""

from collections.abc import Sequence

from neox_data.tokenizers.continued import ContinuedText

__all__ = ["ReplyText"]


class ReplyText:
    """The text of tokens that arrive, up to a stop string.

    Args:
        text: decodes them.
        stop_strings: the text ends before the first of them, which is not part of it.
    """

    def __init__(self, text: ContinuedText, stop_strings: Sequence[str] = ()) -> None:
        self._text, self._stop_strings = text, stop_strings
        # What was taken, and the text behind it: a text that grew as one string would be copied every time.
        self._taken: list[str] = []
        self._rest = ""
        self.is_stopped, self._is_finished = False, False

    def add(self, token: int) -> bool:
        """Add a token. Returns True if the text now ends with a stop string; further tokens are not added."""
        self._extend(self._text.add(token))
        return self.is_stopped

    def take(self) -> str:
        """Return the text since the last call, without what may become part of a stop string."""
        end = len(self._rest) - (0 if self.is_stopped or self._is_finished else self._held())
        taken, self._rest = self._rest[:end], self._rest[end:]
        self._taken.append(taken)
        return taken

    def finish(self) -> str:
        """Return the whole text, with U+FFFD for a character that is not complete."""
        if not self.is_stopped and not self._is_finished:
            self._extend(self._text.finish())
            self._is_finished = True
        return "".join([*self._taken, self._rest])

    def _extend(self, text: str) -> None:
        """Add text, and cut it at a stop string that ends in it; none begins in what was taken."""
        before = len(self._rest)
        self._rest += text
        found = [
            place
            for stop in self._stop_strings
            if (place := self._rest.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            self._rest, self.is_stopped = self._rest[: min(found)], True

    def _held(self) -> int:
        """Return how many characters at the end are the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self._rest) + 1))
                if self._rest.endswith(stop[:length])
            ),
            default=0,
        )
