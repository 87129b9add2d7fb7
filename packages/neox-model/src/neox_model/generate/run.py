"""Run a generation: set up processes, tokenizer, model and weights, then run the configured mode.

The checkpoint may have any layout. The model is divided over tensor-parallel ranks and pipeline stages as
configured; without training there is no ZeRO and no sequence parallelism, because prompts of arbitrary length
cannot be divided evenly.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from neox_config import NeoXConfig, Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.generation import generation_mode, without_effect
from neox_config.derive.objective import WITHOUT_TEXTS, is_encoder
from neox_config.errors import ConfigError, NeoXError
from neox_data.errors import CorpusError
from neox_data.tokenizers import Tokenizer
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_stage
from neox_model.assembly.zero_sharding import gathered_parameter, without_zero
from neox_model.checkpoint import load_weights
from neox_model.checkpoint.base import load_base
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.storage import find_storage
from neox_model.generate.batch import Batch
from neox_model.generate.chat_template import configured_template
from neox_model.generate.engine import Engine
from neox_model.generate.forward import Forward
from neox_model.generate.modes import MODES, Job
from neox_model.generate.sampling import Sampling
from neox_model.parallel.groups import Groups
from neox_model.processes import join_processes, leave_processes, load_tokenizer, recorded_values

__all__ = [
    "as_plain_model",
    "build_forward_model",
    "explained_shortage",
    "forward_of",
    "generate_from",
    "job_of",
    "load_forward",
    "on_several",
]

logger = logging.getLogger(__name__)

_NO_HOST_MEMORY = "DefaultCPUAllocator: "
# On a device whose results are read back, every eighth token; on a CPU every token, which costs nothing.
_STEPS_PER_READ = 8
_SMALLER = "set a smaller generation-batch-size or maximum-tokens"


def generate_from(resolved: Resolved) -> None:
    """Generate text with the latest checkpoint of the configuration's `load` folder.

    Raises:
        NeoXError: there is no checkpoint, it contains a different model, or the mode lacks a setting.
    """
    config = resolved.config
    load = config.checkpoint.load
    if load is None:
        raise NeoXError("generation requires trained weights; set load to a folder with checkpoints")
    groups = join_processes(resolved)
    tokenizer = load_tokenizer(config)
    forward, _ = load_forward(resolved, load, groups, tokenizer)
    mode = generation_mode(config)
    logger.info("generating (%s)%s", mode, on_several(groups))
    for name in without_effect(config) if groups.world.rank == 0 else ():
        logger.warning("%s has no effect on generation in the mode %s", name, mode)
    if groups.world.rank == 0 and mode != "unconditional":
        _name_unused_template(config)
    with explained_shortage():
        MODES[mode](job_of(config, forward, tokenizer, groups, reads_every_token=mode == "interactive"))
    leave_processes()


def _name_unused_template(config: NeoXConfig) -> None:
    """Log that prompts are not written by the chat template, if there is one."""
    try:
        template = configured_template(config)
    except CorpusError:
        return  # A damaged template does not matter to plain texts.
    if template is not None:
        logger.info(
            "prompts are continued as they are; conversations by the chat template of %s are answered by "
            "neox-launch serve",
            template.name,
        )


def on_several(groups: Groups) -> str:
    """Return how the processes share the work, for the end of a sentence; empty if there is one."""
    if groups.world.size == 1:
        return ""
    sizes = groups.data.size, groups.pipe.size, groups.model.size
    return " on data-parallel {} x pipe-parallel {} x model-parallel {}".format(*sizes)


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
            "model-parallel-size"
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
    storage = find_storage(resolved.config, groups)
    cache = resolved.config.checkpoint.store_cache
    directory = folder_with_weights(load, groups, cache=cache, storage=storage)
    logger.info("loading the weights of %s", directory)
    model = build_forward_model(resolved, groups, tokenizer)
    recorded = recorded_values(resolved, tokenizer)
    base = load_base(
        base_of_adapters(resolved.config),
        model,
        adapters=directory,
        groups=groups,
        config=recorded,
        writable=partial(gathered_parameter, groups=groups),
        cache=cache,
    )
    iteration = load_weights(directory, model=model, groups=groups, config=recorded | base, storage=storage)
    return forward_of(model, resolved, groups, tokenizer), iteration


def build_forward_model(resolved: Resolved, groups: Groups, tokenizer: Tokenizer) -> SequentialModel:
    """Build this rank's part of the model, with uninitialized weights. Collective over all ranks."""
    plain = as_plain_model(resolved)
    model = build_stage(plain.model, plain.run, groups, vocab_size=tokenizer.vocab_size)
    for param in model.parameters():
        param.data = param.data.to(DTYPES[resolved.derived.precision])
    return model


def forward_of(model: SequentialModel, resolved: Resolved, groups: Groups, tokenizer: Tokenizer) -> Forward:
    """Return the forward pass of this rank's part of the model."""
    return Forward(
        model.eval(),
        hidden_size=resolved.config.model.hidden_size,
        vocab_size=tokenizer.vocab_size,
        groups=groups,
        model_vocab_size=resolved.model.embedding.entries(tokenizer.vocab_size),
    )


def job_of(
    config: NeoXConfig, forward: Forward, tokenizer: Tokenizer, groups: Groups, *, reads_every_token: bool
) -> Job:
    """Return the inputs of the configured generation.

    Args:
        config: the configuration.
        forward: the model's forward pass.
        tokenizer: the model's tokenizer.
        groups: this rank's process groups.
        reads_every_token: tokens are delivered one by one, instead of several at a time on a GPU.

    Raises:
        ConfigError: the model does not predict the next token.
    """
    if is_encoder(config):
        raise ConfigError(f"objective: {config.model.objective}: {WITHOUT_TEXTS}")
    settings = config.generation
    is_read = reads_every_token or forward.device.type == "cpu"

    def engine(slots: int, capacity: int) -> Engine:
        batch = Batch(forward, slots=slots, capacity=capacity, recompute=settings.recompute)
        return Engine(
            batch,
            tokenizer,
            stop_tokens=settings.stop_tokens,
            steps_per_read=1 if is_read else _STEPS_PER_READ,
        )

    seed = config.training.seed if settings.sampling_seed is None else settings.sampling_seed
    return Job(
        engine=engine,
        tokenizer=tokenizer,
        groups=groups,
        seed=seed,
        seq_length=config.model.seq_length,
        maximum_tokens=settings.maximum_tokens,
        batch_size=settings.generation_batch_size,
        sampling=Sampling(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            repetition_penalty=settings.repetition_penalty,
        ),
        stop_strings=settings.stop_strings,
        num_samples=settings.num_samples,
        prompt=settings.prompt,
        keeps_history=settings.interactive_history,
        input_file=_path(settings.sample_input_file),
        output_file=_path(settings.sample_output_file),
    )


def as_plain_model(resolved: Resolved) -> Resolved:
    """Return the configuration without ZeRO and sequence parallelism."""
    plain = without_zero(resolved)
    whole = plain.config.parallelism.replaced(sequence_parallel=False)
    return plain.replaced(parallelism=whole)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
