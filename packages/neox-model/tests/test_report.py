"""The page and the plot of `neox-report`, from records that are written here."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_config.facts.records import FAILURES
from neox_model.metrics.events import Events
from neox_model.metrics.writers.jsonl import JsonlWriter
from neox_model.report.chart import smoothed
from neox_model.report.cli import main
from neox_model.report.compare import changes, differences
from neox_model.report.markup import duration, number, size
from neox_model.report.page import render_page
from neox_model.report.reading import Column, read_run, read_runs
from neox_model.report.series import MOST_POINTS, curve_of
from neox_model.report.story import ending, status
from support.refusals import shows

BEGIN = 1_763_874_000.0
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


def write_record(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def about(**changes):
    config = {"hidden_size": 24, "data_path": "a/corpus", "optimizer": {"type": "Adam"}, "comment": HOSTILE}
    return {
        "host": "h",
        "devices": 2,
        "layout": {"data": 2, "model": 1, "pipe": 1},
        "device": "CPU (x86_64, 2 cores)",
        "peak_tflops": None,
        "peak_reason": "a CPU has no single peak speed",
        "packages": {"torch": "2.13.0"},
        "code": {"commit": "abc", "sources_sha256": "1234"},
        "config": config | changes,
        "origins": {
            "hidden_size": "job.yml line 3",
            "optimizer.type": "job.yml line 9",
            "comment": "x.yml line 1",
        },
        "derived": {"precision": "fp32", "train_batch_size": 8},
        "estimate": {
            "memory_bytes": {"weights": 2**20, "total": 2**30},
            "parameters": 1000,
            "flops_per_token": 6000,
            "flops_per_iteration": 10**12,
        },
        "last_iteration": 60,
    }


def begin(folder, first=0, *, start=None, launch="this", time=BEGIN, **more):
    """Begin an attempt, and return what writes its metrics and its events."""
    writer = JsonlWriter(folder, iteration=first, launch=launch, clock=lambda: time)
    events = Events([writer])
    events.record("start", first, **(start or about()), **{"restart": None, **more})
    return writer, events


def text_of(*folders):
    """Return the visible text of the page about some runs."""
    return read_page(render_page([read_run(folder) for folder in folders]))[1]


def write_run(folder, *, changes=None, spike=True):
    """A run that is killed after iteration 30, restarts from 20, and finishes 60."""
    times = iter(range(10**6))
    for first, last, is_restart in ((0, 30, False), (20, 60, True)):
        writer = JsonlWriter(folder, iteration=first, launch="this", clock=lambda: BEGIN + next(times))
        events = Events([writer])
        events.record("start", first, **about(**(changes or {})), restart=1 if is_restart else None)
        for iteration in range(first + 1, last + 1):
            metrics = {"loss/train": 5.0 / iteration, "optimizer/learning_rate": 1e-3}
            if iteration % 10 == 0:
                metrics |= {"time/iteration": 0.5, "memory/host_peak_bytes": 2.0**28}
            writer.write(metrics, iteration)
        if last == 60:
            samples = {"first_sample": 8, "last_sample": 15, "documents": f"documents 3 and 4 of {HOSTILE}"}
            if spike:
                events.record("spike", 44, loss=9.5, limit=1.25, action="skip", **samples)
            slow = {"ranks": [2, 3], "hosts": [HOSTILE], "seconds": 3.0, "median": 1.5, "factor": 2.0}
            events.record("straggler", 40, **slow)
            events.record("skipped", 45, reason="not finite", loss=float("nan"), **samples)
            events.record("evaluation", 60, part="valid", loss=0.5, perplexity=1.6487, seconds=0.25)
            events.record("end", 60, reason="finished", message=None)
        writer.close()
    failure = {"time": BEGIN + 31.5, "host": "h", "rank": 1, "message": "killed by SIGKILL"}
    (folder / FAILURES).write_text(json.dumps(failure) + "\n" + '{"time": 1, "cut')


class Reader(HTMLParser):
    """Collects the visible text, the elements and what they load."""

    def __init__(self):
        super().__init__()
        self.text, self.tags, self.loaded, self.open = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href", "onerror")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def read_page(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader, re.sub(r"\s+", " ", " ".join(reader.text))


# The page


def test_a_spike_that_ended_an_attempt_is_counted_and_one_that_was_repeated_is_not(tmp_path):
    writer, events = begin(tmp_path)
    # The first one is repeated after the restart; the batches of the second are left out.
    events.record("spike", 24, loss=9.5, limit=1.25, action="skip", documents="documents 1 to 2")
    events.record("spike", 28, loss=9.5, limit=1.25, action="rollback", documents="documents 3 to 4")
    writer.write({"loss/train": 9.5}, 28)
    writer.close()
    writer, _ = begin(tmp_path, 20, time=BEGIN + 9, restart=1)
    writer.write({"loss/train": 1.0, "optimizer/skipped_iterations": 3}, 40)
    writer.close()
    text = text_of(tmp_path)
    assert "1 loss spike " in text
    assert "in iteration 28" in text
    assert "3 updates skipped" in text


def test_the_utilization_is_shown_by_both_conventions_of_which_the_record_has_values(tmp_path):
    writer, _ = begin(tmp_path)
    writer.write({"loss/train": 2.0, "throughput/mfu": 0.515}, 1)
    writer.close()
    text = text_of(tmp_path)
    assert shows(text, "51.5", "MFU")
    assert "% MFU (causal)" not in text
    writer = JsonlWriter(tmp_path, iteration=1, launch="this", clock=lambda: BEGIN)
    writer.write({"loss/train": 2.0, "throughput/mfu": 0.52, "throughput/mfu_causal": 0.481}, 2)
    writer.close()
    text = text_of(tmp_path)
    assert shows(text, "52.0", "MFU")
    assert shows(text, "48.1", "MFU")


def test_the_balance_of_experts_is_drawn_with_its_values(tmp_path):
    writer, _ = begin(tmp_path)
    for iteration, (load, entropy) in enumerate([(3.25, 0.125), (1.75, 0.875)], 1):
        writer.write({"loss/train": 2.0, "experts/load": load, "experts/entropy": entropy}, iteration)
    writer.close()
    page = render_page([read_run(tmp_path)])
    assert all(f'"text":["{values}"]' in page for values in ('3.250","1.750', '0.1250","0.8750'))


@pytest.mark.parametrize(("device", "is_counted"), [("cuda", True), ("cpu", False), (None, True)])
def test_only_estimates_for_gpus_count_their_runtime(tmp_path, device, is_counted):
    start = about()
    start["estimate"] |= {} if device is None else {"device": device}
    writer, _ = begin(tmp_path, start=start)
    writer.write({"loss/train": 2.0}, 1)
    writer.close()
    text = text_of(tmp_path)
    assert "in MFU (full)" in text
    assert ("1 GiB for" in text) == is_counted


@pytest.mark.parametrize(
    ("checkpoint", "config", "words"),
    [
        (None, {}, "from new weights"),
        ("imported", {}, "from the weights of imported"),
        ("adapters", {"lora_rank": 8, "lora_base": "imported"}, "from the weights of adapters"),
    ],
)
def test_the_page_names_what_a_training_starts_from(tmp_path, checkpoint, config, words):
    writer, _ = begin(tmp_path, start=about(**config), checkpoint=checkpoint)
    writer.write({"loss/train": 2.0}, 1)
    writer.close()
    text = text_of(tmp_path)
    assert shows(text, "1 trained", words, "iteration 1")
    assert f"attempt 1 begins {words} 2 x CPU" in text


def test_the_page_answers_what_happened_when_and_why(tmp_path):
    write_run(tmp_path)
    text = text_of(tmp_path)
    assert shows(
        text,
        "1 trained",
        "30 (2025-11-23 05:00:00",
        "2025-11-23 05:00:31 UTC",
        "worker 1",
        "2025-11-23 05:00:31 UTC",
    )
    # In the story and in the timeline, but not again in its details.
    assert text.count("killed by SIGKILL") == 2
    assert shows(text, "1 begins", "2 x", "CPU (x86_64, 2")
    assert "all iterations were" in text
    assert "in iteration 44" in text
    # The update of the spike was skipped, too.
    assert "2 updates skipped" in text
    # The last evaluation comes before the end, even if both have the same time.
    assert text.index("perplexity 1.649") < text.index("is finished")
    assert shows(text, "9.500", "limit 1.250")
    assert shows(text, "samples 8", "15", "documents 3", "4", HOSTILE)
    assert shows(text, "2, 3", "2 times", f"host {HOSTILE}", "3 s", "1.5 s")
    assert shows(text, "(not finite)", "loss nan")
    assert shows(text, "loss 0.5000", "perplexity 1.649")
    assert shows(text, '"Adam" job.yml', "line 9")
    assert shows(text, "1 GiB", "1 MiB) 256", "MiB", "rank 0")
    assert "CPU has no" in text


def test_nothing_from_the_files_becomes_markup_and_nothing_is_loaded(tmp_path):
    write_run(tmp_path / HOSTILE.replace("/", ""))
    page = render_page([read_run(tmp_path / HOSTILE.replace("/", ""))])
    reader, _ = read_page(page)
    assert "img" not in reader.tags
    assert all(value.startswith("#") for value in reader.loaded)
    assert "http" not in page.replace("http-equiv", "")


def test_repeated_iterations_are_faded_and_not_part_of_the_curve(tmp_path):
    write_run(tmp_path)
    run = read_run(tmp_path)
    assert run.columns["loss/train"].iterations.tolist() == list(range(1, 61))
    assert run.repeated[1]["loss/train"].iterations.tolist() == list(range(21, 31))
    assert ([attempt.first for attempt in run.attempts], run.restarts) == ([0, 20], 1)


def test_each_attempt_that_was_repeated_has_its_own_faded_curve_over_all_its_iterations(tmp_path):
    lines = []
    for attempt, first, last in ((1, 0, 100), (2, 20, 30), (3, 20, 22)):
        head = {"attempt": attempt, "time": BEGIN + attempt}
        lines.append({**head, "iteration": first, "event": "attempt", "format": "neox-metrics-1"})
        lines += [{**head, "iteration": n, "loss/train": 1.0 / n} for n in range(first + 1, last + 1)]
    write_record(tmp_path, lines)
    page = render_page([read_run(tmp_path)])
    data = json.loads(re.search(r'<script type="application/json" class="data">(.*?)</script>', page)[1])
    assert (data["first"], data["last"]) == (1, 100)
    assert {line["label"]: line["at"] for line in data["lines"]} == {
        "training": list(range(1, 23)),
        "training, attempt 1, repeated later": list(range(21, 101)),
        "training, attempt 2, repeated later": list(range(21, 31)),
    }


def test_failures_older_than_the_run_do_not_explain_it(tmp_path):
    write_run(tmp_path)
    with (tmp_path / FAILURES).open("w") as file:
        file.write(json.dumps({"time": BEGIN - 5.0, "host": "h", "rank": 1, "message": "yesterday"}) + "\n")
    assert [attempt.failures for attempt in read_run(tmp_path).attempts] == [[], []]


def test_failures_of_starts_without_a_record_are_told_from_those_of_attempts(tmp_path):
    write_run(tmp_path)
    found = [
        {"time": BEGIN - 5.0, "host": "h", "rank": 1, "message": "early", "launch": "this"},
        {"time": BEGIN + 31.0, "host": "h-2", "rank": None, "message": "agent lost", "launch": "this"},
        {"time": BEGIN + 31.5, "host": "", "rank": None, "message": "no progress for 9 s", "launch": "this"},
        {"time": BEGIN + 500.0, "host": "h", "rank": 0, "message": "late", "launch": "another"},
    ]
    (tmp_path / FAILURES).write_text("".join(json.dumps(one) + "\n" for one in found))
    run = read_run(tmp_path)
    assert [[one["message"] for one in attempt.failures] for attempt in run.attempts] == [
        ["agent lost", "no progress for 9 s"],
        [],
    ]
    _, text = read_page(render_page([run]))
    assert shows(text, "worker 1", "2025-11-23 04:59:55 UTC", "1 more")
    assert shows(text, "h-2", "2025-11-23 05:00:31 UTC")
    assert shows(text, "2025-11-23 05:00:31 UTC", "9 s")
    assert shows(text, "worker 0", "2025-11-23 05:08:20 UTC")
    assert status(run) == ("finished", "good")
    assert "older than" not in text


def failures_of(*rows):
    """Failures of the launch `this`: number of the restart, seconds, rank, message, exit code."""
    names = ("restart", "time", "rank", "message", "exit_code")
    head = {"host": "h", "launch": "this"}
    return "".join(json.dumps({**head, **dict(zip(names, row, strict=True))}) + "\n" for row in rows)


def write_restarted_run(folder):
    """Both ranks roll back in iteration 30; restart 1 dies early, restart 2 finishes, and 3 dies early."""
    rolled_back = "the loss of iteration 29 is a spike\nTraceback"
    for restart, first, time in ((None, 0, BEGIN), (2, 20, BEGIN + 50)):
        writer, events = begin(folder, first, time=time, restart=restart)
        if restart is None:
            writer.write({"loss/train": 1.0}, 30)
            events.record("end", 30, reason="error", message=f"RollbackError: {rolled_back}")
        writer.close()
    (folder / FAILURES).write_text(
        failures_of(
            (0, BEGIN + 1, 1, rolled_back, 4),
            (0, BEGIN + 1, 0, rolled_back, 4),
            (1, BEGIN + 20, 1, "killed by SIGKILL", 137),
            (3, BEGIN + 90, 0, "no space left", 1),
            (4, BEGIN + 95, 0, "no space left", 1),
        )
    )


def test_a_start_that_died_early_is_told_by_the_number_of_its_restart(tmp_path):
    write_restarted_run(tmp_path)
    run = read_run(tmp_path)
    assert [len(attempt.failures) for attempt in run.attempts] == [2, 0]
    _, text = read_page(render_page([run]))
    assert shows(text, "worker 1", "2025-11-23 05:00:20 UTC", "SIGKILL", "2 more")
    assert shows(text, "worker 0", "2025-11-23 05:01:30 UTC")
    assert status(run) == ("failed", "bad")
    assert "4 restarts" in text
    # An error of all ranks is one row, and a rollback is no failure of a worker.
    assert shows(text, "2025-11-23 05:00:01 UTC", "iteration 29")
    # Once in the story and once in the timeline, whose details have the rest of the message.
    assert text.count("at 2025-11-23 05:00:01") == 2
    assert "30 rollback rollback" in text
    assert "rank 0 ended" not in text


def test_failures_of_many_workers_name_the_first(tmp_path):
    write_restarted_run(tmp_path)
    rows = ((0, BEGIN + rank / 10, rank, "out of memory", 1) for rank in range(8))
    (tmp_path / FAILURES).write_text(failures_of(*rows))
    text = text_of(tmp_path)
    assert text.count("4 and 3") == 2
    lost = ({"host": host, "rank": None, "message": "agent lost"} for host in ("h-1", "h-2"))
    head = {"time": BEGIN, "launch": "this", "restart": 0}
    (tmp_path / FAILURES).write_text("".join(json.dumps(head | each) + "\n" for each in lost))
    later = text_of(tmp_path)
    assert "h-1, h-2 failed" in later
    # Rank 0 ended with another message.
    assert text.count("rank 0 ended") == 1


def test_the_lowest_validation_loss_is_named(tmp_path):
    _, events = begin(tmp_path)
    for iteration, loss in ((10, 2.0), (20, 1.5), (30, None), (40, 1.75)):
        events.record("evaluation", iteration, part="valid", loss=loss, perplexity=None, seconds=0.25)
        events.record("evaluation", iteration, part="test", loss=0.25, perplexity=None, seconds=0.25)
    text = text_of(tmp_path)
    assert shows(text, "1.500 validation", "iteration 20")


def test_thousands_of_marks_become_one_for_each_place(tmp_path):
    head = {"attempt": 1, "time": BEGIN}
    lines = [{**head, "iteration": 0, "event": "attempt", "format": "neox-metrics-1"}]
    lines += [{**head, "iteration": n, "loss/train": 1.0} for n in range(1, 20_001)]
    lines += [{**head, "iteration": n, "event": "skipped"} for n in range(1, 20_001, 2)]
    lines += [{**head, "iteration": 7_000, "event": "spike"}]
    write_record(tmp_path, lines)
    page = render_page([read_run(tmp_path)])
    marks = re.findall(r'<i class="mark (\w+)"[^>]*title="([^"]*)"', page)
    skipped = [text for kind, text in marks if kind == "skipped"]
    assert len(skipped) == 250
    counts = [int(text.split(" x ")[0].replace(",", "")) for text in skipped]
    assert sum(counts) == 10_000
    assert re.fullmatch(r"40 x update skipped, iterations \d+ to \d+", skipped[1])
    assert shows([text for kind, text in marks if kind == "spike"], "iteration 7,000")


def test_checkpoints_are_found_from_any_working_directory(tmp_path, monkeypatch):
    save = tmp_path / "checkpoints"
    (save / "global_step20").mkdir(parents=True)
    (save / "global_step20" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    begin(tmp_path, start=about(save="elsewhere"), save=str(save))[0].close()
    assert [iteration for iteration, _ in read_run(tmp_path).checkpoints] == [20]
    save.rename(tmp_path / "moved")
    assert read_run(tmp_path).checkpoints == []


def test_a_text_that_is_not_unicode_is_written_escaped(tmp_path):
    write_run(tmp_path, changes={"data_path": "broken-\udcff"})
    (tmp_path / FAILURES).write_text(json.dumps({"time": BEGIN + 31.5, "message": "odd \ud800 end"}) + "\n")
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "report.html").read_text()
    assert "broken-\\udcff" in page
    assert "odd \\ud800 end" in page


def test_an_unknown_format_is_refused(tmp_path):
    write_record(tmp_path, [{"iteration": 0, "event": "attempt", "format": "neox-metrics-9"}])
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2
    assert shows(result.output, "neox-metrics-9", "neox-metrics-1")


def test_events_of_repeated_iterations_are_told_and_not_counted(tmp_path):
    lines = []
    for attempt, first, last in ((1, 0, 30), (2, 20, 60)):
        head = {"attempt": attempt, "time": BEGIN + attempt}
        lines.append({**head, "iteration": first, "event": "attempt", "format": "neox-metrics-1"})
        lines.append({**head, "iteration": 25, "event": "skipped", "reason": "overflow"})
        lines.append({**head, "iteration": last, "loss/train": 1.0, "time/pipeline": 0.25})
    write_record(tmp_path, lines)
    run = read_run(tmp_path)
    _, text = read_page(render_page([run]))
    assert text.count("skipped (overflow)") == 2
    assert re.search(r"1 update skipped", text)
    # Someone continued it by hand.
    assert re.search(r"0 restarts", text)
    assert "pipeline from 0.2500" in text


def test_runs_with_equal_folder_names_are_named_by_what_differs(tmp_path):
    folders = [tmp_path / name / "logs" for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        write_record(folder, [{"iteration": 1, "loss/train": 1.0}])
    assert [run.name for run in read_runs(folders)] == ["one/logs", "two/logs"]
    assert [run.name for run in read_runs(folders[:1])] == ["logs"]
    assert [run.name for run in read_runs([folders[0], folders[0]])] == ["logs", "logs"]


def test_ticks_are_whole_iterations_at_their_places_and_told_apart(tmp_path):
    lines = [{"iteration": n, "memory/host_bytes": 10 * 2**30 + n * 2**18} for n in range(1, 5)]
    write_record(tmp_path, lines)
    page = render_page([read_run(tmp_path)])
    axis = re.search(r'class="xaxis">(.*?)</div>|<div class="xaxis">(.*?)</div>', page)[0]
    assert re.findall(r"left:([0-9.]+)%[^>]*>(\d+)<", axis) == [
        ("0.00", "1"),
        ("33.33", "2"),
        ("66.67", "3"),
        ("100.00", "4"),
    ]
    ticks = re.findall(r'<span class="y"[^>]*>([^<]*)<', page)
    assert len(ticks) >= 2
    assert len(set(ticks)) == len(ticks)


def test_a_truncated_last_line_and_an_older_record_are_read(tmp_path):
    write_record(tmp_path, [{"iteration": n, "loss/train": 1.0} for n in (1, 2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "loss/tr')
    run = read_run(tmp_path)
    _, text = read_page(render_page([run]))
    assert run.last_iteration == 2
    assert "Not in the record." in text
    assert status(run, now=BEGIN) == ("no end recorded", "warn")
    assert shows(ending(run.attempts[-1]), "0's", "kill -9")


def test_several_runs_are_compared_by_what_differs(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", changes={"hidden_size": 32, "data_path": "b/corpus"}, spike=False)
    runs = [read_run(tmp_path / name) for name in ("one", "two")]
    found = {subject: rows for subject, rows in differences([run.about for run in runs]).items() if rows}
    assert found == {
        "configuration": [("hidden_size", "24", "32")],
        "data": [("data_path", '"a/corpus"', '"b/corpus"')],
    }
    _, text = read_page(render_page(runs))
    assert "Difference in configuration" in text
    assert "one: training" in text
    assert "spikes 1 0" in text


def write_attempts(folder, *starts):
    """Write a run whose attempts of 20 iterations each begin with what is given about them."""
    for place, start in enumerate(starts):
        first = 20 * place
        writer, _ = begin(folder, first, start=start, launch=f"{place}")
        writer.write({"loss/train": 1.0}, first + 20)
        writer.close()


def test_settings_that_a_resumed_training_changed_are_listed_by_attempt(tmp_path):
    changed = about(optimizer={"type": "Adam", "params": {"lr": 0.01}}, batch=16, save=HOSTILE)
    changed["derived"] = {"precision": "fp32", "train_batch_size": 16}
    changed["attention"] = {"global": "flash"}
    backend = {"attention": {"global": "cuDNN"}}
    moved = changed | backend | {"host": "other", "packages": {"torch": "2.14.0"}}
    before = about(batch=8) | {"attention": {"global": "flash"}}
    write_attempts(tmp_path, before, before, changed, moved)
    run = read_run(tmp_path)
    assert [(each[0].number, *each[1:]) for each in changes(run)] == [
        (3, "batch", "8", "16"),
        (3, "optimizer.params.lr", "not recorded", "0.01"),
        (3, "save", "not recorded", json.dumps(HOSTILE)),
        (3, "layout: train_batch_size", "8", "16"),
        (4, "packages: torch", "2.13.0", "2.14.0"),
        (4, "device: attention backend, global", "flash", "cuDNN"),
    ]
    reader, text = read_page(render_page([run]))
    assert shows(text, "2 begins", "20 2", "CPU (x86_64, 2", "2025")
    assert shows(text, "3 begins", "iteration 40", "4 changes", "2 x", "CPU")
    assert shows(text, "8", "then 16", "optimizer.params.lr", "then 0.01")
    assert shows(text, "2.13.0", "then 2.14.0")
    assert shows(text, "2.14.0 attention", "cuDNN")
    assert "img" not in reader.tags


def test_the_configuration_is_that_of_the_last_attempt_that_trained(tmp_path):
    write_attempts(tmp_path, about(batch=8), about(batch=16))
    begin(tmp_path, 40, start=about(batch=32), launch="last")[0].close()
    run = read_run(tmp_path)
    assert [attempt.last - attempt.first for attempt in run.attempts] == [20, 20, 0]
    assert run.about["config"]["batch"] == 16


def test_a_run_whose_attempts_have_equal_settings_has_no_changes(tmp_path):
    write_attempts(tmp_path, about(), about() | {"host": "other"})
    run = read_run(tmp_path)
    assert changes(run) == []
    text = read_page(render_page([run]))[1]
    assert "change" not in text


def test_a_curve_of_many_values_keeps_every_extreme():
    column = Column()
    for iteration in range(100_000):
        column.add(iteration, 1000.0 if iteration == 77_777 else float(iteration % 7))
    column.add(100_000, float("inf"))
    curve = curve_of(column)
    assert len(curve.at) == MOST_POINTS
    assert (max(curve.high), min(curve.low), curve.left_out) == (1000.0, 0.0, 1)
    place = curve.high.index(1000.0)
    assert abs(curve.at[place] - 77_777) < 100_000 / MOST_POINTS
    assert sum(curve.mean) / MOST_POINTS == pytest.approx(sum(column.values[:-1]) / 100_000)


def test_a_short_curve_has_every_value():
    column = Column()
    for iteration in (3, 5):
        column.add(iteration, iteration / 2)
    curve = curve_of(column, scale=2.0)
    assert (curve.at, curve.mean, curve.is_exact) == ([3, 5], [3.0, 5.0], True)


def test_the_page_of_a_long_run_stays_small(tmp_path):
    write_record(tmp_path, [{"iteration": n, "loss/train": 9 / n} for n in range(1, 30_001)])
    assert len(render_page([read_run(tmp_path)])) < 150_000


def test_numbers_sizes_and_durations_are_short():
    values = (None, 1234.0, 0.63851, 3.4e-7, 2.5e7)
    assert [number(value) for value in values] == ["-", "1,234", "0.6385", "3.4e-07", "25,000,000"]
    assert [size(value) for value in (1010 * 2**20, 1.5 * 2**30, 0)] == ["1,010 MiB", "1.5 GiB", "0 B"]
    durations = (0.25, 12.34, 250, 11_100, 190_000)
    expected = ["0.25 s", "12.3 s", "4:10", "3:05:00", "2 d 04:46"]
    assert [duration(seconds) for seconds in durations] == expected


# The command


def test_page_and_plot_are_written_next_to_the_record(tmp_path):
    pytest.importorskip("matplotlib")
    write_record(
        tmp_path,
        [{"iteration": n, "loss/train": 9.0 / n} for n in range(1, 81)]
        + [{"iteration": 80, "loss/validation": 2}],
    )
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.output.split() == [str(tmp_path / "report.html"), str(tmp_path / "loss.png")]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl", "report.html"]


def test_with_an_output_nothing_is_written_to_the_log_folder(tmp_path):
    pytest.importorskip("matplotlib")
    log, pages = tmp_path / "log", tmp_path / "pages"
    log.mkdir()
    pages.mkdir()
    write_record(log, [{"iteration": n, "loss/train": 9.0 / n} for n in range(1, 9)])
    result = CliRunner().invoke(main, [str(log), "--output", str(pages / "r.html")])
    assert result.output.split() == [str(pages / "r.html"), str(pages / "r.png")]
    assert [path.name for path in log.iterdir()] == ["metrics.jsonl"]
    os.mkfifo(pages / "pipe.html")
    refused = CliRunner().invoke(main, [str(log), "--output", str(pages / "pipe.html")])
    assert (refused.exit_code, (pages / "pipe.html").is_fifo()) == (2, True)
    assert "pipe.html" in refused.stderr
    assert sorted(path.name for path in pages.iterdir()) == ["pipe.html", "r.html", "r.png"]


def test_no_output_replaces_a_file_of_another_format_or_is_written_without_the_other(tmp_path):
    pytest.importorskip("matplotlib")
    write_record(tmp_path, [{"iteration": n, "loss/train": 9.0 / n} for n in range(1, 9)])
    record = tmp_path / "metrics.jsonl"
    text = record.read_text()
    for option, format_ in (("--output", ".html"), ("--png", ".png")):
        refused = CliRunner().invoke(main, [str(tmp_path), option, str(record)])
        assert (refused.exit_code, record.read_text()) == (2, text)
        assert shows(refused.stderr, record, format_)
    page, nowhere = tmp_path / "r.html", tmp_path / "none"
    for words in (
        ["--output", str(nowhere / "x.html")],
        ["--output", str(page), "--png", f"{nowhere}/x.png"],
    ):
        failed = CliRunner().invoke(main, [str(tmp_path), *words])
        assert failed.exit_code == 1
    assert f"Error: {words[-1]}: " in failed.output
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00\n", b'{"iteration": 1, "attempt": %d}\n' % 10**30])
def test_a_file_without_a_line_of_a_record_is_refused(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    failed = CliRunner().invoke(main, [str(tmp_path)])
    assert (failed.exit_code, [path.name for path in tmp_path.iterdir()]) == (2, ["metrics.jsonl"])
    assert f"{tmp_path}/metrics.jsonl is a" in failed.stderr


DAMAGES = ("text", None, 1e308, float("nan"), [], {}, -1, [1], {"a": None}, 10**26, 10**400)


@pytest.mark.parametrize("name", ["time", "iteration", "restart", "event", *about(), "attention"])
def test_a_changed_value_is_shown_or_refused_in_a_sentence(tmp_path, name):
    write_run(tmp_path)
    record = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    at = next(n for n, line in enumerate(lines) if line.get("event") == "start")
    for value in DAMAGES:
        write_record(tmp_path, [*lines[:at], lines[at] | {name: value}, *lines[at + 1 :]])
        # With several runs nothing is drawn, and they are compared.
        done = CliRunner().invoke(main, [str(tmp_path)] * 2)
        assert done.exit_code in (0, 2), (value, done.exception)


def test_the_mean_is_over_a_twentieth_of_the_points():
    points = [(10 * n, float(n % 2)) for n in range(1, 41)]
    assert smoothed(points) == [(10 * n, 0.5) for n in range(2, 41)]
    assert smoothed(points[:39]) == []


def test_a_record_without_losses_has_a_page_and_no_plot(tmp_path):
    write_record(tmp_path, [{"iteration": 0, "optimizer/learning_rate": 1.0}])
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 0
    assert (tmp_path / "report.html").is_file()
    assert "contains no loss" in result.stderr
    assert CliRunner().invoke(main, [str(tmp_path), "--png", str(tmp_path / "a.png")]).exit_code == 1


def test_the_record_of_an_earlier_training_is_read(tmp_path):
    head = {"attempt": 1, "time": BEGIN}
    for name, loss in (("metrics.10.jsonl", 3.0), ("metrics.2.jsonl", 2.0), ("metrics.jsonl", 1.0)):
        begin = {**head, "iteration": 0, "event": "attempt", "format": "neox-metrics-1"}
        write_record(tmp_path, [begin, {**head, "iteration": 1, "loss/train": loss}])
        (tmp_path / "metrics.jsonl").rename(tmp_path / name)
    (tmp_path / "failures.2.jsonl").write_text(json.dumps({"time": BEGIN + 1, "message": "of the earlier"}))
    assert read_run(tmp_path).last_value("loss/train") == 1.0
    done = CliRunner().invoke(main, [str(tmp_path / "metrics.2.jsonl")])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/report.2.html\n{tmp_path}/loss.2.png\n"
    earlier = read_run(tmp_path / "metrics.2.jsonl")
    assert earlier.last_value("loss/train") == 2.0
    assert [failure["message"] for failure in earlier.attempts[0].failures] == ["of the earlier"]
    assert earlier.name == "metrics.2.jsonl"


def test_a_file_that_is_not_a_record_is_refused(tmp_path):
    (tmp_path / "config.yml").touch()
    result = CliRunner().invoke(main, [str(tmp_path / "config.yml")])
    assert result.exit_code == 2
    assert shows(result.stderr, "config.yml", "log-dir")
    assert "'nothing' does not" in CliRunner().invoke(main, ["nothing"]).stderr


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_folder_without_record_is_refused_by_name(tmp_path, is_folder):
    if is_folder:
        (tmp_path / "metrics.jsonl").mkdir()
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2
    assert shows(result.output, tmp_path / "metrics.jsonl", "log-dir")


def test_a_folder_with_failures_and_no_record_is_answered_with_the_last_failure(tmp_path):
    failures = [
        {"time": 20.0, "host": "node-1", "rank": 3, "message": "data-path: no such file"},
        {"time": 10.0, "host": "node-0", "rank": 0, "message": "out of memory"},
    ]
    (tmp_path / "failures.jsonl").write_text("".join(json.dumps(one) + "\n" for one in failures))
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2
    last = "last: data-path: no such file"
    assert shows(result.output, "failures.jsonl", "2 failures", last)


def test_it_starts_without_torch():
    code = (
        "import sys, neox_model.report.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# In a browser


@pytest.mark.slow
@pytest.mark.parametrize("width", [1300, 500])
def test_a_browser_runs_the_page_and_it_fits_its_width(tmp_path, width):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    write_run(tmp_path)
    page = tmp_path / "report.html"
    # The page reports on itself; hostile content would set the title.
    probe = (
        "<script>addEventListener('load',function(){var plot=document.querySelector('.plot');"
        "var box=plot.getBoundingClientRect();plot.dispatchEvent(new PointerEvent('pointermove',"
        "{clientX:box.left+box.width/2,clientY:box.top+5}));"
        "document.body.dataset.seen=document.querySelector('.tip').textContent+'|'+"
        "document.documentElement.scrollWidth+'|'+innerWidth+'|'+"
        "document.querySelectorAll('svg title').length;"
        "});</script>"
    )
    page.write_text(render_page([read_run(tmp_path)]).replace("</body>", f"{probe}</body>"))
    found = in_browser(chromium, page, tmp_path / "profile", width)
    tip, content, window, titles = re.search(r'data-seen="([^"]*)"', found).group(1).split("|")
    assert tip.startswith("iteration 31\ntraining: 0.16")
    assert int(content) <= int(window)
    assert int(titles) == 4
    picture = tmp_path / "page.png"
    in_browser(chromium, page, tmp_path / "profile2", width, f"--screenshot={picture}")
    assert picture.stat().st_size > 10_000


def in_browser(chromium: str, page: Path, profile: Path, width: int, what: str = "--dump-dom") -> str:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update"]
    options += [f"--user-data-dir={profile}", f"--window-size={width},900"]
    done = subprocess.run(
        [chromium, *options, what, page.as_uri()], capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout
