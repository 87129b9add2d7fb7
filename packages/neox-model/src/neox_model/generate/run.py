"""Run a generation: set up processes, tokenizer, model and weights, then run the configured mode.

The checkpoint may have any layout. A pipeline is useful only with many micro-batches, so generation always
runs the plain model: tensor parallelism as configured, with pipeline stages replaced by replicas that
generate for different prompts.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from neox_config import Resolved
from neox_config.derive.adapters import base_of_adapters
from neox_config.derive.generation import generation_mode
from neox_config.errors import NeoXError
from neox_model.assembly.choices import DTYPES
from neox_model.assembly.model import build_model
from neox_model.assembly.zero_sharding import gathered_parameter, without_zero
from neox_model.checkpoint import load_weights
from neox_model.checkpoint.base import load_base
from neox_model.checkpoint.downloads import folder_with_weights
from neox_model.checkpoint.storage import find_storage
from neox_model.generate.decode import Decoder
from neox_model.generate.modes import MODES, Job
from neox_model.generate.sampling import Sampler
from neox_model.processes import join_processes, leave_processes, load_tokenizer, recorded_values

__all__ = ["as_plain_model", "generate_from"]

logger = logging.getLogger(__name__)


def generate_from(resolved: Resolved) -> None:
    """Generate text with the latest checkpoint of the configuration's `load` folder.

    Raises:
        NeoXError: there is no checkpoint, it contains a different model, or the mode lacks a setting.
    """
    config = resolved.config
    load = config.checkpoint.load
    if load is None:
        raise NeoXError("generation requires trained weights; set load to a folder with checkpoints")
    plain = as_plain_model(resolved)
    groups = join_processes(plain)
    storage = find_storage(config, groups)
    directory = folder_with_weights(load, groups, cache=config.checkpoint.store_cache, storage=storage)
    tokenizer = load_tokenizer(config)
    model = build_model(plain, groups, vocab_size=tokenizer.vocab_size)
    for param in model.parameters():
        param.data = param.data.to(DTYPES[plain.derived.precision])
    recorded = recorded_values(resolved, tokenizer)
    base = load_base(
        base_of_adapters(config),
        model,
        groups=groups,
        config=recorded,
        writable=partial(gathered_parameter, groups=groups),
    )
    load_weights(directory, model=model, groups=groups, config=recorded | base, storage=storage)
    settings = config.generation
    decoder = Decoder(
        model.eval(),
        Sampler(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        seq_length=config.model.seq_length,
        maximum_tokens=settings.maximum_tokens,
        recompute=settings.recompute,
        group=groups.model,
    )
    job = Job(
        decoder=decoder,
        tokenizer=tokenizer,
        groups=groups,
        seed=config.training.seed,
        num_samples=settings.num_samples,
        input_file=_path(settings.sample_input_file),
        output_file=_path(settings.sample_output_file),
    )
    mode = generation_mode(config)
    logger.info(
        "generating (%s) on data-parallel %d x model-parallel %d", mode, groups.data.size, groups.model.size
    )
    MODES[mode](job)
    leave_processes()


def as_plain_model(resolved: Resolved) -> Resolved:
    """Return the configuration without pipeline, sequence parallelism and ZeRO; stages become replicas."""
    derived = resolved.derived
    if derived.pipe_parallel_size > 1:
        logger.info(
            "generation uses no pipeline: the %d stages become replicas, each with %d tensor-parallel ranks",
            derived.pipe_parallel_size,
            derived.model_parallel_size,
        )
    sizes = {
        "uses_pipeline": False,
        "pipe_parallel_size": 1,
        "data_parallel_size": derived.world_size // derived.model_parallel_size,
    }
    plain = without_zero(resolved)
    # Prompts of arbitrary length cannot be split evenly over the ranks.
    whole = plain.config.parallelism.replaced(sequence_parallel=False)
    config = plain.config.model_copy(update={"parallelism": whole})
    return replace(plain, config=config, derived=derived.model_copy(update=sizes))


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
