"""The text of a reply while its tokens arrive: whole characters, and where a stop string ends it."""

from collections.abc import Callable, Sequence

__all__ = ["ReplyText"]

_REPLACEMENT = "\ufffd"
# A character has at most four bytes; after more tokens than this, U+FFFD is what the tokens mean.
_TOKENS_OF_A_CHARACTER = 8


class ReplyText:
    """Decodes tokens as they arrive. Only the last few are decoded again with each new one.

    Args:
        decode: converts ids to text.
        stop_strings: the text ends before the first of them, which is not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop_strings = stop_strings
        self._tokens: list[int] = []
        # Tokens before `_done` have their text; those from `_context` on are decoded with the next ones,
        # because a token may have another text at the beginning than behind others.
        self._context, self._done = 0, 0
        # What was taken, and the text behind it: a text that grew as one string would be copied every time.
        self._taken: list[str] = []
        self._rest = ""
        self.is_stopped, self._is_finished = False, False

    def add(self, token: int) -> bool:
        """Add a token. Returns True if the text now ends with a stop string; further tokens are not added."""
        self._tokens.append(token)
        self._extend(is_last=False)
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
            self._extend(is_last=True)
            self._is_finished = True
        return "".join([*self._taken, self._rest])

    def _extend(self, *, is_last: bool) -> None:
        known = self._decode(self._tokens[self._context : self._done])
        grown = self._decode(self._tokens[self._context :])
        waits = grown.endswith(_REPLACEMENT) and len(self._tokens) - self._done < _TOKENS_OF_A_CHARACTER
        if waits and not is_last:
            return
        self._context, self._done = self._done, len(self._tokens)
        before = len(self._rest)
        self._rest += grown[len(known) :]
        self._stop(before)

    def _stop(self, before: int) -> None:
        """Cut the text at a stop string that ends after `before`; none begins in what was taken."""
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
