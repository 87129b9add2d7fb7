"""Count the floating-point operations of one iteration, on every rank."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch

from neox_config.atomic import atomic_write
from neox_config.estimate import flops_per_token
from neox_config.pluralize import pluralize
from neox_config.schema.sections.engine import FlopsProfiler
from neox_model.assembly.compilation import dense_attention
from neox_model.metrics.flops import FlopProfile, count_flops, profile_report
from neox_model.parallel.control import gather_object
from neox_model.torch_compat import CPU_ATTENTION_FLOPS, EXPERT_FLOPS
from neox_model.train.data.batch import Batch
from neox_model.train.run import Callback, Run
from neox_model.train.state import StepReport
from neox_model.train.step import TrainStep

__all__ = ["FlopsCallback"]

logger = logging.getLogger(__name__)


class FlopsCallback(Callback):
    """Profiles the first iteration from the configured one on, and reports it on rank 0.

    It acts around the step, so that neither evaluation nor saving is counted. A run that resumes after the
    iteration profiles nothing.

    Args:
        section: which iteration, and how to report it.
        formula: returns the expected operations of an iteration with this many tokens, over all ranks.
    """

    def __init__(self, section: FlopsProfiler, *, formula: Callable[[int], int]) -> None:
        self._section, self._formula = section, formula
        self._is_due = True

    @classmethod
    def from_run(cls, run: Run) -> Self | None:
        """Build it if the profiler is enabled."""
        section, model, spec = run.config.engine.flops_profiler, run.resolved.model, run.resolved.run
        if not section.enabled:
            return None
        entries = model.embedding.entries(run.tokenizer.vocab_size)

        def formula(tokens: int) -> int:
            return tokens * flops_per_token(
                model,
                entries=entries,
                length=tokens // spec.batch.whole,
                is_recomputed=spec.recomputation.segment is not None,
                recomputes_attention=spec.recomputation.attention,
            )

        return cls(section, formula=formula)

    def on_load(self) -> None:
        """Profile nothing if the iteration is past."""
        self._is_due = self.run.state.iteration < self._section.profile_step

    def around_step(self, step: TrainStep, batches: Iterator[Batch]) -> StepReport:
        """Count the operations of the step if it is due."""
        iteration = self.run.state.iteration + 1
        if not self._is_due or iteration < self._section.profile_step:
            return step(batches)
        self._is_due = False
        model, on_gpu = self.run.model, self.run.engine.device.type == "cuda"
        with (
            dense_attention(model),
            count_flops(
                model,
                synchronize=torch.cuda.synchronize if on_gpu else lambda: None,
                operators=CPU_ATTENTION_FLOPS | EXPERT_FLOPS,
            ) as profile,
        ):
            report = step(batches)
        self._report(profile, iteration, report.tokens)
        return report

    def _report(self, profile: FlopProfile, iteration: int, tokens: int) -> None:
        """Log or write all ranks' totals and one rank's modules of each stage. Collective over all ranks.

        A failure to write is logged, because a full disk must not end a long run.
        """
        groups, section = self.run.groups, self._section
        is_first_of_stage = groups.data.rank == 0 and groups.model.rank == 0
        parts = gather_object(
            groups.control, (profile.flops, groups.pipe.rank, profile if is_first_of_stage else None)
        )
        if groups.world.rank != 0:
            return
        total, expected = sum(flops for flops, _, _ in parts), self._formula(tokens)
        head = (
            f"FLOPs of iteration {iteration}: {total:,} on {pluralize(len(parts), 'rank')}; "
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
