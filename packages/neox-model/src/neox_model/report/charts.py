"""Choose the figures of a page: which metrics, of which runs, with which marks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from neox_model.report.figure import MARKS, Line, Mark, figure
from neox_model.report.markup import Html, number, size
from neox_model.report.reading import Run
from neox_model.report.series import curve_of
from neox_model.report.story import ending

__all__ = ["all_figures"]

_MOST_TENSORS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """A figure: the metrics that it shows with their labels.

    Args:
        scale: factor of the values.
        shown: formats a value.
        is_log: logarithmic axis if possible.
        dots: metrics with few values.
    """

    title: str
    unit: str
    metrics: dict[str, str]
    scale: float = 1.0
    shown: Callable[..., str] = number
    is_log: bool = False
    dots: tuple[str, ...] = ()


_LOSS = _Spec(
    title="Loss",
    unit="nats per token",
    metrics={"loss/train": "training", "loss/validation": "validation", "loss/test": "test"},
    is_log=True,
    dots=("loss/validation", "loss/test"),
)
_OTHERS = (
    _Spec(title="Learning rate", unit="per update", metrics={"optimizer/learning_rate": "learning rate"}),
    _Spec(
        title="Gradient norm",
        unit="2-norm of all gradients before clipping",
        metrics={"optimizer/grad_norm": "gradient norm"},
        is_log=True,
    ),
    _Spec(title="Loss scale", unit="float16", metrics={"optimizer/loss_scale": "loss scale"}, is_log=True),
    _Spec(
        title="Throughput",
        unit="tokens per second, all devices",
        metrics={"throughput/tokens_per_second": "tokens/s"},
    ),
    _Spec(
        title="Speed per device",
        unit="TFLOP/s",
        metrics={"throughput/tflops_per_device": "TFLOP/s per device"},
    ),
    _Spec(
        title="Model FLOPs utilization",
        unit="percent of the device's peak",
        metrics={"throughput/mfu": "MFU (full)", "throughput/mfu_causal": "MFU (causal)"},
        scale=100.0,
    ),
    _Spec(
        title="Device memory",
        unit="rank 0",
        metrics={
            "memory/peak_allocated_bytes": "most allocated",
            "memory/allocated_bytes": "allocated",
            "memory/reserved_bytes": "reserved",
        },
        shown=size,
    ),
    _Spec(
        title="Host memory",
        unit="resident, rank 0",
        metrics={"memory/host_bytes": "now", "memory/host_peak_bytes": "at most"},
        shown=size,
    ),
    _Spec(
        title="Time of an iteration",
        unit="seconds, by phase where measured",
        metrics={
            "time/iteration": "whole",
            "time/forward": "forward",
            "time/backward": "backward",
            "time/step": "step",
            "time/pipeline": "pipeline",
            "time/data": "data",
            "time/other": "other",
        },
    ),
    _Spec(
        title="Gradient noise scale",
        unit="samples",
        metrics={"gradient_noise_scale/simple": "simple noise scale"},
        is_log=True,
    ),
)


def all_figures(runs: Sequence[Run]) -> Html:
    """Return all figures for which a run has values; several runs are drawn into the same figures."""
    marks = [mark for run in runs for mark in _marks(run, named=len(runs) > 1)]
    figures = []
    for spec in (_LOSS, *_OTHERS, *_by_tensor(runs)):
        lines = [line for run in runs for line in _lines(spec, run, named=len(runs) > 1)]
        drawn = figure(
            spec.title,
            lines,
            unit=spec.unit,
            marks=marks,
            is_log=spec.is_log,
            is_wide=spec is _LOSS,
            shown=spec.shown,
        )
        figures.append(drawn)
    return Html("".join(figures))


def _lines(spec: _Spec, run: Run, *, named: bool) -> Iterator[Line]:
    before = f"{run.name}: " if named else ""
    for metric, label in spec.metrics.items():
        if metric in run.columns:
            curve = curve_of(run.columns[metric], scale=spec.scale)
            yield Line(label=before + label, curve=curve, has_dots=metric in spec.dots)
    # The first metric is enough to see what was lost.
    metric, label = next(iter(spec.metrics.items()))
    for attempt, columns in sorted(run.repeated.items()):
        if metric in columns:
            text = f"{before}{label}, attempt {attempt}, repeated later"
            yield Line(label=text, curve=curve_of(columns[metric], scale=spec.scale), is_faded=True)


def _marks(run: Run, *, named: bool) -> Iterator[Mark]:
    before = f"{run.name}: " if named else ""
    for attempt, after in zip(run.attempts, run.attempts[1:], strict=False):
        text = f"{before}attempt {attempt.number} ended: {ending(attempt)}"
        yield Mark(attempt.last, "failure", text)
        yield Mark(after.first, "restart", f"{before}attempt {after.number} continues from here")
    for event in run.events:
        if event["event"] in MARKS:
            text = f"{before}iteration {event['iteration']:,}: {MARKS[event['event']]}"
            yield Mark(event["iteration"], event["event"], text)


def _by_tensor(runs: Sequence[Run]) -> Iterator[_Spec]:
    """Yield a figure for each kind of norms, with the tensors whose last norms are the largest."""
    for prefix, title in (
        ("param_norms/", "Norms of weights"),
        ("gradient_norms/", "Norms of gradients"),
        ("optimizer_state_norms/", "Norms of optimizer states"),
    ):
        last = {
            name: column.last
            for run in runs
            for name, column in run.columns.items()
            if name.startswith(prefix)
        }
        largest = sorted(last, key=last.__getitem__, reverse=True)[:_MOST_TENSORS]
        some = f", the {len(largest)} largest of {len(last):,} tensors" if len(last) > len(largest) else ""
        if largest:
            yield _Spec(
                title=title,
                unit=f"2-norm{some}",
                metrics={name: name.removeprefix(prefix) for name in largest},
                is_log=True,
            )
