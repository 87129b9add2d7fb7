"""Find the blocks of an index that are best for a query, or measure how many queries find their block."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from neox_config import Resolved
from neox_config.pluralize import pluralize
from neox_config.schema.sections.objective import ObjectiveSection
from neox_data.block_index import BlockIndex, open_block_index
from neox_data.errors import DataError
from neox_data.inverse_cloze import Blocks, InverseClozeDataset, framed
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.extras.retrieval.opened import Towers, open_towers
from neox_model.extras.retrieval.search import best_blocks, better_blocks
from neox_model.extras.retrieval.towers import BLOCK, QUERY
from neox_model.generate.run import explained_shortage
from neox_model.parallel.groups import Groups
from neox_model.train.data.datasets import held_out_blocks

__all__ = ["Recall", "find_in"]

logger = logging.getLogger(__name__)

_USUAL = (1, 5, 20)
# A query and its block without it: number of the dataset, its samples, and the number of the sample.
_Sample = tuple[int, InverseClozeDataset, int]
# Queries of a measurement, which are spread evenly over the documents.
_MOST_QUERIES = 4096
_PARTS_IN_WORDS = {"test": "test", "valid": "validation"}


@dataclass(frozen=True, slots=True)
class Recall:
    """How many queries find the block that they were taken from.

    Args:
        part: the documents of the queries, in words.
        queries: number of queries.
        blocks: number of blocks that are searched.
        found: share of the queries whose block is among the best k, by k.
    """

    part: str
    queries: int
    blocks: int
    found: Mapping[int, float]

    def __str__(self) -> str:
        shares = ", ".join(f"top {k} {share:.1%}" for k, share in self.found.items())
        by_chance = ", ".join(f"{100 * min(1.0, k / self.blocks):.2g}%" for k in self.found)
        return (
            f"{pluralize(self.queries, 'sentence')} of the {self.part} documents, each among "
            f"{pluralize(self.blocks, 'block')}: {shares} (by chance {by_chance})"
        )


def find_in(groups: Groups, resolved: Resolved) -> "str | Recall":
    """Search the index `block_data_path`. Collective over all ranks.

    Without `block_query`, measure how many sentences find their block.

    Raises:
        NeoXError: there is no checkpoint or no index, or the index belongs to another checkpoint.
    """
    section, towers = resolved.config.objective, open_towers(groups, resolved)
    assert section.block_data_path is not None, "preflight requires it"
    with shared_outcome(groups.control, "opening the index", keeps_bugs=True):
        index = open_block_index(Path(section.block_data_path))
        index.check(towers.origin)
    query = section.block_query
    with explained_shortage("use a device with more memory"):
        if query is None:
            part, held_out = held_out_blocks(resolved.data)
            samples = _samples(part, held_out, list(towers.blocks), seed=resolved.data.seed)
            return _recall(section, towers, index, part, samples)
        return _search(query, section.block_count, towers, index)


def _search(query: str, count: int, towers: Towers, index: BlockIndex) -> str:
    """Return the best blocks for a query, with their scores, places and texts."""
    tokenizer, sources = towers.tokenizer, list(towers.blocks.values())
    tokens = np.array(tokenizer.encode(query), np.int64)
    length = sources[0].seq_length
    if len(tokens) > length - 2:
        logger.warning(
            "the query has %s and is cut to %d (seq-length)", pluralize(len(tokens), "token"), length - 2
        )
    row_2S = framed(tokens[: length - 2], length, tokenizer.end_of_document)
    scores_QK, rows_QK = best_blocks(towers.embed(QUERY, row_2S[None]), index.embeddings, count)
    found = []
    for place, (score, row) in enumerate(
        zip(scores_QK[0].tolist(), rows_QK[0].tolist(), strict=True), start=1
    ):
        source, sequence, begin, size = (int(value) for value in index.places[:, row])
        name = list(towers.blocks)[source]
        span = f"tokens {begin:,} to {begin + size - 1:,}"
        where = f"{place}. score {score:.4g}, document {sequence:,} of {name}, {span}"
        text = tokenizer.decode(sources[source].indexed.get(sequence, begin, size).tolist())
        found += [where, *(f"   {line}" for line in text.splitlines()), ""]
    return "\n".join(found).rstrip("\n")


def _recall(
    section: ObjectiveSection, towers: Towers, index: BlockIndex, part: str, samples: list[_Sample]
) -> Recall:
    """Measure how many sentences of held-out documents find their block.

    The sentence is taken out of its block, which competes with all other blocks of the index.
    """
    if not samples:
        raise DataError(
            f"no block of the {_PARTS_IN_WORDS[part]} documents has two sentences; use other texts"
        )
    count, size = min(len(samples), _MOST_QUERIES), section.indexer_batch_size
    chosen = [samples[number] for number in np.linspace(0, len(samples) - 1, count).astype(int)]
    better_Q = torch.cat(
        [_better(towers, index, chosen[first : first + size]) for first in range(0, count, size)]
    )
    best = section.report_topk_accuracies or _USUAL
    found = {k: float((better_Q < k).double().mean()) for k in best}
    return Recall(_PARTS_IN_WORDS[part], count, len(index), found)


def _samples(part: str, blocks: Mapping[str, Blocks], prefixes: list[str], *, seed: int) -> list[_Sample]:
    """Return a query for each block of at least two sentences."""
    return [
        (prefixes.index(prefix), dataset, item)
        for prefix, source in blocks.items()
        for dataset in [
            InverseClozeDataset(source, name=part, num_samples=len(source), seed=seed, query_in_block=0.0)
        ]
        for item in range(len(source))
        # In a block of one sentence, this sentence would stay.
        if len(source[dataset.block_of(item)].ends) > 1
    ]


def _better(towers: Towers, index: BlockIndex, samples: list[_Sample]) -> torch.Tensor:
    """Return for each sample the number of blocks that are as good for its query as its own."""
    rows_B22S, places = np.stack([dataset[item] for _, dataset, item in samples]), []
    for source, dataset, item in samples:
        ((sequence, begin, _),) = dataset.pieces(item)
        places.append((source, sequence, begin))
    query_BE, block_BE = towers.embed(QUERY, rows_B22S[:, 0]), towers.embed(BLOCK, rows_B22S[:, 1])
    own_B = torch.tensor([index.row_of(place) for place in places], device=query_BE.device)
    return better_blocks(query_BE, (query_BE * block_BE).sum(dim=1), own_B, index.embeddings)
