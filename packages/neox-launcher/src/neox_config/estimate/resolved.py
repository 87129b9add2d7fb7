"""Estimates of resolved configurations, and the assumed vocabulary size."""

from neox_config.estimate import Estimate, estimate
from neox_config.estimate.setup import read_vocabulary_size, setup_of
from neox_config.facts.tokenizers import TOKENIZER_FACTS
from neox_config.schema.config import NeoXConfig
from neox_config.spec.resolve import Resolved

__all__ = ["estimate_resolved", "vocabulary_of"]


def estimate_resolved(
    resolved: Resolved, *, vocab_size: int | None = None, device: str = "cuda"
) -> tuple[Estimate, str]:
    """Estimate the cost of a resolved configuration, and return it with the origin of the vocabulary size.

    Args:
        resolved: the configuration.
        vocab_size: number of entries of the tokenizer; None reads its file, or uses the usual number.
        device: type of the devices: cuda or cpu.

    Raises:
        ConfigError: The tokenizer's file is not a valid vocabulary.
    """
    entries, origin = vocabulary_of(resolved.config, vocab_size)
    return estimate(setup_of(resolved, vocab_size=entries), device=device), origin


def vocabulary_of(config: NeoXConfig, given: int | None) -> tuple[int, str]:
    """Return the number of entries of the tokenizer, and the origin of that number."""
    if given is not None:
        return given, "given"
    found = read_vocabulary_size(config.tokenizer)
    if found is not None:
        return found, "the tokenizer's"
    kind = config.tokenizer.tokenizer_type
    facts = TOKENIZER_FACTS[kind]
    reason = "its file is not read" if facts.entries_of is None else "file not found"
    return facts.usual_entries, f"usual for {kind}; {reason}, see --vocab-size"
