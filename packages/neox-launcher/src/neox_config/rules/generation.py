"""Rules about text generation."""

from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


def stop_strings_have_characters(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse an empty stop string, which would end every text at its first token."""
    if "" in c.generation.stop_strings:
        yield Problem("stop_strings", "contains an empty string, which ends every text", "remove it")
