"""Load the towers of a retrieval model, and embed texts with them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neox_config import Resolved
from neox_config.errors import NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_config.spec.resume import recorded_values
from neox_data.indexed.layout import idx_path
from neox_data.inverse_cloze import Blocks
from neox_data.manifest import tokens_sha256
from neox_data.tokenizers import Tokenizer
from neox_data.whole_files import sha256_of_file
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.model import build_model
from neox_model.assembly.zero_sharding import without_zero
from neox_model.checkpoint.contents import manifest_sha256
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import load_weights
from neox_model.checkpoint.outcome import shared_outcome
from neox_model.checkpoint.storage import find_storage
from neox_model.extras.retrieval.towers import TowerModel
from neox_model.generate.run import explained_shortage
from neox_model.parallel.control import all_gather_object
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer
from neox_model.train.data.batch import as_tower_inputs
from neox_model.train.data.datasets import all_blocks, check_tokenizers

__all__ = ["Towers", "open_towers"]

logger = logging.getLogger(__name__)

# Characters of a SHA-256 that identify a file among those of a project.
_SHORT = 16


@dataclass(frozen=True, slots=True)
class Towers:
    """What makes an index, or searches one.

    Args:
        model: the towers of a checkpoint, without dropout.
        tokenizer: the tokenizer of the model.
        blocks: the blocks by the prefix of their dataset.
        origin: what the embeddings of an index depend on, by name.
    """

    model: TowerModel
    tokenizer: Tokenizer
    blocks: Mapping[str, Blocks]
    origin: Mapping[str, Any]

    @torch.inference_mode()
    def embed(self, tower: str, rows_B2S: np.ndarray) -> Tensor:
        """Return embeddings_BE of texts, float32, on the device. Collective over tensor-parallel ranks.

        Args:
            tower: QUERY or BLOCK.
            rows_B2S: int64, tokens, and 1 for these, 0 for padding.

        Raises:
            NeoXError: an embedding is not finite.
        """
        inputs = as_tower_inputs(torch.from_numpy(rows_B2S))
        found = self.model.embed(tower, tuple(each.to(computing_device()) for each in inputs))
        if not found.isfinite().all():
            raise NeoXError(
                f"the {tower} tower returns embeddings that are not finite (NaN or infinite); use another "
                "checkpoint, or precision: bfloat16 or fp32"
            )
        return found


def open_towers(groups: Groups, resolved: Resolved) -> Towers:
    """Load the towers, and open the data. Collective over all ranks.

    Raises:
        CheckpointError: there is no checkpoint, or it contains a different model.
        NeoXError: a dataset cannot be read, or there is too little memory.
    """
    section, places = resolved.config.objective, resolved.config.checkpoint
    tokenizer = load_tokenizer(resolved.config.tokenizer)
    vocab_size = tokenizer.vocab_size
    check_tokenizers(resolved.data, tokenizer, entries=resolved.model.embedding.entries(vocab_size))
    load = section.ict_load or places.load
    assert load is not None, "preflight requires it"
    storage = find_storage(places, groups)
    folder = folder_with_weights(
        load, groups, cache=places.store_cache, storage=storage, averages=places.load_ema
    )
    with explained_shortage("use a device with more memory"):
        model = build_model(resolved.model, without_zero(resolved.run), groups, vocab_size=vocab_size)
        assert isinstance(model, TowerModel)
        model.to(device=computing_device(), dtype=DTYPES[resolved.run.precision.weights])
        recorded = recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=vocab_size)
        iteration = load_weights(
            folder,
            model=model,
            groups=groups,
            config=recorded,
            storage=storage,
            averages=places.load_ema,
        )
    digest = manifest_sha256(folder / checkpoint_name(iteration)) or ""
    blocks, titles, digests = all_blocks(resolved.data), section.titles_data_path, {}
    with shared_outcome(groups.control, "reading the texts of the index", keeps_bugs=True):
        if groups.world.rank == 0:
            prefixes = [*blocks, *([] if titles is None else [titles])]
            # Of the lengths of the documents, and of their tokens.
            digests = {
                prefix: f"documents {sha256_of_file(idx_path(prefix))[:_SHORT]}, "
                f"tokens {tokens_sha256(prefix)[:_SHORT]}"
                for prefix in prefixes
            }
    found = all_gather_object(groups.control, digests)[0]
    origin = {
        "checkpoint": f"iteration {iteration}, manifest {digest[:_SHORT]}",
        "tokenizer": tokenizer.fingerprint[:_SHORT],
        "datasets": [found[prefix] for prefix in blocks],
        "titles": None if titles is None else found[titles],
        "blocks": sum(map(len, blocks.values())),
        "seq-length": resolved.data.length,
        "use-one-sent-docs": section.use_one_sent_docs,
    }
    return Towers(model.eval(), tokenizer, blocks, origin)
