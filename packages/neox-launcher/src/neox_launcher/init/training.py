"""Choose size, batch, length and layout of a run by the tokens of its texts and its devices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from neox_config import Resolved, Text, load_config, resolve
from neox_config.errors import LaunchError
from neox_config.estimate import count_parameters, flops_per_token
from neox_config.estimate.setup import Setup, setup_of
from neox_config.estimate.suggest import USABLE_MEMORY, Cluster, largest_memory, suggest
from neox_launcher.init.sizes import Candidate
from neox_launcher.init.texts import Prepared

__all__ = [
    "MOST_EVALUATION_SHARE",
    "Devices",
    "Training",
    "choose_training",
]

# arXiv:2203.15556: about 20 tokens per parameter use operations best. arXiv:2305.16264: text that is read up
# to four times is worth nearly as much as new text.
_TOKENS_PER_PARAMETER, _MOST_PASSES = 20, 4
# Upper limit of the operations of a run, per GPU or for all CPU cores, and the fewest tokens per
# parameter with which a model is chosen under it.
_GPU_OPERATIONS, _CPU_OPERATIONS = 10**18, 2 * 10**14
_FEWEST_PER_PARAMETER = 1
_FEWEST_ITERATIONS = 200
_CPU_LENGTH, _GPU_LENGTH, _SHORTEST_LENGTH = 256, 1024, 16
# A validation and a run require several samples.
_FEWEST_SAMPLES = 8
_CPU_BATCH_TOKENS = 2048
# Tokens per iteration on GPUs, by parameters: the first limit that is not exceeded.
_GPU_BATCH_TOKENS = ((50_000_000, 2**16), (500_000_000, 2**18), (math.inf, 2**19))
_CPU_MICRO_BATCH = 4
# A batch of an evaluation takes about a third of the time of an iteration, which has a backward pass, too.
# All evaluations together take at most about this share of the iterations' time, but there are at least one
# in the middle and one at the end. Limits of their number, and of the batches of each.
_EVALUATED_BATCH, MOST_EVALUATION_SHARE = 1 / 3, 0.1
_FEWEST_EVALUATIONS, _MOST_EVALUATIONS, _MOST_EVALUATED_BATCHES = 2, 10, 10
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What a training runs on.

    Args:
        count: number of GPUs; without GPUs, number of processes.
        memory: bytes of one GPU; without GPUs, of the machine.
        are_gpus: False if the processes compute on the CPU.
    """

    count: int
    memory: int
    are_gpus: bool

    @property
    def kind(self) -> str:
        """What they are, in words."""
        many = self.count > 1
        if self.are_gpus:
            return "GPUs" if many else "GPU"
        return "processes on the CPU" if many else "process on the CPU"

    @property
    def type(self) -> str:
        """Their type, for estimates."""
        return "cuda" if self.are_gpus else "cpu"

    @property
    def precision(self) -> str:
        """Precision of a run on them."""
        return "bfloat16" if self.are_gpus else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run.

    Args:
        candidate: its model.
        seq_length: tokens per sample.
        iterations: number of updates.
        setup: batch and parallel layout.
        parameters: number of parameters with the vocabulary of the texts.
        memory: estimated bytes per device.
        operations: floating-point operations of all iterations.
        seconds_per_iteration: estimated time of an iteration; None on CPUs, whose speed is not known.
        limit: what limits its length.
        validation_batches: batches in the validation texts, begun ones included; each is as large as one of
            the run.
        planned_seconds: time that limits the iterations; None: something else does.
    """

    candidate: Candidate
    seq_length: int
    iterations: int
    setup: Setup
    parameters: int
    memory: int
    operations: float
    seconds_per_iteration: float | None
    limit: str
    validation_batches: int
    planned_seconds: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all iterations."""
        return self.iterations * self.setup.samples * self.seq_length

    @property
    def evaluation_interval(self) -> int:
        """Iterations between evaluations."""
        most = min(_MOST_EVALUATED_BATCHES, self.validation_batches) or 1
        count = min(max(_FEWEST_EVALUATIONS, self._affordable_batches // most), _MOST_EVALUATIONS)
        return math.ceil(self.iterations / count)

    @property
    def evaluation_batches(self) -> int:
        """Batches of one evaluation; 0 without validation texts."""
        affordable = max(1, self._affordable_batches // self._evaluations)
        return min(affordable, _MOST_EVALUATED_BATCHES, self.validation_batches)

    @property
    def evaluation_share(self) -> float:
        """Estimated time of all evaluations, as a share of that of all iterations."""
        return self._evaluations * self.evaluation_batches * _EVALUATED_BATCH / self.iterations

    @property
    def _evaluations(self) -> int:
        """Number of evaluations: the last one follows the last iteration, whatever the interval is."""
        return (self.iterations - 1) // self.evaluation_interval + 1

    @property
    def _affordable_batches(self) -> int:
        """Batches that all evaluations together may have."""
        return int(self.iterations * MOST_EVALUATION_SHARE / _EVALUATED_BATCH)


def choose_training(
    candidates: Sequence[Candidate],
    prepared: Prepared,
    devices: Devices,
    *,
    shorten: Callable[[Training], Training] | None = None,
) -> Training:
    """Return the run of the largest model that the texts and the devices are sufficient for.

    Args:
        candidates: the models, from small to large; a single one is chosen whatever the texts are.
        prepared: the texts.
        devices: the devices.
        shorten: returns a run with fewer iterations, if a time requires it; None: there is no time.

    Raises:
        LaunchError: the texts are too short, or no model fits into the memory.
    """
    chosen = None
    for candidate in candidates:
        training = _training(candidate, prepared, devices)
        if training is None:
            break
        training = shorten(training) if shorten else training
        if chosen is not None and not _is_sufficient(training, prepared):
            break
        chosen = training
    if chosen is None:
        raise LaunchError(
            f"{candidates[0].name} does not fit into the memory of {devices.count:,} {devices.kind}, "
            f"{devices.memory / _GIB:,.1f} GiB; use a smaller model (--size, --model) or other devices",
            code="does-not-fit",
        )
    return chosen


def _is_sufficient(training: Training, prepared: Prepared) -> bool:
    most = prepared.training_tokens * _MOST_PASSES
    return (
        training.parameters * _TOKENS_PER_PARAMETER <= most
        and training.tokens >= training.parameters * _FEWEST_PER_PARAMETER
    )


def _training(candidate: Candidate, prepared: Prepared, devices: Devices) -> Training | None:
    """Return the run of a model, or None if it does not fit into the memory."""
    seq_length = _length(candidate, prepared, devices)
    resolved = _resolved(candidate, seq_length, devices)
    like = setup_of(resolved, vocab_size=prepared.entries)
    parameters = sum(count_parameters(like.model, like.entries).values())
    flops = flops_per_token(like.model, entries=like.entries, length=seq_length)
    operations = _GPU_OPERATIONS * devices.count if devices.are_gpus else _CPU_OPERATIONS
    limits = {
        f"{_MOST_PASSES} passes over the texts": _MOST_PASSES * prepared.training_tokens,
        f"{_TOKENS_PER_PARAMETER} tokens per parameter": _TOKENS_PER_PARAMETER * parameters,
        f"{operations:.0e} operations on these devices": operations // flops,
    }
    limit, tokens = min(limits.items(), key=lambda each: each[1])
    samples = _samples(parameters, tokens, seq_length, devices)
    found = _setup(like, samples, devices)
    if found is None:
        return None
    setup, seconds = found
    iterations = max(1, tokens // (samples * seq_length))
    return Training(
        candidate=candidate,
        seq_length=seq_length,
        iterations=iterations,
        setup=setup,
        parameters=parameters,
        memory=largest_memory(setup, device=devices.type).total,
        operations=flops * float(iterations * samples * seq_length),
        seconds_per_iteration=seconds,
        limit=limit,
        validation_batches=math.ceil(prepared.validation_tokens / (samples * seq_length)),
    )


def _length(candidate: Candidate, prepared: Prepared, devices: Devices) -> int:
    length = _GPU_LENGTH if devices.are_gpus else _CPU_LENGTH
    length = min(length, candidate.most_positions or length)
    while length > _SHORTEST_LENGTH and prepared.training_tokens < _FEWEST_SAMPLES * (length + 1):
        length //= 2
    needed = _FEWEST_SAMPLES * (length + 1)
    if prepared.training_tokens < needed:
        raise LaunchError(
            f"the texts have only {prepared.training_tokens:,} tokens for training, but {_FEWEST_SAMPLES} "
            f"samples of {length} require {needed:,}; add texts",
            code="too-few-tokens",
        )
    return length


def _resolved(candidate: Candidate, seq_length: int, devices: Devices) -> Resolved:
    rest = (
        f"seq-length: {seq_length}\ntrain-iters: 1\ntrain-micro-batch-size-per-gpu: 1\n"
        "optimizer: {type: Adam, params: {lr: 0.001}}\nzero-optimization: {stage: 1}\n"
        "hidden-dropout: 0.0\nattention-dropout: 0.0\n"
        f"precision: {devices.precision}\n"
    )
    texts = (Text(candidate.text(seq_length), candidate.name), Text(rest, "init"))
    return resolve(load_config([], texts=texts), devices=1)


def _samples(parameters: int, tokens: int, seq_length: int, devices: Devices) -> int:
    """Return the samples per iteration: a power of two per device."""
    most = next(each for limit, each in _GPU_BATCH_TOKENS if parameters <= limit)
    wanted = min(most if devices.are_gpus else _CPU_BATCH_TOKENS, tokens // _FEWEST_ITERATIONS)
    per_device = max(1, wanted // (seq_length * devices.count))
    return devices.count * (1 << (per_device.bit_length() - 1))


def _setup(like: Setup, samples: int, devices: Devices) -> tuple[Setup, float | None] | None:
    if devices.are_gpus:
        cluster = Cluster(
            devices=devices.count, memory=devices.memory, devices_per_host=min(8, devices.count)
        )
        best = next(iter(suggest(like, cluster, samples=samples)), None)
        return None if best is None else (best.setup, best.seconds)
    return next(((each, None) for each in _on_cpus(like, samples, devices)), None)


def _on_cpus(like: Setup, samples: int, devices: Devices) -> Iterator[Setup]:
    """Yield the data-parallel layouts that fit into the memory, the largest micro-batch first."""
    each = samples // devices.count
    micro = min(_CPU_MICRO_BATCH, each)
    while micro:
        batch = {"micro": micro, "accumulation": each // micro}
        setup = like.changed(layout={"data": devices.count}, batch=batch)
        needed = largest_memory(setup, device=devices.type).total * devices.count
        if needed <= devices.memory * USABLE_MEMORY:
            yield setup
        micro //= 2
