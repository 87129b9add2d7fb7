"""Evaluate a model on the configured tasks (`eval_tasks`) and texts (`eval_data`)."""

import importlib
import importlib.metadata
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neox_config.schema.sections.generation import GenerationSection
from neox_config.spec.run import Batch
from neox_data.tokenizers import Tokenizer
from neox_model.generate.forward import Forward
from neox_model.generate.interruption import agreed_in_copy
from neox_model.generate.modes import Job
from neox_model.generate.run import explained_shortage
from neox_model.optional import require
from neox_model.parallel.groups import Groups
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
        section: what is evaluated, and how texts are generated.
        batch: its micro-batches have the tokens that are evaluated together.
        tokenizer: the model's tokenizer.
        groups: this job's process groups.
        seed: the random seed.
        configuration: values that the file of the results contains.

    Raises:
        MissingPackageError: lm_eval is not installed.
        ConfigError: there is no such task, or it cannot be loaded.
    """

    def __init__(
        self,
        section: GenerationSection,
        batch: Batch,
        tokenizer: Tokenizer,
        groups: Groups,
        *,
        seed: int,
        configuration: Mapping[str, Any],
    ) -> None:
        self._section, self._batch, self._tokenizer, self._groups = section, batch, tokenizer, groups
        self._seed, self._configuration = seed, configuration
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
        section, groups = self._section, self._groups
        began = time.monotonic()
        perplexity = tasks = None
        with explained_shortage(_SMALLER), _random_states_kept():
            model = forward()
            scorer = Scorer(
                model,
                seq_length=self._batch.length,
                batch_tokens=self._batch.micro * self._batch.length,
                is_stopping=lambda: agreed_in_copy(groups, is_stopping()),
            )
            if section.eval_data is not None:
                perplexity = measure_perplexity(
                    section.eval_data, scorer, self._tokenizer, groups, limit=section.eval_limit
                )
            if self._harness is not None:
                length = self._batch.length
                job = Job(section, model, self._tokenizer, groups, seed=self._seed, seq_length=length)
                tasks = self._tasks.run(self._harness.HarnessModel(scorer, job))
        if groups.world.rank:
            return None
        return Results(
            iteration=iteration,
            perplexity=perplexity,
            per_character=section.char_level_ppl,
            tasks=tasks,
            tables="" if self._harness is None else self._harness.table_of(tasks),
            seconds=time.monotonic() - began,
        )

    def write(self, results: Results, *, checkpoint: str | None) -> None:
        """Write the file of the results. On rank 0.

        Args:
            results: what to write.
            checkpoint: folder of the weights; None: those of the running run.
        """
        packages = dict(package_versions())
        if self._harness is not None:
            packages["lm_eval"] = importlib.metadata.version("lm_eval")
        about = {
            "checkpoint": checkpoint,
            "packages": packages,
            "configuration": dict(self._configuration),
        }
        write_results(self._section.eval_results_prefix, results, about)


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
