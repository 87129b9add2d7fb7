"""What will be tried and what was found, as text."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from neox_launcher.autotuning.results import Result, best_of
from neox_launcher.autotuning.space import Candidate, Experiment

__all__ = ["list_experiments", "render_experiments", "render_results"]

_NAMES = ("zero", "micro-batch", "accumulation", "recomputed", "overlap", "model")


def list_experiments(stages: Sequence[Sequence[Candidate]]) -> list[dict[str, Any]]:
    """For programs: name and settings of each, in the order of trials."""
    experiments = [candidate.experiment for stage in stages for candidate in stage]
    return [{"name": one.name, "settings": one.settings} for one in experiments]


def render_experiments(stages: Sequence[Sequence[Candidate]]) -> str:
    """For people: a table, in the order of trials."""
    experiments = [candidate.experiment for stage in stages for candidate in stage]
    lines: list[tuple[str, ...]] = [("trial", *_NAMES)]
    lines += [(str(number), *_cells(one)) for number, one in enumerate(experiments, 1)]
    return _table(lines)


def render_results(results: Sequence[Result], metric: str) -> str:
    """A table of all trials, the best first, and the settings of the best."""
    if not results:
        return "no trial has ended yet"
    ranked = sorted(results, key=lambda result: result.merit(metric), reverse=True)
    lines: list[tuple[str, ...]] = [(*_NAMES, "time", "samples/s", "TFLOP/s", "")]
    lines += [(*_cells(result.experiment), *_figures(result), _remark(result)) for result in ranked]
    table = f"trials, best {metric} first\n\n{_table(lines)}"
    best = best_of(results, metric)
    if best is None:
        return f"{table}\n\nno trial could be measured"
    settings, options = _as_yaml(best.experiment), _as_options(best.experiment)
    return f"{table}\n\nthe best as settings:\n{settings}\n\nor as options:\n  {options}"


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


def _figures(result: Result) -> tuple[str, str, str]:
    if result.seconds is None:
        return "", "", ""
    return f"{result.seconds:.4g} s", f"{result.samples_per_second:,.4g}", f"{result.tflops_per_device:.3g}"


def _remark(result: Result) -> str:
    if result.status == "measured":
        return "known from an earlier command" if result.was_reused else ""
    return f"{result.status}: {result.reason}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _as_yaml(experiment: Experiment) -> str:
    """Lines for a configuration file; nested ones as one mapping."""
    blocks = groupby(experiment.settings.items(), key=lambda item: item[0].rpartition(".")[0])
    lines = []
    for block, items in blocks:
        pairs = [(name.rpartition(".")[2], json.dumps(value)) for name, value in items]
        if block:
            inside = ", ".join(f"{name}: {value}" for name, value in pairs)
            lines.append(f"  {block}: {{{inside}}}")
        else:
            lines += [f"  {_spelled(name)}: {value}" for name, value in pairs]
    return "\n".join(lines)


def _as_options(experiment: Experiment) -> str:
    settings = experiment.settings.items()
    return " ".join(f"--set {_spelled(name)}={json.dumps(value)}" for name, value in settings)


def _spelled(name: str) -> str:
    """As users write it: DeepSpeed's blocks as DeepSpeed does, others with dashes."""
    return name if "." in name else name.replace("_", "-")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Columns that hold something, numbers to the right; the last one is a remark."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column[0] else cell
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in rows
    )
