"""Rules about DeepSpeed's blocks: required parameters, and conflicts with other settings."""

from collections.abc import Iterator

from neox_config.facts.collectives import BUS_SHARE
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig, sections
from neox_config.schema.parameter import Section, is_needed
from neox_config.schema.refused import REFUSED


def enabled_blocks_have_what_they_need(c: NeoXConfig) -> Iterator[Problem]:
    """Require the parameters declared as `needed` in every block with `enabled: true`."""
    for section in sections():
        yield from _missing(getattr(c, section), "", is_enabled=False)


def _missing(section: Section, prefix: str, *, is_enabled: bool) -> Iterator[Problem]:
    if not section.model_fields_set:
        return
    is_enabled = getattr(section, "enabled", is_enabled)
    for name, declared in type(section).model_fields.items():
        value = getattr(section, name)
        if is_enabled and is_needed(declared) and (value is None or value == {}):
            what = f"is required because its block is enabled: {declared.description}"
            yield Problem(f"{prefix}{name}", what, f"add {name}: ...", value="")
        if isinstance(value, Section):
            yield from _missing(value, f"{prefix}{name}.", is_enabled=is_enabled)


def what_nothing_carries_out_is_refused(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse documented settings that are not supported."""
    for name, why in REFUSED.items():
        if c.value_of(name):
            yield Problem(name, why, "remove it")


def timed_operations_exist(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse a list of operations to time that is empty, or names one that does not exist."""
    logger = c.engine.comms_logger
    if not logger.enabled or logger.prof_all:
        return
    unknown = [name for name in logger.prof_ops if name not in BUS_SHARE]
    if unknown:
        what = f"contains no operation of torch.distributed: {', '.join(unknown)}"
        yield Problem("comms_logger.prof_ops", what, f"use {', '.join(BUS_SHARE)}")
    elif not logger.prof_ops:
        remedy = "add names, such as all_reduce, or set prof_all: true"
        yield Problem("comms_logger.prof_ops", "is empty, so that nothing would be timed", remedy, value="")
