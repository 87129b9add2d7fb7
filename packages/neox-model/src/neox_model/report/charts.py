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


@dataclass(frozen=True, slots=True)
class _Spec:
    """A figure: its metrics with their labels, and those of few values, which are marked by dots."""

    title: str
    unit: str
    metrics: dict[str, str]
    scale: float = 1.0
    shown: Callable[..., str] = number
    is_log: bool = False
    dots: tuple[str, ...] = ()


_LOSS = _Spec(
    "Loss",
    "nats per token",
    {"loss/train": "training", "loss/validation": "validation", "loss/test": "test"},
    is_log=True,
    dots=("loss/validation", "loss/test"),
)
_MFU = {"throughput/mfu": "MFU (full)", "throughput/mfu_causal": "MFU (causal)"}
_DEVICE = {"peak_allocated": "most allocated", "allocated": "allocated", "reserved": "reserved"}
_PHASES = ("forward", "backward", "step", "pipeline", "data", "other")
_OTHERS = (
    _Spec("Learning rate", "per update", {"optimizer/learning_rate": "learning rate"}),
    _Spec(
        "Gradient norm",
        "2-norm of all gradients before clipping",
        {"optimizer/grad_norm": "gradient norm"},
        is_log=True,
    ),
    _Spec("Loss scale", "float16", {"optimizer/loss_scale": "loss scale"}, is_log=True),
    _Spec("Load of experts", "tokens of the busiest, divided by the mean", {"experts/load": "load"}),
    _Spec(
        "Entropy of experts", "of their shares, divided by its largest value", {"experts/entropy": "entropy"}
    ),
    _Spec("Throughput", "tokens per second, all devices", {"throughput/tokens_per_second": "tokens/s"}),
    _Spec("Speed per device", "TFLOP/s", {"throughput/tflops_per_device": "TFLOP/s per device"}),
    _Spec("Model FLOPs utilization", "percent of the device's peak", _MFU, scale=100.0),
    _Spec(
        "Device memory",
        "rank 0",
        {f"memory/{name}_bytes": label for name, label in _DEVICE.items()},
        shown=size,
    ),
    _Spec(
        "Host memory",
        "resident, rank 0",
        {"memory/host_bytes": "now", "memory/host_peak_bytes": "at most"},
        shown=size,
    ),
    _Spec(
        "Time of an iteration",
        "seconds, by phase where measured",
        {"time/iteration": "whole", **{f"time/{phase}": phase for phase in _PHASES}},
    ),
    _Spec(
        "Gradient noise scale", "samples", {"gradient_noise_scale/simple": "simple noise scale"}, is_log=True
    ),
)


def all_figures(runs: Sequence[Run]) -> Html:
    """Return all figures for which a run has values; several runs are drawn into the same figures."""
    marks = [mark for run in runs for mark in _marks(run, named=len(runs) > 1)]
    return Html(
        "".join(
            figure(
                spec.title,
                [line for run in runs for line in _lines(spec, run, named=len(runs) > 1)],
                unit=spec.unit,
                marks=marks,
                is_log=spec.is_log,
                is_wide=spec is _LOSS,
                shown=spec.shown,
            )
            for spec in (_LOSS, *_OTHERS, *_by_tensor(runs))
        )
    )


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
        columns = {name: column for run in runs for name, column in run.columns.items()}
        last = {name: column.last for name, column in columns.items() if name.startswith(prefix)}
        largest = sorted(last, key=last.__getitem__, reverse=True)[:_MOST_TENSORS]
        some = f", the {len(largest)} largest of {len(last):,} tensors" if len(last) > len(largest) else ""
        if largest:
            labels = {name: name.removeprefix(prefix) for name in largest}
            yield _Spec(title, f"2-norm{some}", labels, is_log=True)
