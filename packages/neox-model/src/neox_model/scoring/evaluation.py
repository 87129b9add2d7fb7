"""Evaluate a model on the configured tasks (`eval_tasks`) and texts (`eval_data`)."""

import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neox_config import Resolved
from neox_data.tokenizers import Tokenizer
from neox_model.generate.forward import Forward
from neox_model.generate.interruption import agreed_in_copy
from neox_model.generate.run import explained_shortage, job_of
from neox_model.optional import require
from neox_model.parallel.groups import Groups
from neox_model.processes import flat_values
from neox_model.scoring.perplexity import measure_perplexity
from neox_model.scoring.results import Results, write_results
from neox_model.scoring.scorer import Scorer
from neox_model.versions import package_versions

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TextEvaluation"]

_SMALLER = (
    "set a smaller train-micro-batch-size-per-gpu (its tokens are evaluated together) or "
    "generation-batch-size"
)


class TextEvaluation:
    """Evaluates any number of times, after loading the tasks once. Every rank builds it.

    Args:
        resolved: the configuration.
        tokenizer: the model's tokenizer.
        groups: this job's process groups.

    Raises:
        MissingPackageError: lm_eval is not installed.
        ConfigError: there is no such task, or it cannot be loaded.
    """

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer, groups: Groups) -> None:
        self._resolved, self._tokenizer, self._groups = resolved, tokenizer, groups
        section = resolved.config.generation
        self._harness: ModuleType | None = None
        self._tasks: Any = None
        if section.eval_tasks:
            require("lm_eval", because="eval-tasks", install="'neox-model[eval]'")
            self._harness = importlib.import_module("neox_model.scoring.harness")
            with _random_states_kept():
                self._tasks = self._harness.Tasks(
                    section.eval_tasks,
                    include_path=section.eval_include_path,
                    num_fewshot=section.eval_num_fewshot,
                    limit=section.eval_limit,
                    # Bars that are drawn again would fill a log.
                    shows_progress=groups.world.rank == 0 and sys.stderr.isatty(),
                )

    def run(
        self,
        forward: Callable[[], Forward],
        *,
        iteration: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Results | None:
        """Evaluate a model. Collective over all ranks; returns the results on rank 0, else None.

        Args:
            forward: returns the model's forward pass.
            iteration: finished updates of its weights.
            is_stopping: returns whether a signal has requested the end on this rank.

        Raises:
            EvaluationEndedError: the model's output is not finite, or a signal requested the end.
            NeoXError: a text cannot be read or scored, or there is too little memory.
        """
        with explained_shortage(_SMALLER), _random_states_kept():
            return self._run(forward, iteration, is_stopping)

    def _run(
        self, build: Callable[[], Forward], iteration: int, is_stopping: Callable[[], bool]
    ) -> Results | None:
        began, forward = time.monotonic(), build()
        config, section = self._resolved.config, self._resolved.config.generation
        scorer = Scorer(
            forward,
            seq_length=config.model.seq_length,
            batch_tokens=self._resolved.derived.micro_batch_size * config.model.seq_length,
            is_stopping=lambda: agreed_in_copy(self._groups, is_stopping()),
        )
        perplexity = tasks = None
        notes: list[str] = []
        if section.eval_data is not None:
            perplexity = measure_perplexity(
                section.eval_data, scorer, self._tokenizer, self._groups, limit=section.eval_limit
            )
        if self._harness is not None:
            model = self._model(self._harness, forward, scorer)
            tasks, notes = self._tasks.run(model), model.notes
        if self._groups.world.rank:
            return None
        return Results(
            iteration=iteration,
            perplexity=perplexity,
            per_character=section.char_level_ppl,
            tasks=tasks,
            tables="" if self._harness is None else self._harness.table_of(tasks),
            notes=notes,
            seconds=time.monotonic() - began,
        )

    def _model(self, harness: "ModuleType", forward: Forward, scorer: Scorer) -> Any:
        job = job_of(self._resolved.config, forward, self._tokenizer, self._groups, reads_every_token=False)
        return harness.HarnessModel(
            scorer, job.engine, self._tokenizer, self._groups, batch_size=job.batch_size, seed=job.seed
        )

    def write(self, results: Results, *, checkpoint: str | None) -> None:
        """Write the file of the results. On rank 0.

        Args:
            results: what to write.
            checkpoint: folder of the weights; None: those of the running training.
        """
        about = {
            "checkpoint": checkpoint,
            "packages": package_versions() | self._harness_version(),
            "configuration": flat_values(self._resolved.config),
        }
        write_results(self._resolved.config.generation.eval_results_prefix, results, about)

    def _harness_version(self) -> dict[str, str]:
        if self._harness is None:
            return {}
        return {"lm_eval": importlib.import_module("importlib.metadata").version("lm_eval")}


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch afterwards; the harness uses them."""
    kept = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
