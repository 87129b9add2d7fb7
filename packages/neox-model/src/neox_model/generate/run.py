"""Run a generation: set up processes, tokenizer, model and weights, then run the configured mode.

The checkpoint may have any layout. The model is divided over tensor-parallel ranks and pipeline stages as
configured; without training there is no ZeRO and no sequence parallelism, because prompts of arbitrary length
cannot be divided evenly.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neox_config import Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.generation import generation_mode, without_effect
from neox_config.errors import NeoXError
from neox_config.spec.model import ModelSpec
from neox_config.spec.resume import recorded_values
from neox_config.spec.run import RunSpec
from neox_data.tokenizers import Tokenizer
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_stage
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.load import load_weights
from neox_model.checkpoint.storage import find_storage
from neox_model.generate.forward import Forward
from neox_model.generate.modes import MODES, Job
from neox_model.parallel.groups import Groups
from neox_model.processes import load_tokenizer

__all__ = [
    "build_forward_pass",
    "explained_shortage",
    "generate_in",
    "load_forward",
]

logger = logging.getLogger(__name__)

_NO_HOST_MEMORY = "DefaultCPUAllocator: "
_SMALLER = "set a smaller generation-batch-size or maximum-tokens"


def generate_in(groups: Groups, resolved: Resolved) -> None:
    """Generate text with the latest checkpoint of the configuration's `load` folder. Collective.

    Raises:
        NeoXError: there is no checkpoint, or it contains a different model.
    """
    config, load = resolved.config, resolved.config.checkpoint.load
    assert load is not None, "preflight requires it"
    tokenizer = load_tokenizer(config.tokenizer)
    forward, _ = load_forward(resolved, load, groups, tokenizer)
    mode = generation_mode(config)
    logger.info("generating (%s)", mode)
    for name in without_effect(config) if groups.world.rank == 0 else ():
        logger.warning("%s has no effect on generation in the mode %s", name, mode)
    job = Job(
        config.generation,
        forward,
        tokenizer,
        groups,
        seed=config.training.seed,
        seq_length=config.model.seq_length,
        reads_every_token=mode == "interactive",
    )
    with explained_shortage():
        MODES[mode](job)


@contextmanager
def explained_shortage(remedy: str = _SMALLER) -> Iterator[None]:
    """Name the settings to change if the device's memory is too small for what the block allocates.

    Args:
        remedy: what to do.

    Raises:
        NeoXError: it is.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # For memory of the host, PyTorch raises a plain RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError) and _NO_HOST_MEMORY not in str(error):
            raise
        raise NeoXError(
            f"the device has too little memory: {error}; {remedy}, or divide the model with "
            "model-parallel-size",
            code="out-of-memory",
        ) from error


@explained_shortage("use a device with more memory")
def load_forward(resolved: Resolved, load: str, groups: Groups, tokenizer: Tokenizer) -> tuple[Forward, int]:
    """Build this rank's part of the model, and load the latest checkpoint. Collective over all ranks.

    Args:
        resolved: the configuration.
        load: the folder of the checkpoints.
        groups: this job's process groups.
        tokenizer: the model's tokenizer.

    Returns:
        The forward pass, and the iteration of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it contains a different model.
        NeoXError: there is too little memory for its weights.
    """
    section = resolved.config.checkpoint
    storage = find_storage(section, groups)
    directory = folder_with_weights(
        load, groups, cache=section.store_cache, storage=storage, averages=section.load_ema
    )
    logger.info("loading the weights of %s", directory)
    forward = build_forward_pass(resolved.model, resolved.run, groups, tokenizer)
    iteration = load_weights(
        directory,
        model=forward.model,
        groups=groups,
        config=recorded_values(resolved, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size),
        base=base_of_adapters(resolved.config),
        cache=section.store_cache,
        storage=storage,
        averages=section.load_ema,
    )
    return forward, iteration


def build_forward_pass(spec: ModelSpec, run: RunSpec, groups: Groups, tokenizer: Tokenizer) -> Forward:
    """Build this rank's part of the model, with uninitialized weights. Collective over all ranks."""
    model = build_stage(spec, run, groups, vocab_size=tokenizer.vocab_size)
    for param in model.parameters():
        param.data = param.data.to(DTYPES[run.precision.weights])
    return Forward(
        model.eval(),
        hidden_size=spec.width,
        vocab_size=tokenizer.vocab_size,
        groups=groups,
        model_vocab_size=spec.embedding.entries(tokenizer.vocab_size),
    )
