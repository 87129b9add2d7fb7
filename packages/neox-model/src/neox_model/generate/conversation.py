"""The turns of an interactive session, and its commands."""

import logging
import re

from neox_data.tokenizers import Tokenizer
from neox_model.generate.engine import Reply

__all__ = ["Conversation"]

logger = logging.getLogger(__name__)

_HELP = "commands: /new starts a new conversation, /history shows it, /help lists the commands"
# One word: a text may begin with a path, or with a comment of a program (//).
_COMMAND = re.compile(r"/\w+")


class Conversation:
    """The prompts and replies so far, which the next prompt continues.

    Turns are joined by newlines. If they do not fit, the oldest are left out, whole.

    Args:
        tokenizer: converts text to ids.
        room: tokens that a prompt with its history may have.
        keeps_history: False: every prompt is a text by itself.
    """

    def __init__(self, tokenizer: Tokenizer, *, room: int, keeps_history: bool) -> None:
        self._tokenizer = tokenizer
        self._room = room
        self._keeps_history = keeps_history
        self._turns: list[str] = []
        # Oldest turns that the last prompt had no room for.
        self._left_out = 0

    def prompt(self, context: str) -> tuple[str, list[int]]:
        """Return the text that the model continues for a new prompt, and its ids."""
        for left_out in range(len(self._turns) + 1):
            self._left_out = left_out
            text = "\n".join([*self._turns[left_out:], context])
            tokens = self._tokenizer.encode(text)
            if len(tokens) <= self._room:
                break
        if self._left_out:
            logger.warning(
                "the oldest %d of %d turns are left out: a conversation has room for seq-length minus "
                "maximum-tokens, %d tokens",
                *(self._left_out, len(self._turns), max(0, self._room)),
            )
        return text, tokens

    def add(self, context: str, reply: Reply) -> None:
        """Add the last prompt and its reply; an interrupted reply counts as far as it is.

        A prompt that is too long by itself leaves the conversation as it was.
        """
        if self._keeps_history and reply.finish_reason != "prompt-too-long":
            del self._turns[: self._left_out]
            self._turns.append(context + reply.text)

    def command(self, line: str) -> str | None:
        """Carry out a command. Returns its answer; None if the line is not a command."""
        if line == "/help":
            return _HELP
        if line == "/history":
            return "\n".join(self._turns) or "(the conversation is empty)"
        if line == "/new":
            self._turns.clear()
            return "(a new conversation)"
        if _COMMAND.fullmatch(line):
            return f"unknown command {line}; /help lists them"
        return None
