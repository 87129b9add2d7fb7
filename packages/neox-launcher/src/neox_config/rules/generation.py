"""Rules about text generation."""

from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def stop_strings_have_characters(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse an empty stop string, which would end every text at its first token."""
    if "" in c.generation.stop_strings:
        yield Problem("stop_strings", "contains an empty string, which ends every text", "remove it")


def stop_tokens_are_ids(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a negative id of a token. Whether the tokenizer has an id is known when it is read."""
    for token in c.generation.stop_tokens:
        if token < 0:
            yield Problem("stop_tokens", f"contains {token}, but ids of tokens begin at 0", "remove it")
