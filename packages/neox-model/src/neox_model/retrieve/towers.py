"""Load the towers of a retrieval model, and embed texts with them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neox_config import Resolved
from neox_config.errors import ConfigError, NeoXError
from neox_config.facts.checkpoints import checkpoint_name
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.objective import ObjectiveSection
from neox_config.spec.model import ModelSpec
from neox_config.spec.resume import recorded_values
from neox_config.spec.run import RunSpec
from neox_data.indexed.layout import idx_path
from neox_data.inverse_cloze import Blocks
from neox_data.manifest import tokens_sha256
from neox_data.tokenizers import Tokenizer
from neox_data.whole_files import sha256_of_file
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.assembly.model import build_model
from neox_model.assembly.towers import TowerModel
from neox_model.assembly.zero_sharding import without_zero
from neox_model.checkpoint.base import manifest_sha256
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import load_weights
from neox_model.checkpoint.outcome import gather, shared_outcome
from neox_model.checkpoint.storage import find_storage
from neox_model.generate.run import explained_shortage
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer
from neox_model.train.data.batch import as_tower_inputs
from neox_model.train.data.datasets import all_blocks, check_tokenizers

__all__ = ["Towers", "index_folder", "open_towers"]

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
        ConfigError: there is no folder with checkpoints.
        CheckpointError: there is no checkpoint, or it contains a different model.
        NeoXError: a dataset cannot be read, or there is too little memory.
    """
    section, tokenizer = resolved.config.objective, load_tokenizer(resolved.config.tokenizer)
    vocab_size = tokenizer.vocab_size
    check_tokenizers(resolved.data, tokenizer, entries=resolved.model.embedding.entries(vocab_size))
    model, checkpoint = _load(
        resolved.model,
        resolved.run,
        section.ict_load,
        resolved.config.checkpoint,
        groups,
        vocab_size=vocab_size,
        recorded=recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=vocab_size),
    )
    blocks = all_blocks(resolved.data)
    origin = _origin(section, checkpoint, blocks, tokenizer, groups, seq_length=resolved.data.length)
    return Towers(model, tokenizer, blocks, origin)


@explained_shortage("use a device with more memory")
def _load(
    spec: ModelSpec,
    run: RunSpec,
    load: str | None,
    section: CheckpointSection,
    groups: Groups,
    *,
    vocab_size: int,
    recorded: Mapping[str, Any],
) -> tuple[TowerModel, str]:
    """Build the towers, and load the latest checkpoint, whose identity is also returned. Collective.

    Args:
        spec: the model.
        run: how it runs.
        load: the folder of the checkpoints, that is `ict_load`; None: that of the section.
        section: where checkpoints are.
        groups: this rank's process groups.
        vocab_size: the tokenizer's vocabulary size.
        recorded: values that this run would record in a checkpoint.

    Raises:
        ConfigError: there is no folder.
        CheckpointError: there is no checkpoint, or it contains a different model.
        NeoXError: there is too little memory for its weights.
    """
    load = load or section.load
    if load is None:
        raise ConfigError(
            "embedding texts requires trained towers; set ict-load to a folder with checkpoints"
        )
    storage = find_storage(section, groups)
    folder = folder_with_weights(load, groups, cache=section.store_cache, storage=storage)
    model = build_model(spec, without_zero(run), groups, vocab_size=vocab_size)
    assert isinstance(model, TowerModel)
    model.to(device=computing_device(), dtype=DTYPES[run.precision.weights])
    iteration = load_weights(folder, model=model, groups=groups, config=recorded, storage=storage)
    digest = manifest_sha256(folder / checkpoint_name(iteration)) or ""
    model.eval()
    return model, f"iteration {iteration}, manifest {digest[:_SHORT]}"


def index_folder(path: str | None) -> Path:
    """Return the folder of the index, that is `block_data_path`.

    Raises:
        ConfigError: it is not configured.
    """
    if path is None:
        raise ConfigError("block-data-path is missing; set it to a folder for the index of blocks")
    return Path(path)


def _origin(
    section: ObjectiveSection,
    checkpoint: str,
    blocks: Mapping[str, Blocks],
    tokenizer: Tokenizer,
    groups: Groups,
    *,
    seq_length: int,
) -> dict[str, Any]:
    """Return what the embeddings of an index depend on, by name. Collective over all ranks.

    Args:
        section: which titles and blocks are used.
        checkpoint: identity of the checkpoint.
        blocks: the blocks by the prefix of their dataset.
        tokenizer: the tokenizer of the model.
        groups: this rank's process groups.
        seq_length: tokens of a block.

    Raises:
        NeoXError: a dataset cannot be read.
    """
    titles, digests = section.titles_data_path, {}
    with shared_outcome(groups.control, "reading the texts of the index", keeps_bugs=True):
        if groups.world.rank == 0:
            prefixes = [*blocks, *([] if titles is None else [titles])]
            # Of the lengths of the documents, and of their tokens.
            digests = {
                prefix: f"documents {sha256_of_file(idx_path(prefix))[:_SHORT]}, "
                f"tokens {tokens_sha256(prefix)[:_SHORT]}"
                for prefix in prefixes
            }
    found = gather(groups.control, digests)[0]
    return {
        "checkpoint": checkpoint,
        "tokenizer": tokenizer.fingerprint[:_SHORT],
        "datasets": [found[prefix] for prefix in blocks],
        "titles": None if titles is None else found[titles],
        "blocks": sum(map(len, blocks.values())),
        "seq-length": seq_length,
        "use-one-sent-docs": section.use_one_sent_docs,
    }
