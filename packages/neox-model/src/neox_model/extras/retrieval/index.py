"""Make an index of blocks: every data-parallel replica embeds some parts, and rank 0 joins them."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from neox_config import Resolved
from neox_config.errors import NeoXError
from neox_config.pluralize import pluralize
from neox_data.block_index import IndexInProgress, begin_index, open_block_index
from neox_data.inverse_cloze import Blocks
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.extras.retrieval.opened import Towers, open_towers
from neox_model.extras.retrieval.towers import BLOCK
from neox_model.generate.run import explained_shortage
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups

__all__ = ["index_in"]

logger = logging.getLogger(__name__)

# Blocks of a part: what is computed again after a process was killed, and the file that is written at once.
_MOST_OF_A_PART, _PARTS_OF_A_REPLICA = 8192, 8


def index_in(groups: Groups, resolved: Resolved) -> str | None:
    """Embed all blocks of the data in the index `block_data_path`. Collective over all ranks.

    Returns:
        What was made, on rank 0.

    Raises:
        NeoXError: there is no checkpoint, or an index of another model or of other texts.
    """
    section = resolved.config.objective
    assert section.block_data_path is not None, "preflight requires it"
    folder, towers = Path(section.block_data_path), open_towers(groups, resolved)
    blocks, origin = towers.blocks, towers.origin
    places_4N = _places(blocks)
    is_complete = any(all_gather_object(groups.control, folder.exists()))
    with shared_outcome(groups.control, f"making the index {folder}", keeps_bugs=True):
        if is_complete:
            open_block_index(folder).check(origin)
        elif groups.world.rank == 0:
            size = -(-places_4N.shape[1] // (groups.data.size * _PARTS_OF_A_REPLICA))
            begin_index(folder, origin, part_blocks=min(size, _MOST_OF_A_PART))
    if is_complete:
        return _result(f"{folder} is complete already", folder, groups)
    with shared_outcome(groups.control, f"making the index {folder}", keeps_bugs=True):
        # Before a rank writes a part: all ranks find the same ones.
        index = IndexInProgress(folder, places_4N.shape[1])
        missing = index.missing()
    if groups.world.rank == 0 and len(missing) < len(index.parts):
        done, parts = len(index.parts) - len(missing), len(index.parts)
        logger.info("continuing: %d of %d parts of the index are there", done, parts)
    batches = _Batches(blocks, section.indexer_batch_size, section.indexer_log_interval)
    with explained_shortage("set a smaller indexer-batch-size"):
        for part in missing[groups.data.rank :: groups.data.size]:
            embeddings_BE = batches.embed(towers, part)
            if groups.model.rank == 0:
                try:
                    index.write(part, embeddings_BE)
                except OSError as error:
                    raise NeoXError(
                        f"the index {folder} cannot be written: {error}; the parts that are written stay: "
                        "make room on the disk, and run the same command again"
                    ) from error
    # Rank 0 joins the parts when all ranks have written theirs.
    with shared_outcome(groups.control, f"making the index {folder}", keeps_bugs=True):
        pass
    with shared_outcome(groups.control, f"making the index {folder}", keeps_bugs=True):
        if groups.world.rank == 0:
            index.complete(places_4N)
    return _result(f"wrote {folder}", folder, groups)


class _Batches:
    """Embeds blocks, a batch at a time, and logs the progress.

    Args:
        blocks: the blocks by the prefix of their dataset.
        size: blocks of a batch.
        interval: batches between two log lines.
    """

    def __init__(self, blocks: Mapping[str, Blocks], size: int, interval: int) -> None:
        self._sources = list(blocks.values())
        self._firsts = np.cumsum([0, *map(len, self._sources)])
        self._size, self._interval = size, interval
        self._batches, self._embedded, self._began = 0, 0, time.monotonic()

    def embed(self, towers: Towers, part: range) -> np.ndarray:
        """Return embeddings_BE of a range of all blocks. Collective over tensor-parallel ranks."""
        found = []
        for first in range(part.start, part.stop, self._size):
            rows = [self._row(number) for number in range(first, min(first + self._size, part.stop))]
            found.append(towers.embed(BLOCK, np.stack(rows)).cpu().numpy())
            self._batches, self._embedded = self._batches + 1, self._embedded + len(rows)
            if self._batches % self._interval == 0:
                speed = f"{self._embedded / (time.monotonic() - self._began):,.0f}"
                logger.info("embedded %s blocks on this rank, %s blocks/s", f"{self._embedded:,}", speed)
        return np.concatenate(found)

    def _row(self, number: int) -> np.ndarray:
        source = int(np.searchsorted(self._firsts, number, side="right")) - 1
        blocks = self._sources[source]
        block = blocks[number - int(self._firsts[source])]
        return blocks.framed(blocks.tokens(block), block.sequence)


def _places(blocks: Mapping[str, Blocks]) -> np.ndarray:
    """Return the number of the dataset, sequence, first token and number of tokens of all blocks."""
    rows = [
        (number, block.sequence, block.begin, block.length)
        for number, source in enumerate(blocks.values())
        for block in (source[each] for each in range(len(source)))
    ]
    return np.array(rows, np.int64).T


def _result(what: str, folder: Path, groups: Groups) -> str | None:
    if groups.world.rank != 0:
        return None
    count, width = open_block_index(folder).embeddings.shape
    return f"{what}: {pluralize(count, 'block')}, embeddings of width {width:,}"
