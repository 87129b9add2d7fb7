"""Renders the planned trials and their results."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from neox_config.describe.tables import table
from neox_launcher.autotuning.results import Result, best_of
from neox_launcher.autotuning.space import Candidate, Experiment

__all__ = ["list_experiments", "render_experiments", "render_results"]

_NAMES = ("zero", "micro-batch", "accumulation", "recomputed", "overlap", "model")


def list_experiments(stages: Sequence[Sequence[Candidate]]) -> list[dict[str, Any]]:
    """Return the name and the settings of each trial, in the order of trials, for JSON output."""
    experiments = [candidate.experiment for stage in stages for candidate in stage]
    return [{"name": one.name, "settings": one.settings} for one in experiments]


def render_experiments(stages: Sequence[Sequence[Candidate]]) -> str:
    """Render a table of the planned trials, in their order."""
    experiments = [candidate.experiment for stage in stages for candidate in stage]
    lines: list[tuple[str, ...]] = [("trial", *_NAMES)]
    lines += [(str(number), *_cells(one)) for number, one in enumerate(experiments, 1)]
    return _table(lines)


def render_results(results: Sequence[Result], metric: str) -> str:
    """Render a table of all trials, the best first, and the settings of the best."""
    if not results:
        return "no trial has finished"
    ranked = sorted(results, key=lambda result: result.merit(metric), reverse=True)
    lines: list[tuple[str, ...]] = [(*_NAMES, "time", "samples/s", "TFLOP/s", "")]
    lines += [(*_cells(result.experiment), *_measured(result)) for result in ranked]
    trials = f"trials, best {metric} first\n\n{_table(lines)}"
    best = best_of(results, metric)
    if best is None:
        return f"{trials}\n\nno trial succeeded"
    given = {
        _spelled(name): json.dumps(value, allow_nan=False) for name, value in best.experiment.settings.items()
    }
    options = " ".join(f"--set {name}={value}" for name, value in given.items())
    settings = _as_yaml(best.experiment)
    return f"{trials}\n\nbest settings, for the configuration file:\n{settings}\n\nas options:\n  {options}"


def _cells(experiment: Experiment) -> tuple[str, ...]:
    size = experiment.model_parallel_size
    return (
        str(experiment.zero_stage),
        str(experiment.micro_batch),
        str(experiment.accumulation),
        _yes(experiment.checkpoint_activations),
        _yes(experiment.overlap_comm),
        "" if size is None else str(size),
    )


def _measured(result: Result) -> tuple[str, str, str, str]:
    """Return time, rates and remark."""
    if result.seconds is None:
        return "", "", "", f"{result.status}: {result.reason}"
    remark = "from an earlier run" if result.was_reused else ""
    rates = f"{result.samples_per_second:,.4g}", f"{result.tflops_per_device:.3g}"
    return f"{result.seconds:.4g} s", *rates, remark


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _as_yaml(experiment: Experiment) -> str:
    """Return lines for a configuration file, with each block as one mapping."""
    blocks = groupby(experiment.settings.items(), key=lambda item: item[0].rpartition(".")[0])
    lines = []
    for block, items in blocks:
        pairs = [(name.rpartition(".")[2], json.dumps(value, allow_nan=False)) for name, value in items]
        if block:
            inside = ", ".join(f"{name}: {value}" for name, value in pairs)
            lines.append(f"  {block}: {{{inside}}}")
        else:
            lines += [f"  {_spelled(name)}: {value}" for name, value in pairs]
    return "\n".join(lines)


def _spelled(name: str) -> str:
    """Return the usual spelling of a name: parameters of DeepSpeed blocks unchanged, others with dashes."""
    return name if "." in name else name.replace("_", "-")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Align the columns that are not empty, to the right except for the last one, the remarks."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    remarks = [number for number, column in enumerate(columns) if not column[0]]
    return table(list(zip(*columns, strict=True)), left=remarks)
