"""State what happened in a run: its attempts, how each ended and why, and its events in order of time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neox_config.facts.records import AVERAGED
from neox_config.facts.spikes import ROLLBACK
from neox_config.pluralize import first_few, pluralize
from neox_model.report.compare import Change, changes
from neox_model.report.markup import clock, duration, number
from neox_model.report.reading import Attempt, Run

__all__ = [
    "RUNNING_SECONDS",
    "Row",
    "ending",
    "happened",
    "loss_spikes",
    "lowest_validation",
    "status",
    "story",
    "timeline",
]

_NAMED = 5
_OF_EVERY_EVENT = ("time", "attempt", "iteration", "event")
RUNNING_SECONDS = 600
"""A record without an end whose last line is younger is taken for that of a running run."""
Row = tuple[str, str, str, str, str]
"""Time, iteration, kind, what in words, details."""


def status(run: Run, *, now: float | None = None) -> tuple[str, str]:
    """Return the state of the run in one word, and the kind of its badge."""
    last = run.attempts[-1]
    if last.end is not None:
        reasons = {"finished": ("finished", "good"), "stopped": ("stopped", "warn")}
        return reasons.get(str(last.end.get("reason")), ("failed", "bad"))
    if last.failures or any(failure["time"] > (last.ended or 0.0) for failure in run.unrecorded):
        return "failed", "bad"
    age = (time.time() if now is None else now) - (last.ended or 0.0)
    return ("running", "good") if age < RUNNING_SECONDS else ("no end recorded", "warn")


def ending(attempt: Attempt) -> str:
    """Return in words why an attempt ended."""
    reason = None if attempt.end is None else attempt.end.get("reason")
    if reason == "finished":
        return "all iterations were finished"
    if reason == "stopped":
        return f"stopped: {attempt.end and attempt.end.get('message')}"
    if attempt.failures:
        return _cause(_alike(attempt.failures)[0])
    if attempt.end is not None:
        return f"error: {_first_line(attempt.end.get('message'))}"
    return "no reason is recorded, as after the loss of rank 0's host, or kill -9"


def story(run: Run, *, now: float | None = None) -> list[str]:
    """Return one sentence per attempt, and others on spikes and failed starts; `now`: a time for tests."""
    sentences = []
    for place, attempt in enumerate(run.attempts):
        is_running = attempt is run.attempts[-1] and status(run, now=now)[0] == "running"
        # A process that is killed does not write the records of its last iterations.
        least = "at least " if attempt.end is None and not is_running else ""
        text = (
            f"Attempt {attempt.number} trained {_source(attempt)} to {least}iteration {attempt.last:,} "
            f"({clock(attempt.began)} to {clock(attempt.ended)} UTC) and "
        )
        text += "is running." if is_running else f"ended: {ending(attempt)}."
        if place + 1 < len(run.attempts):
            after = run.attempts[place + 1]
            source = f"the checkpoint of iteration {after.first:,}" if after.first else "the beginning"
            has_gap = attempt.ended is not None and after.began is not None
            gap = f", {duration(after.began - attempt.ended)} later" if has_gap else ""  # type: ignore[operator]
            again = pluralize(max(0, attempt.last - after.first), "iteration was", "iterations were")
            text += f" Attempt {after.number} continued from {source}{gap}; {least}{again} repeated."
        sentences.append(text)
    if spikes := loss_spikes(run):
        places = first_few([f"{event['iteration']:,}" for event in spikes], _NAMED)
        many = "s" if len(spikes) > 1 else ""
        sentences.append(f"Loss spike{many} in iteration{many} {places}; see the timeline for the documents.")
    if run.unrecorded:
        first, *others = _alike(run.unrecorded)
        more = f" and {pluralize(sum(map(len, others)), 'more failure')}" if others else ""
        sentences.append(f"A start ended before its first record: {_cause(first)}{more}.")
    return sentences


def timeline(run: Run) -> list[Row]:
    """Return what happened in order of time, without saves that succeeded."""
    changed = changes(run)
    rows = [
        row
        for attempt in run.attempts
        for row in _attempt_rows(attempt, [each for each in changed if each[0] is attempt])
    ]
    rows += [_failure_row(alike, run.last_iteration) for alike in _alike(run.unrecorded)]
    rows += [
        _timed(event, event["event"], *_in_words(event)) for event in run.events if event["event"] != "save"
    ]
    # The last evaluation may have the same time as the end.
    return [row for _, row in sorted(rows, key=lambda found: (found[0], found[1][2] == "end"))]


def happened(run: Run, kind: str) -> list[Mapping[str, Any]]:
    """Return the events of a kind, without those of iterations that a later attempt repeated."""
    return [event for event in run.in_effect if event["event"] == kind]


def loss_spikes(run: Run) -> list[Mapping[str, Any]]:
    """Return the loss spikes in effect, and those that ended an attempt: their batches are left out."""
    return [
        event
        for event in run.events
        if event["event"] == "spike" and (event in run.in_effect or event.get("action") == "rollback")
    ]


def lowest_validation(run: Run) -> tuple[float, int] | None:
    """Return the lowest validation loss in effect and its iteration; None without one."""
    evaluations = [event for event in happened(run, "evaluation") if event.get("part") == "valid"]
    losses = [(event["loss"], event["iteration"]) for event in evaluations if event.get("loss") is not None]
    return min(losses, default=None)


def _alike(failures: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Divide failures, earliest first: an error of all ranks of one start is one event."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        key = str(failure.get("restart")), str(failure.get("message"))
        found.setdefault(key, []).append(failure)
    return list(found.values())


def _cause(alike: Sequence[Mapping[str, Any]]) -> str:
    """Return in words who failed, when and why, of failures with equal messages."""
    first, when = alike[0], f"at {clock(alike[0]['time'])} UTC: {_first_line(alike[0].get('message'))}"
    if _is_rollback(first):
        return f"rollback {when}"
    hosts, ranks = (list(dict.fromkeys(each.get(name) for each in alike)) for name in ("host", "rank"))
    named = first_few(hosts, _NAMED)
    if not first.get("host"):  # A hang, which is found for the whole launch.
        who = "the launch"
    elif first.get("rank") is None:
        who = f"host{'s' if len(hosts) > 1 else ''} {named}"
    else:
        who = f"worker{'s' if len(ranks) > 1 else ''} {first_few(ranks, _NAMED)} on {named}"
    return f"{who} failed {when}"


def _is_rollback(failure: Mapping[str, Any]) -> bool:
    """Return whether a worker ended on purpose, to be restarted without the batch of a spike."""
    return failure.get("exit_code") == ROLLBACK


def _first_line(text: Any) -> str:
    return str(text or "").strip().split("\n")[0]


def _source(attempt: Attempt) -> str:
    """Return in words what an attempt started from."""
    if attempt.first:
        return f"from iteration {attempt.first:,}"
    if attempt.start.get("checkpoint"):
        return f"from the weights of {attempt.start['checkpoint']}"
    return "from new weights"


def _attempt_rows(attempt: Attempt, changed: Sequence[Change]) -> Iterator[tuple[float, Row]]:
    start = attempt.start
    where = f"{start['devices']} x {start['device']}, host {start['host']}" if start else ""
    began = {"time": attempt.began, "iteration": attempt.first}
    kind = "restart" if attempt.restart else "start"
    begins = f"attempt {attempt.number} begins {_source(attempt)}"
    if changed:
        begins += f", with {pluralize(len(changed), 'change')}"
        where += "".join(f"; {name}: {before}, then {after}" for _, name, before, after in changed)
    yield _timed(began, kind, begins, where)
    yield from (_failure_row(alike, attempt.last) for alike in _alike(attempt.failures))
    if attempt.end is None:
        return
    text = {"finished": "the run is finished", "stopped": "the run was stopped"}
    reason, message = str(attempt.end.get("reason")), str(attempt.end.get("message") or "")
    failed = [_first_line(failure.get("message")) for failure in attempt.failures]
    if reason in text:
        yield _timed(attempt.end, "end", text[reason], message)
    # Unless its message is that of a failure.
    elif not any(line and line in message for line in failed):
        yield _timed(attempt.end, "failure", "rank 0 ended with an error", message)


def _failure_row(alike: Sequence[Mapping[str, Any]], iteration: int) -> tuple[float, Row]:
    """Return the row of failures with equal messages."""
    failure = alike[0]
    message = str(failure.get("message") or "").strip()
    # The first line of the message is in the cause already.
    rest = message if "\n" in message else ""
    detail = failure.get("traceback") or failure.get("output") or rest
    kind = "rollback" if _is_rollback(failure) else "failure"
    return _timed({**failure, "iteration": iteration}, kind, _cause(alike), str(detail).strip())


def _timed(event: Mapping[str, Any], kind: str, text: str, detail: str) -> tuple[float, Row]:
    when = event.get("time")
    return when or 0.0, (clock(when), f"{event['iteration']:,}", kind, text, str(detail))


def _in_words(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return what an event is, and its details."""
    get = event.get
    match event["event"]:
        case "evaluation":
            plain = str(get("part")).removesuffix(AVERAGED)
            part = {"valid": "validation"}.get(plain, plain)
            part += " (averaged weights)" if plain != get("part") else ""
            text = f"{part} loss {number(get('loss'))}, perplexity {number(get('perplexity'))}"
            return text, f"took {duration(get('seconds'))}"
        case "skipped":
            values = {name: get(name) for name in ("loss", "grad_norm", "loss_scale")}
            shown = ", ".join(
                f"{name} {number(value)}" for name, value in values.items() if value is not None
            )
            return f"the update was skipped ({get('reason')}): {shown}", _samples(event)
        case "spike":
            text = f"loss spike: {number(get('loss'))}, above the limit {number(get('limit'))}"
            return f"{text}; action: {get('action')}", _samples(event)
        case "straggler":
            ranks = get("ranks") or ()
            named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            text = f"{named} computed {number(get('factor'))} times as long as the median"
            times = f"{duration(get('seconds'))}, median {duration(get('median'))}"
            return text, f"host {', '.join(get('hosts') or ())}; {times}"
        case "save_failed":
            return "a checkpoint could not be saved", str(get("message") or "")
        case "sdc":
            return "copies of the weights differ: silent data corruption", str(get("message") or "")
        case unknown:
            rest = {name: value for name, value in event.items() if name not in _OF_EVERY_EVENT}
            return str(unknown), ", ".join(f"{name} {value}" for name, value in rest.items())


def _samples(event: Mapping[str, Any]) -> str:
    if event.get("first_sample") is None:
        return ""
    documents = event.get("documents")
    source = f", from {documents}" if documents else "; their documents were not recorded"
    return f"samples {event['first_sample']:,} to {event.get('last_sample', event['first_sample']):,}{source}"
