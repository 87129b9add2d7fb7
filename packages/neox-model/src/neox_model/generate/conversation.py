"""The turns of an interactive session, and its commands."""

import logging

from neox_data.tokenizers import Tokenizer
from neox_model.generate.engine import Reply

__all__ = ["Conversation"]

logger = logging.getLogger(__name__)

_HELP = "commands: /new starts a new conversation, /history shows it, /help lists the commands"


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

    def prompt(self, context: str) -> tuple[str, list[int]]:
        """Return the text that the model continues for a new prompt, and its ids."""
        given = len(self._turns)
        while True:
            text = "\n".join([*self._turns, context])
            tokens = self._tokenizer.encode(text)
            if len(tokens) <= self._room or not self._turns:
                break
            del self._turns[0]
        if left_out := given - len(self._turns):
            logger.warning(
                "the oldest %d of %d turns are left out: a conversation has room for seq-length minus "
                "maximum-tokens, %d tokens",
                *(left_out, given, max(0, self._room)),
            )
        return text, tokens

    def add(self, context: str, reply: Reply) -> None:
        """Add a prompt and its reply; an interrupted reply counts as far as it is."""
        if self._keeps_history and reply.finish_reason != "prompt-too-long":
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
        return None
