"""Log-probabilities in the forms of OpenAI's two APIs."""

import codecs
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neox_data.tokenizers import Tokenizer
from neox_data.tokenizers.huggingface import LibraryBackedTokenizer

__all__ = [
    "ShownToken",
    "ShownTokens",
    "TokenNames",
    "Top",
    "chat_logprobs",
    "completion_logprobs",
    "of_prompt",
]

# What OpenAI's API shows instead of minus infinity, which JSON does not have.
_IMPOSSIBLE = -9999.0
_REPLACEMENT = "\ufffd"
# SentencePiece writes spaces so.
_SPACE = "\u2581"

Top = Sequence[tuple[int, float]]


class TokenNames:
    """The name and the bytes of each token, as behind others.

    Names are unique: the text of the token; its bytes, if it is only a part of a character; and its entry in
    the vocabulary, if another token has the same text.

    Args:
        tokenizer: the model's tokenizer.

    Attributes:
        text: the name of each token.
        content: its bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        before = [tokenizer.end_of_document]
        known, spelled = len(tokenizer.decode(before)), tokenizer.token_bytes() or ()
        self.content: list[bytes] = []
        same: dict[str, list[int]] = defaultdict(list)
        for token in range(tokenizer.vocab_size):
            text = tokenizer.decode([*before, token])[known:]
            content = text.encode()
            if _REPLACEMENT in text:
                if token in tokenizer.byte_ids:
                    content = bytes([tokenizer.byte_ids[token]])
                elif token < len(spelled):
                    content = spelled[token]
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            self.content.append(content)
            same[text].append(token)
        self.text = dict(_unique(tokenizer, same))


def _unique(tokenizer: Tokenizer, same: dict[str, list[int]]) -> Iterator[tuple[int, str]]:
    """Yield a name of each token, given those that have the same text."""
    used = set(same)
    for text, tokens in same.items():
        entries = {token: tokenizer.entry(token) or "" for token in tokens}
        # The token that is spelled as its text keeps it.
        keeps = (token for token in tokens if text in (entries[token], entries[token].replace(_SPACE, " ")))
        own = tokens[0] if len(tokens) == 1 else next(keeps, None)
        for token in tokens:
            name = text if token == own else entries[token]
            if token != own and (not name or name in used):
                name = f"token:{token}"
            used.add(name)
            yield token, name


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with its log-probability and its place in the text.

    Attributes:
        id: its id.
        value: its log-probability; None for the first token of a text, which nothing precedes.
        top: the most likely tokens at its place.
        offset: where its text begins, in characters.
        content: its bytes in the text; None if it is behind the end of the text.
    """

    id: int
    value: float | None
    top: Top | None
    offset: int
    content: bytes | None = None


class ShownTokens:
    """Finds the places of tokens in a text while they arrive, and returns each when its text is shown.

    Args:
        tokenizer: the model's tokenizer.
        names: names of its tokens.
        context: ids before the text.
        start: where the text begins, in characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, names: TokenNames, context: Sequence[int] = (), start: int = 0
    ) -> None:
        self._names = names
        self._text, self._joined = tokenizer.continued(context), tokenizer.joined_ids
        self._end = self._shown = start
        # Tokens whose text is not certain, this text as far as it is, and tokens that are not shown yet.
        self._waiting: list[ShownToken] = []
        self._new = ""
        self._placed: list[ShownToken] = []

    def add(self, token: int, value: float | None, top: Top | None) -> None:
        """Add a token."""
        self._waiting.append(ShownToken(token, value, top, 0))
        self._new += self._text.add(token)
        if self._new and self._text.is_settled:
            self._place()

    def show(self, text: str) -> list[ShownToken]:
        """Return the tokens that are in the text that was shown, which grows by this."""
        self._shown += len(text)
        starts = [token.offset for token in self._placed[1:]] + [self._end] * bool(self._placed)
        count = sum(end <= self._shown for end in starts)
        shown, self._placed = self._placed[:count], self._placed[count:]
        return shown

    def finish(self, *, is_cut: bool) -> list[ShownToken]:
        """Return the remaining tokens at the end of the text.

        Args:
            is_cut: the text ends before a stop string. Tokens behind it have no content.
        """
        self._new += self._text.finish()
        self._place()
        placed, self._placed = self._placed, []
        if not is_cut:
            return placed
        ends = [token.offset for token in placed[1:]] + [self._end]
        return [self._cut(token, end) for token, end in zip(placed, ends, strict=False)]

    def behind(self, token: int, value: float | None, top: Top | None) -> ShownToken:
        """Return a token that ends the text, and is not in it."""
        return ShownToken(token, value, top, self._end)

    def _place(self) -> None:
        """Divide new text over the tokens that waited for it."""
        contents = [self._names.content[token.id] for token in self._waiting]
        joined, text = b"".join(contents), self._new.encode()
        # The space in front of the first word of a document.
        surplus = len(joined) - len(text) if joined.endswith(text) else 0
        if joined[surplus:].decode(errors="replace") != self._new:
            # A run of bytes that is not valid, each of which is U+FFFD.
            contents = [
                _REPLACEMENT.encode() if token.id in self._joined else content
                for token, content in zip(self._waiting, contents, strict=True)
            ]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        place = 0
        for token, content in zip(self._waiting, contents, strict=True):
            missing = min(surplus, len(content))
            surplus -= missing
            offset = self._end + min(place, len(self._new))
            self._placed.append(replace(token, offset=offset, content=content[missing:]))
            place += len(decoder.decode(content[missing:]))
        self._end += len(self._new)
        self._waiting, self._new = [], ""

    def _cut(self, token: ShownToken, end: int) -> ShownToken:
        assert token.content is not None, "the token was placed"
        if token.offset >= self._shown:
            return replace(token, content=None)
        if end <= self._shown:
            return token
        # Bytes of a character that began in another token stay as they are.
        text = token.content.decode(errors="surrogateescape")[: self._shown - end]
        return replace(token, content=text.encode(errors="surrogateescape"))


def of_prompt(
    tokenizer: Tokenizer,
    names: TokenNames,
    text: str,
    tokens: Sequence[int],
    values: Sequence[float | None],
    top: Sequence[Top | None],
) -> list[ShownToken]:
    """Return the tokens of a prompt with their places in its text.

    Those that the tokenizer adds to a text are not in it.

    Args:
        tokenizer: the model's tokenizer.
        names: names of its tokens.
        text: the text of the prompt.
        tokens: its ids.
        values: their log-probabilities.
        top: the most likely tokens at each place.
    """
    rows = list(zip(tokens, values, top, strict=True))
    shown = ShownTokens(tokenizer, names)
    is_added = [False] * len(rows)
    # Otherwise the client sent ids, and this is their text.
    if isinstance(tokenizer, LibraryBackedTokenizer) and tokenizer.encode(text) == list(tokens):
        is_added = tokenizer.is_added(text)
    for row, added in zip(rows, is_added, strict=True):
        if not added:
            shown.add(*row)
    found, left = [], deque(shown.finish(is_cut=False))
    for row, added in zip(rows, is_added, strict=True):
        after = left[0].offset if left else len(text)
        one = ShownToken(*row, offset=after) if added else left.popleft()
        found.append(replace(one, offset=min(one.offset, len(text))))
    return found


def finite(value: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return max(value, _IMPOSSIBLE)


def completion_logprobs(names: TokenNames, tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/completions, for consecutive tokens."""
    tops = [{names.text[token]: finite(value) for token, value in one.top or ()} or None for one in tokens]
    return {
        "tokens": [names.text[one.id] for one in tokens],
        "token_logprobs": [None if one.value is None else finite(one.value) for one in tokens],
        "top_logprobs": tops if any(one.top is not None for one in tokens) else None,
        "text_offset": [one.offset for one in tokens],
    }


def chat_logprobs(names: TokenNames, tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of /v1/chat/completions.

    The bytes of the tokens, joined, are the message. Tokens behind its end are left out.
    """

    def shown(token: int, value: float, content: bytes) -> dict[str, Any]:
        return {"token": names.text[token], "logprob": finite(value), "bytes": list(content)}

    content = [
        {
            **shown(one.id, one.value, one.content),
            "top_logprobs": [shown(token, value, names.content[token]) for token, value in one.top or ()],
        }
        for one in tokens
        if one.content is not None and one.value is not None
    ]
    return {"content": content, "refusal": None}
