"""Count the tokens and characters of evaluated batches, for the perplexity per character."""

from collections.abc import Callable, Iterator, Sequence

from neox_config.schema.sections.generation import GenerationSection
from neox_data.tokenizers import Tokenizer
from neox_model.checkpoint.outcome import gather
from neox_model.parallel.groups import Groups
from neox_model.train.data.batch import Batch

__all__ = ["CharacterCount", "character_count", "noted"]


class CharacterCount:
    """Counts what passes through streams.

    Args:
        decode: converts ids to text.
        groups: this job's process groups; one rank of each replica counts.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], groups: Groups) -> None:
        self._decode, self._groups = decode, groups
        self._counts = groups.model.rank == 0 and groups.pipe.rank == 0

    def tokens_per_character(self, sequences: Sequence[Sequence[int]]) -> float:
        """Return the ratio over the sequences of all replicas. Collective over all ranks."""
        mine = (0, 0)
        if self._counts:
            mine = sum(map(len, sequences)), sum(len(self._decode(tokens)) for tokens in sequences)
        tokens, characters = map(sum, zip(*gather(self._groups.control, mine), strict=True))
        return tokens / characters if characters else 0.0


def character_count(
    section: GenerationSection, tokenizer: Tokenizer, groups: Groups
) -> CharacterCount | None:
    """Return the counter for evaluations if `char_level_ppl` is set."""
    return CharacterCount(tokenizer.decode, groups) if section.char_level_ppl else None


def noted(batches: Iterator[Batch], sequences: list[list[int]]) -> Iterator[Batch]:
    """Yield the batches, and add their tokens to a list."""
    for batch in batches:
        sequences += batch.tokens_BS.tolist()
        yield batch
