"""Rules about what is logged."""

from collections.abc import Iterator

from neox_config.derive.engine import engine_offers
from neox_config.derive.optimizer_arguments import optimizer_facts
from neox_config.derive.profiling import memory_folder, profiled_iterations, trace_folder
from neox_config.problems import Problem, refusals
from neox_config.schema.config import NeoXConfig


def gradients_are_read_before_the_update(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse what reads gradients before the update if the engine reduces and applies them in one call."""
    if engine_offers(c, "before_update"):
        return iter(())
    reads = "reads gradients before the update, which DeepSpeed's engine does not show under ZeRO"
    leaves_out = (
        "leaves out updates, which is not possible under ZeRO with DeepSpeed's engine, which reduces and "
        "applies gradients in one call"
    )
    remedy = "remove it, or set engine: torch, or zero_optimization.stage: 0"
    return refusals(
        (c.logging.log_gradient_noise_scale, "log_gradient_noise_scale", reads, remedy),
        (c.logging.log_grad_pct_zeros, "log_grad_pct_zeros", reads, remedy),
        (c.logging.log_zero_gradients, "log_zero_gradients", reads, remedy),
        (c.training.on_spike == "skip", "on_spike", leaves_out, remedy),
    )


def the_noise_scale_reads_averaged_gradients(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse the noise scale with optimizers that do not average gradients over data-parallel ranks."""
    facts = optimizer_facts(c)
    if c.logging.log_gradient_noise_scale and facts.replica_states:
        yield Problem(
            "log_gradient_noise_scale",
            f"reads gradients averaged over data-parallel ranks, and {facts.name} averages momenta instead",
            "remove it, or use Adam",
        )


def profiled_iterations_are_in_order(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a range of traced iterations that is empty, or begins after the end of the run.

    With memory_profiling alone there is no such range: a start that is too late is lowered.
    """
    if not (c.logging.profile or c.logging.memory_profiling):
        return
    last = c.training.train_iters
    iterations = profiled_iterations(c.logging, last)
    if not iterations:
        yield Problem(
            "profile_step_stop",
            f"is before profile-step-start: {iterations.start}",
            f"use at least {iterations.start}",
        )
    elif last is not None and iterations.start > last:
        yield Problem(
            "profile_step_start", f"is after the last iteration, train-iters: {last}", f"use at most {last}"
        )


def operations_are_counted_before_the_end(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse to count the operations of an iteration after the last one, because none would be counted."""
    profiler, last = c.engine.flops_profiler, c.training.train_iters
    if profiler.enabled and last is not None and profiler.profile_step > last:
        yield Problem(
            "flops_profiler.profile_step",
            f"is after the last iteration, train-iters: {last}",
            f"use at most {last}",
        )


def profilers_have_a_folder(c: NeoXConfig) -> Iterator[Problem]:
    """Require a folder for traces and for memory snapshots."""
    return refusals(
        (
            c.logging.profile and trace_folder(c.logging) is None,
            "profile",
            "has no folder for its traces",
            "set log-dir, such as log-dir: logs",
        ),
        (
            c.logging.memory_profiling and memory_folder(c.logging) is None,
            "memory_profiling",
            "has no folder for its snapshots",
            "set memory-profiling-path, such as memory-profiling-path: logs/memory",
        ),
    )
