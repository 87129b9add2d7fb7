"""Put the page together."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from importlib import resources
from operator import getitem
from typing import Any

from neox_config.facts.records import AVERAGED
from neox_config.pluralize import pluralize
from neox_model.report.charts import all_figures
from neox_model.report.compare import differences, flattened
from neox_model.report.markup import Html, clock, duration, element, number, plain, size, table
from neox_model.report.reading import Run
from neox_model.report.story import happened, loss_spikes, lowest_validation, status, story, timeline

__all__ = ["render_body", "render_page"]

_MOST_EVENTS = 400
_MEMORY = ("memory/peak_allocated_bytes", "memory/host_peak_bytes")
# The colours of events; all others are plain.
_KIND_COLORS = {
    **dict.fromkeys(("failure", "restart", "sdc", "save_failed"), "bad"),
    **dict.fromkeys(("skipped", "spike", "rollback", "straggler"), "warn"),
    **dict.fromkeys(("start", "end"), "good"),
}


def render_page(runs: Sequence[Run]) -> str:
    """Return the page about one or several runs as HTML.

    Args:
        runs: at least one.
    """
    title = " and ".join(run.name for run in runs)
    sections = {
        "Runs compared": _compared(runs) if len(runs) > 1 else Html(""),
        "Curves": element("div", all_figures(runs), class_="charts"),
        "Timeline": _each(runs, _timeline),
        "Estimate and measurement": _each(runs, _estimate, of_start=True),
        "Configuration": _each(runs, _configuration, of_start=True),
        "Environment": _each(runs, _environment, of_start=True),
    }
    # Heading -> name of the place in the page, and content.
    shown = {
        heading: (heading.lower().replace(" ", "-"), content)
        for heading, content in sections.items()
        if content
    }
    body = element(
        "main",
        element("h1", f"Training {title}"),
        element("nav", *(element("a", heading, href=f"#{name}") for heading, (name, _) in shown.items())),
        *(_head(run, named=len(runs) > 1) for run in runs),
        *(
            element("section", element("h2", heading), content, id=name)
            for heading, (name, content) in shown.items()
        ),
    )
    return render_body(title, body)


def render_body(title: str, body: Html) -> str:
    """Return a page with this content as HTML."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
    )
    style = Html(f"<style>{_packaged('style.css')}</style>")
    script = Html(f"<script>{_packaged('script.js')}</script>")
    return f"{head}{element('title', title)}{style}</head><body>{body}{script}</body></html>\n"


def _packaged(name: str) -> str:
    """Return a file of this package; it becomes a part of the page, which therefore needs no network."""
    return resources.files("neox_model.report").joinpath(name).read_text(encoding="utf-8")


def _each(runs: Sequence[Run], part: Any, *, of_start: bool = False) -> Html:
    """Return a part of every run; `of_start`: it shows what attempts record at their start, if they did."""
    pieces = []
    for run in runs:
        pieces += [element("h3", run.name)] if len(runs) > 1 else []
        is_told = run.about or not of_start
        pieces.append(part(run) if is_told else element("p", "Not in the record.", class_="soft"))
    return Html("".join(pieces))


def _head(run: Run, *, named: bool) -> Html:
    """Return what happened in words, and the most important numbers."""
    word, kind = status(run)
    planned = run.about.get("last_iteration")
    done = f"{run.last_iteration:,} of " if planned else ""
    iterations = pluralize(planned or run.last_iteration, "iteration")
    name = [element("b", run.name), " "] if named else []
    ended = clock(run.attempts[-1].ended)
    attempts = pluralize(len(run.attempts), "attempt")
    summary = f" {done}{iterations} in {attempts}; last record {ended} UTC; log folder "
    badge, folder = element("span", word, class_=f"badge {kind}"), element("code", str(run.source))
    told = element("ol", *(element("li", sentence) for sentence in story(run)))
    return element(
        "div",
        element("div", element("p", *name, badge, summary, folder), told, class_="story"),
        element("div", *_tiles(run), class_="tiles"),
    )


def _tiles(run: Run) -> Iterator[Html]:
    last, lowest = run.last_value, lowest_validation(run)
    texts = {
        "training loss, last": number(last("loss/train")),
        "validation loss, last": number(last("loss/validation")),
    }
    if lowest is not None:
        texts[f"validation loss, lowest, in iteration {lowest[1]:,}"] = number(lowest[0])
    texts |= {
        "tokens": number(last("progress/tokens"), digits=3),
        "tokens/s, median": number(_median(run, "throughput/tokens_per_second"), digits=3),
        "TFLOP/s per device, median": number(_median(run, "throughput/tflops_per_device"), digits=3),
    }
    # Why there is none is among the estimates.
    for label, metric in (("MFU (full)", "throughput/mfu"), ("MFU (causal)", "throughput/mfu_causal")):
        if (share := last(metric)) is not None:
            texts[label] = f"{100 * share:.1f} %"
    texts["most memory, rank 0"] = size(_largest(run, *_MEMORY))
    evaluations = sum(not str(each.get("part")).endswith(AVERAGED) for each in happened(run, "evaluation"))
    numbers = (
        pluralize(run.restarts, "restart"),
        pluralize(evaluations, "evaluation"),
        pluralize(_skipped(run), "update skipped", "updates skipped"),
        pluralize(len(loss_spikes(run)), "loss spike"),
        pluralize(len(run.checkpoints), "checkpoint kept", "checkpoints kept"),
    )
    texts |= {what: total for total, _, what in (each.partition(" ") for each in numbers)}
    for label, text in texts.items():
        yield element("div", element("b", text), element("span", label), class_="tile")


def _timeline(run: Run) -> Html:
    rows, lines = timeline(run), []
    for when, iteration, kind, text, detail in rows[-_MOST_EVENTS:]:
        if "\n" in detail or len(detail) > 300:
            summary = element("summary", detail.split("\n")[0][:120])
            detail = element("details", summary, element("pre", detail))
        badge = f"badge {_KIND_COLORS.get(kind, 'plain')}"
        lines.append((when, iteration, element("span", kind.replace("_", " "), class_=badge), text, detail))
    shown = table(("time (UTC)", "iteration", "event", "what", "details"), lines, class_="timeline")
    if len(rows) <= _MOST_EVENTS:
        return shown
    return Html(element("p", f"The {_MOST_EVENTS:,} latest of {len(rows):,} events.", class_="soft") + shown)


def _estimate(run: Run) -> Html:
    estimate, memory = run.about["estimate"], run.about["estimate"]["memory_bytes"]
    on_device, host = (_largest(run, metric) for metric in _MEMORY)
    measured = (
        f"{size(on_device)} allocated by tensors" if on_device else f"{size(host)} resident in host memory"
    )
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory.items() if name != "total" and value)
    rows = [
        ("memory of a device", f"{size(memory['total'])} ({parts})", f"{measured}, rank 0, at most"),
        ("time of an iteration", *_times(run)),
        (
            "operations per iteration",
            f"{number(estimate['flops_per_iteration'] / 1e12)} TFLOP",
            "not counted",
        ),
        ("parameters", f"{estimate['parameters']:,}", "as estimated: the model is built from the same sizes"),
    ]
    note = (
        "Operations are those of forward and backward pass without recomputation, with attention as if every "
        "token saw the whole sequence, as in MFU (full); MFU (causal) leaves out what the causal mask hides."
    )
    # Of records without a device, every estimate is for GPUs.
    if estimate.get("device", "cuda") == "cuda":
        note += " The buffers include 1 GiB for the device's runtime and libraries."
    return Html(table(("", "estimated", "measured"), rows) + element("p", note, class_="soft"))


def _times(run: Run) -> tuple[str, str]:
    """Return the least possible time of an iteration at the device's peak speed, and the measured median."""
    about = run.about
    peak, flops = about.get("peak_tflops"), about["estimate"]["flops_per_iteration"]
    median = _median(run, "time/iteration")
    measured = f"{duration(median)} (median)"
    if peak is None:
        return f"no lower bound: {about.get('peak_reason')}", measured
    least = flops / (peak * 1e12 * about["devices"])
    share = f", {median / least:.3g} times as long" if median else ""
    return f"at least {duration(least)}, at the peak of {number(peak)} TFLOP/s", measured + share


def _configuration(run: Run) -> Html:
    about = run.about
    values, origins = flattened(about["config"]), about["origins"]
    sources = [(name, _written(about["config"], name), origin) for name, origin in origins.items()]
    others = [
        (name, plain(value))
        for name, value in values.items()
        if not any(name == given or name.startswith(f"{given}.") for given in origins)
    ]
    rest = element(
        "details",
        element("summary", f"{pluralize(len(others), 'parameter')} with their defaults"),
        table(("parameter", "value"), others),
    )
    return Html(table(("parameter", "value", "origin"), sources) + rest)


def _written(config: Any, name: str) -> str:
    """Return a value by dotted name; a secret is not in the record."""
    try:
        return plain(reduce(getitem, name.split("."), config))
    except (LookupError, TypeError):
        return "not in the record (a secret, or a value that others replace)"


def _environment(run: Run) -> Html:
    about, layout = run.about, run.about["layout"]
    commit = about["code"]["commit"] or "unknown: not a git checkout"
    rows = [
        ("host of rank 0", about["host"]),
        ("devices", f"{about['devices']} x {about['device']}"),
        ("layout", f"data {layout['data']}, model {layout['model']}, pipe {layout['pipe']}"),
        ("precision", about["derived"]["precision"]),
        ("train batch size", pluralize(about["derived"]["train_batch_size"], "sample")),
        ("code", f"commit {commit}, sources {about['code']['sources_sha256']}"),
        *((name, version) for name, version in about["packages"].items()),
        *((f"attention backend, {kind}", str(name)) for kind, name in (about.get("attention") or {}).items()),
    ]
    checkpoints = [(f"{iteration:,}", f"{clock(when)} UTC") for iteration, when in run.checkpoints]
    kept = table(("checkpoint of iteration", "written"), checkpoints) if checkpoints else Html("")
    return Html(table(("", ""), rows) + (element("h3", "Checkpoints") + kept if kept else ""))


def _compared(runs: Sequence[Run]) -> Html:
    """Return the results of the runs side by side, and everything that differs."""
    values: dict[str, Callable[[Run], str]] = {
        "status": lambda run: status(run)[0],
        "iterations": lambda run: f"{run.last_iteration:,}",
        "training loss, last": lambda run: number(run.last_value("loss/train")),
        "validation loss, last": lambda run: number(run.last_value("loss/validation")),
        "tokens/s, median": lambda run: number(_median(run, "throughput/tokens_per_second"), digits=3),
        "time of an iteration, median": lambda run: duration(_median(run, "time/iteration")),
        "most memory, rank 0": lambda run: size(_largest(run, *_MEMORY)),
        "restarts": lambda run: str(run.restarts),
        "updates skipped": lambda run: str(_skipped(run)),
        "loss spikes": lambda run: str(len(loss_spikes(run))),
    }
    names = [run.name for run in runs]
    parts = [table(("", *names), ((name, *map(value, runs)) for name, value in values.items()))]
    for subject, differing in differences([run.about for run in runs]).items():
        parts.append(element("h3", f"Difference in {subject}"))
        parts.append(table(("", *names), differing) if differing else element("p", "None.", class_="soft"))
    return Html("".join(parts))


def _skipped(run: Run) -> int:
    """Return the number of updates that were left out: not finite, or of the batches of loss spikes."""
    counted = run.last_value("optimizer/skipped_iterations")
    if counted is not None:
        return int(counted)
    spikes = [event for event in happened(run, "spike") if event.get("action") == "skip"]
    return len(happened(run, "skipped")) + len(spikes)


def _median(run: Run, metric: str) -> float | None:
    return statistics.median(run.columns[metric].values) if metric in run.columns else None


def _largest(run: Run, *metrics: str) -> float | None:
    """Return the largest value of the first of some metrics that was recorded."""
    return next((max(run.columns[metric].values) for metric in metrics if metric in run.columns), None)
