"""The text of tokens behind others: that of all together, less that of those before.

Decoders write some tokens differently at the beginning of a text: those of SentencePiece drop its first
space, those of WordPiece keep the mark of a part of a word. So new tokens are decoded behind earlier ones.
"""

from collections.abc import Callable, Collection, Sequence

__all__ = ["ContinuedText"]

_REPLACEMENT = "\ufffd"
# A character has at most four bytes: its first three, alone, may be written as one U+FFFD each.
_MOST_HELD = 3
# Earlier tokens that are decoded with the new ones.
_CONTEXT_TOKENS = 5


class ContinuedText:
    """Decodes tokens as they arrive. Only the last few are decoded again with each new one.

    Args:
        decode: converts ids to text.
        context: ids of the tokens before; their text is not part of this one.
        joined: ids of tokens whose text depends on those behind them, `Tokenizer.joined_ids`.

    Attributes:
        is_settled: whether the text of every added token was returned.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        context: Sequence[int] = (),
        *,
        joined: Collection[int] = (),
    ) -> None:
        self._decode, self._joined = decode, joined
        self._window = _end(decode, context, joined)
        # The beginning of the window's text that was returned, or belongs to the context.
        self._known = decode(self._window)
        self.is_settled = True

    def add(self, token: int) -> str:
        """Add a token. Returns the new text, without what the next tokens may change."""
        self._window.append(token)
        self.is_settled = token not in self._joined
        return self._next(_MOST_HELD) if self.is_settled else ""

    def finish(self) -> str:
        """Return the rest of the text, with U+FFFD for a character that is not complete."""
        return self._next(0)

    def _next(self, most_held: int) -> str:
        text = self._decode(self._window)
        held = min(most_held, len(text) - len(text.rstrip(_REPLACEMENT)))
        self.is_settled = not held
        # The last character of the context may have been incomplete.
        known = self._known if text.startswith(self._known) else self._known.rstrip(_REPLACEMENT)
        found = text[len(known) : len(text) - held]
        if found:
            self._known = text[: len(text) - held]
        if found and len(self._window) >= 2 * _CONTEXT_TOKENS:
            # Drop the first tokens of a long window, unless the text that is held is theirs.
            window = self._window[-_CONTEXT_TOKENS:]
            text = self._decode(window)
            if len(text) >= held:
                self._window, self._known = window, text[: len(text) - held]
        return found


def _end(
    decode: Callable[[Sequence[int]], str], context: Sequence[int], joined: Collection[int]
) -> list[int]:
    """Return the last tokens of a context: a whole run of joined ones, others before it, and some text."""
    size = 0
    while size < len(context) and context[-1 - size] in joined:
        size += 1
    size += _CONTEXT_TOKENS
    while size < len(context) and not decode(context[-size:]).rstrip(_REPLACEMENT):
        size *= 2
    return list(context[-size:])
