"""The files of the tokenizer."""

from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.schema.sections.tokenizer import TokenizerSection

__all__ = ["tokenizer_files"]


def tokenizer_files(section: TokenizerSection) -> dict[str, str]:
    """Return the files that the tokenizer reads, by parameter; others that are given have no effect."""
    facts = TOKENIZER_FACTS[section.tokenizer_type]
    given = {"vocab_file": section.vocab_file, "merge_file": section.merge_file}
    return {name: path for name, path in given.items() if path is not None and facts.reads(name)}
