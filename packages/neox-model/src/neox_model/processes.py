"""What every program of workers begins with: processes, tokenizer, the configuration as plain values."""

import logging
import os
from typing import Any

import torch
from torch import distributed

from neox_data.tokenizers import Tokenizer, build_tokenizer
from neox_launcher.config import NeoXConfig, Resolved
from neox_launcher.config.resume import IN_EFFECT, SAMPLES_PER_ITERATION, flat_values, in_effect
from neox_launcher.config.shapes import pad_vocabulary
from neox_launcher.ranks import read_rank
from neox_launcher.worker import answer_questions
from neox_model.parallel.flight_recorder import last_collectives
from neox_model.parallel.groups import Groups
from neox_model.parallel.topology import create_groups

__all__ = ["flat_values", "join_processes", "leave_processes", "load_tokenizer", "recorded_values"]

logger = logging.getLogger(__name__)


def join_processes(resolved: Resolved) -> Groups:
    """Join the process group and form this rank's groups. Collective over all ranks.

    A worker that nothing started as one is a job of its own.
    """
    me = read_rank()
    has_gpus = torch.cuda.is_available()
    backend = resolved.derived.backend or ("nccl" if has_gpus else "gloo")
    reason = "configured" if resolved.derived.backend else f"{'GPUs' if has_gpus else 'no GPU'} found"
    logger.info("torch.distributed runs over %s (%s), torch %s", backend, reason, torch.__version__)
    if has_gpus:
        torch.cuda.set_device(me.local_rank if me else 0)
    if me is None:
        # DeepSpeed reads these whatever the world's size.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        answer_questions(me.rank, last_collectives)
        distributed.init_process_group(backend)
    derived = resolved.derived
    return create_groups(derived.model_parallel_size, derived.pipe_parallel_size)


def leave_processes() -> None:
    """Leave the process group; the last thing a worker that did its work does."""
    distributed.destroy_process_group()


def load_tokenizer(config: NeoXConfig) -> Tokenizer:
    """The configured tokenizer.

    Raises:
        TokenizerError: its files are missing or unreadable.
    """
    section = config.tokenizer
    return build_tokenizer(
        section.tokenizer_type, vocab_file=section.vocab_file, merge_file=section.merge_file
    )


def recorded_values(resolved: Resolved, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint records of the run that writes it, and is compared with the run that reads it."""
    config = resolved.config
    vocabulary = pad_vocabulary(tokenizer.vocab_size, config.model.make_vocab_size_divisible_by)
    files = {
        "vocab_file": f"sha256 {tokenizer.fingerprint[:16]}",
        "make_vocab_size_divisible_by": f"{vocabulary:,} entries",
    }
    return flat_values(config) | {
        SAMPLES_PER_ITERATION: resolved.derived.train_batch_size,
        IN_EFFECT: in_effect(resolved, tokenizer=files),
    }
