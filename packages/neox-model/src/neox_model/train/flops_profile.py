"""A training step that counts the floating-point operations of one iteration, on every rank."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from neox_config.atomic import atomic_write
from neox_config.counted import counted
from neox_config.schema.sections.engine import FlopsProfiler
from neox_model.assembly.compilation import dense_attention
from neox_model.checkpoint.outcome import collect
from neox_model.engine.contract import Engine
from neox_model.metrics.flops import FlopProfile, count_flops, profile_report
from neox_model.parallel.groups import Groups
from neox_model.torch_compat import CPU_ATTENTION_FLOPS
from neox_model.train.data.batch import Batch
from neox_model.train.state import StepReport, TrainState
from neox_model.train.step import TrainStep, WrappedStep

__all__ = ["ProfiledStep"]

logger = logging.getLogger(__name__)


class ProfiledStep(WrappedStep):
    """Wraps a step: profiles the first one from the configured iteration on, and reports it on rank 0.

    It is a wrapper and no hook, so that neither evaluation nor saving is counted. A training that resumes
    after the iteration profiles nothing.

    Args:
        step: the wrapped step.
        section: which iteration, and how to report it.
        engine: runs the step.
        groups: of this process.
        state: counts the iterations.
        formula: returns the expected operations of an iteration with this many tokens, over all ranks.
    """

    def __init__(
        self,
        step: TrainStep,
        section: FlopsProfiler,
        *,
        engine: Engine,
        groups: Groups,
        state: TrainState,
        formula: Callable[[int], int],
    ) -> None:
        super().__init__(step)
        self._section = section
        self._engine = engine
        self._groups = groups
        self._state = state
        self._formula = formula
        self._is_due = state.iteration < section.profile_step

    def __call__(self, batches: Iterator[Batch]) -> StepReport:
        """Train on the next micro-batches."""
        iteration = self._state.iteration + 1
        if not self._is_due or iteration < self._section.profile_step:
            return self._step(batches)
        self._is_due = False
        model = self._engine.model
        with (
            dense_attention(model),
            count_flops(
                model,
                synchronize=torch.cuda.synchronize if self._engine.device.type == "cuda" else lambda: None,
                operators=CPU_ATTENTION_FLOPS,
            ) as profile,
        ):
            report = self._step(batches)
        self._report(profile, iteration, report.tokens)
        return report

    def _report(self, profile: FlopProfile, iteration: int, tokens: int) -> None:
        """Log or write all ranks' totals and one rank's modules of each stage. Collective over all ranks.

        A failure to write is logged, because a full disk must not end a long training.
        """
        groups, section = self._groups, self._section
        is_first_of_stage = groups.data.rank == 0 and groups.model.rank == 0
        parts = collect(
            groups.control, (profile.flops, groups.pipe.rank, profile if is_first_of_stage else None)
        )
        if groups.world.rank != 0:
            return
        total, expected = sum(flops for flops, _, _ in parts), self._formula(tokens)
        head = (
            f"FLOPs of iteration {iteration}: {total:,} on {counted(len(parts), 'rank')}; "
            f"the formula gives {expected:,} (counted / formula: {total / expected:.4f})"
        )
        text = head
        for rank, (_, stage, found) in enumerate(parts):
            if found is not None:
                modules = profile_report(
                    found, depth=section.module_depth, top=section.top_modules, is_detailed=section.detailed
                )
                text += f"\nstage {stage}, rank {rank}:\n{modules}"
        if section.output_file is None:
            logger.info("%s", text)
            return
        path = Path(section.output_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(text + "\n")
        except OSError as error:
            logger.error("the FLOPs profile was not written, training continues: %s", error)
        else:
            logger.info("%s; by module: %s", head, path)
