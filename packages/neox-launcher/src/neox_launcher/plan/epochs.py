"""Compute the number of iterations of a run whose length is given in passes over its data."""

from functools import partial

from neox_config import NeoXConfig, Resolved, resolve
from neox_config.derive.evaluation import evaluates_texts
from neox_config.derive.problems import refusal
from neox_config.errors import ConfigError
from neox_config.facts.splits import training_documents
from neox_config.problems import Problem, config_error
from neox_config.rules import broken_rules
from neox_config.spec.resume import with_recorded_form
from neox_launcher.plan.dataset_files import count_tokens, index_path

__all__ = [
    "DataNotReadableError",
    "config_for",
    "note_on_iterations",
    "resolve_with_data",
    "resolve_without_data",
    "samples_of_passes",
    "with_iterations",
    "without_passes",
]

_NAME = "train_epochs"
# Programs that read no data of the run.
_WITHOUT_DATA = ("generate", "serve", "index-blocks", "find-blocks", "doctor")


class DataNotReadableError(ConfigError):
    """The number of iterations depends on data whose index cannot be read."""


def resolve_with_data(config: NeoXConfig, *, devices: int, hosts: int = 1) -> Resolved:
    """Resolve a configuration with the number of iterations that its data gives.

    Raises:
        ConfigError: as `with_iterations` and `resolve`.
    """
    return resolve(with_iterations(config, devices=devices, hosts=hosts), devices=devices, hosts=hosts)


def resolve_without_data(config: NeoXConfig, *, devices: int, hosts: int = 1) -> Resolved:
    """Resolve a configuration like `resolve_with_data`, or as far as possible where its data is absent.

    `train_iters` is then None in the result, and so is what follows from it.

    Raises:
        ConfigError: as `with_iterations` and `resolve`, except for absent data.
    """
    try:
        return resolve_with_data(config, devices=devices, hosts=hosts)
    except DataNotReadableError:
        return Resolved.of(config, resolve(without_passes(config), devices=devices, hosts=hosts).sizes)


def note_on_iterations(config: NeoXConfig) -> list[Problem]:
    """Return a note if the number of iterations is not known here, because the data is absent."""
    if config.training.train_epochs is None or config.training.train_iters is not None:
        return []
    try:
        _tokens(config)
    except DataNotReadableError as error:
        (problem,) = error.problems
        what = f"{problem.what}; train-iters and what follows from it are not known and not checked"
        return [Problem(_NAME, what, "run the command where the data is", problem.value, problem.place)]
    return []


def without_passes(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration of a program that trains nothing, with any number of iterations."""
    return _with(config, train_iters=config.training.train_iters or 1)


def config_for(program: str | None, config: NeoXConfig, *, devices: int, hosts: int = 1) -> NeoXConfig:
    """Return the configuration of a program, with `train_iters` as far as it requires them.

    That of a run has the form of the optimizer that its checkpoint records (`with_recorded_form`).

    Args:
        program: train, generate, serve, evaluate or doctor; None: any other, which requires them.
        config: loaded configuration.
        devices: number of workers of the whole job.
        hosts: number of hosts, for messages.

    Raises:
        ConfigError: as `with_iterations`; absent data is accepted by programs that do not read it.
    """
    if program in _WITHOUT_DATA:
        # Each process has all experts, and need not wait for others.
        parallelism = config.parallelism.replaced(expert_parallel_size=1)
        return without_passes(config).model_copy(update={"parallelism": parallelism})
    if program == "train":
        config = with_recorded_form(config)
    try:
        return with_iterations(config, devices=devices, hosts=hosts)
    except DataNotReadableError:
        if program == "evaluate" and evaluates_texts(config):
            return without_passes(config)
        raise


def with_iterations(config: NeoXConfig, *, devices: int, hosts: int = 1) -> NeoXConfig:
    """Return the configuration with `train_iters`; unchanged if that is given.

    Args:
        config: loaded configuration.
        devices: number of workers of the whole job, on which the global batch size may depend.
        hosts: number of hosts, for messages.

    Raises:
        DataNotReadableError: the index of the data cannot be read.
        ConfigError: the data is smaller than a batch, or a setting does not fit the number of iterations.
    """
    epochs = config.training.train_epochs
    if epochs is None or config.training.train_iters is not None:
        return config
    # The batch size does not depend on the number of iterations.
    batch = resolve(without_passes(config), devices=devices, hosts=hosts).run.batch.whole
    prefix, tokens = _tokens(config)
    samples = samples_of_passes(
        epochs, tokens, seq_length=config.model.seq_length, is_lazy=config.data.sample_order == "lazy"
    )
    if samples < batch:
        what = (
            f"gives no iteration: {prefix} has {tokens:,} tokens for training, {samples:,} samples in all, "
            f"and an iteration reads {batch:,}"
        )
        raise refusal(config, Problem(_NAME, what, "use more data, or a smaller batch size or seq-length"))
    found = _with(config, train_iters=samples // batch)
    # Rules about the number of iterations could not be checked before.
    problems = broken_rules(_with(found, train_epochs=None), config.sources)
    if problems:
        raise config_error(problems, config.files)
    return found


def samples_of_passes(epochs: int, tokens: int, *, seq_length: int, is_lazy: bool) -> int:
    """Return the number of samples in whole passes over the data.

    Args:
        epochs: number of passes.
        tokens: tokens of one pass.
        seq_length: tokens that a sample predicts.
        is_lazy: each pass is cut into samples by itself, instead of all passes together.
    """
    if is_lazy:
        return epochs * max(0, (tokens - 1) // seq_length)
    return max(0, (epochs * tokens - 1) // seq_length)


def _tokens(config: NeoXConfig) -> tuple[str, int]:
    """Return the path of the training data and the number of its tokens."""
    data = config.data
    prefix = data.data_path if data.data_path is not None else (data.train_data_paths or ("",))[0]
    documents = partial(training_documents, data.split) if data.data_path is not None else int
    try:
        return prefix, count_tokens(prefix, documents)
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"depends on the data, whose index cannot be read here: {index_path(prefix)}: {reason}"
        remedy = "run the command where the data is, or set train-iters instead"
        unreadable = refusal(config, Problem(_NAME, what, remedy))
        raise DataNotReadableError(str(unreadable), unreadable.problems) from error


def _with(config: NeoXConfig, **changes: int | None) -> NeoXConfig:
    changed = config.model_copy(update={"training": config.training.replaced(**changes)})
    return changed.with_origin(sources=config.sources, notices=config.notices, files=config.files)
