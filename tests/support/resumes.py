"""What `neox-launch verify-resume` does, in the processes that are there: trainings and their comparison."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import distributed

from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.protocol.verification import Comparison, Recording
from neox_launcher.verify_resume.phases import Phase, Span, side_of
from neox_model.parallel.topology import create_groups
from neox_model.train import open_run

__all__ = ["SPAN", "carry_out", "comparison_of", "plan_from", "train_here"]

SPAN = Span(start=0, middle=2, end=4)


def plan_from(path: Path, settings: dict[str, Any]) -> LaunchPlan:
    """Write a configuration, and plan its training on the CPU."""
    # JSON is YAML.
    path.write_text(json.dumps(settings))
    return plan_launch(Request(program="train", paths=(str(path),)), environment={}, gpus=0)


def train_here(plan: LaunchPlan) -> None:
    """Train in the processes that are there. Collective over all ranks."""
    layout = plan.resolved.run.layout
    open_run.train_in(create_groups(layout.tensor, layout.stages, layout.experts), plan.resolved)
    distributed.barrier()


def carry_out(phase: Phase) -> None:
    """Carry one run of `verify-resume` out, recorded. Collective over all ranks."""
    with patch.dict(os.environ, {Recording.VARIABLE: phase.plan.environment[Recording.VARIABLE]}):
        train_here(phase.plan)


def comparison_of(
    base: Path, own: Path, *, samples: int, rounding: str | None = None, same_sizes: bool = True
) -> Comparison:
    """Ask for the comparison of runs that were carried out over `SPAN`.

    Args:
        base: folder of the uninterrupted run, and of that up to the interruption.
        own: folder of the resumed one.
        samples: of an iteration.
        rounding: precision by whose rounding they may differ.
        same_sizes: the parallel sizes are the same.
    """
    return Comparison(
        expected=side_of(base / "uninterrupted", SPAN, last=SPAN.end, has_middle=True),
        interrupted=side_of(base / "interrupted", SPAN, last=SPAN.middle, has_middle=False),
        resumed=side_of(own / "resumed", SPAN, last=SPAN.end, has_middle=True),
        start=SPAN.start,
        middle=SPAN.middle,
        end=SPAN.end,
        samples=samples,
        rounding=rounding,
        same_sizes=same_sizes,
    )
