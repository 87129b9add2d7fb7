"""Rules of DeepSpeed's blocks: all have what they need, and single ones what their neighbours need."""

from collections.abc import Iterator

from neox_launcher.config.not_yet import REFUSED
from neox_launcher.config.parameter import Section, is_needed
from neox_launcher.config.problems import Problem
from neox_launcher.config.schema import NeoXConfig, sections


def enabled_blocks_have_what_they_need(c: NeoXConfig) -> Iterator[Problem]:
    """What is marked as needed is given where `enabled` of its block is true."""
    for section in sections():
        yield from _missing(getattr(c, section), "", is_enabled=False)


def _missing(section: Section, prefix: str, *, is_enabled: bool) -> Iterator[Problem]:
    if not section.model_fields_set:
        return
    is_enabled = getattr(section, "enabled", is_enabled)
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        if is_enabled and is_needed(declared) and (value is None or value == {}):
            what = f"is missing, and its block is enabled: {declared.description}"
            yield Problem(f"{prefix}{name}", what, f"add {name}: ...", value="")
        if isinstance(value, Section):
            yield from _missing(value, f"{prefix}{name}.", is_enabled=is_enabled)


def what_nothing_carries_out_is_refused(c: NeoXConfig) -> Iterator[Problem]:
    """What is documented and will not be done is not silently left out."""
    for name, why in REFUSED.items():
        if c.value_of(name):
            yield Problem(name, why, "leave it out")


def autotuning_times_at_least_one_iteration(c: NeoXConfig) -> Iterator[Problem]:
    """A trial is timed from its start to its end."""
    tuning = c.autotuning.autotuning
    if tuning.end_profile_step < tuning.start_profile_step:
        yield Problem(
            "autotuning.end_profile_step",
            f"is before start_profile_step: {tuning.start_profile_step}",
            f"use at least {tuning.start_profile_step}",
        )


def one_run_of_wandb(c: NeoXConfig) -> Iterator[Problem]:
    """A process reports to one run."""
    if c.monitors.wandb.enabled and c.logging.use_wandb:
        yield Problem("wandb.enabled", "excludes use-wandb: true", "keep one of the two")


def profiling_needs_the_plain_model(c: NeoXConfig) -> Iterator[Problem]:
    """DeepSpeed's pipeline engine starts the profile and never ends it."""
    if c.engine.flops_profiler.enabled and c.parallelism.pipe_parallel_size >= 1:
        yield Problem(
            "flops_profiler.enabled", "works only without pipeline stages", "set pipe-parallel-size: 0"
        )
