import json
import logging
import math
import sys
from types import ModuleType

import pytest

from neox_config.facts.records import FAILURES
from neox_model.metrics.events import Events
from neox_model.metrics.writers.comet import CometWriter
from neox_model.metrics.writers.console import ConsoleWriter
from neox_model.metrics.writers.csv import CsvWriter
from neox_model.metrics.writers.jsonl import (
    JsonlWriter,
    read_metrics,
    read_records,
    superseded_from,
)
from neox_model.metrics.writers.monitor import MonitorWriter
from neox_model.metrics.writers.steady import SteadyWriter
from neox_model.metrics.writers.tensorboard import TensorBoardWriter
from neox_model.metrics.writers.wandb import WandbWriter
from neox_model.optional import MissingPackageError
from support.refusals import refused, shows


def write_losses(folder, iterations, *, after, launch=None):
    writer = JsonlWriter(folder, iteration=after, launch=launch)
    for iteration in iterations:
        writer.write({"loss/train": iteration / 2}, iteration)
    writer.close()


def losses(path):
    return [(record["iteration"], record["loss/train"]) for record in read_metrics(path)]


def test_a_resumed_record_has_every_iteration_once(tmp_path):
    write_losses(tmp_path, range(1, 8), after=0)
    write_losses(tmp_path, range(5, 9), after=4)
    assert losses(tmp_path / "metrics.jsonl") == [(n, n / 2) for n in range(1, 9)]


def test_a_new_training_keeps_older_records_aside(tmp_path):
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    for last in (2, 3, 4):
        write_losses(tmp_path, range(1, last), after=0)
    assert [len(losses(tmp_path / name)) for name in names] == [1, 2, 3]


def test_failures_are_kept_aside_with_the_record_that_they_belong_to(tmp_path):
    failures = tmp_path / "failures.jsonl"
    write_losses(tmp_path, [1], after=0)
    failures.write_text("old")
    write_losses(tmp_path, [2], after=1)
    assert failures.read_text() == "old"
    write_losses(tmp_path, [1], after=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "failures.1.jsonl",
        "metrics.1.jsonl",
        "metrics.jsonl",
    ]


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    write_losses(tmp_path, [1, 2], after=0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 3, "loss/tr')
    write_losses(tmp_path, [3], after=2)
    assert losses(path) == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_damaged_line_is_left_out_with_a_warning(tmp_path, caplog):
    write_losses(tmp_path, [1, 2, 3], after=0)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[1] + b"\x00\xff{\n" + b"[1]\n" + lines[3])
    write_losses(tmp_path, [4], after=3)
    caplog.clear()
    assert losses(path) == [(1, 0.5), (3, 1.5), (4, 2.0)]
    assert shows(caplog.text, path, "2 damaged", "2, 3")


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    # As an earlier version wrote it.
    path.write_text('{"iteration": 1, "loss/train": Infinity}\n')
    writer = JsonlWriter(tmp_path, iteration=1, clock=lambda: 99.5)
    writer.write({"loss/train": float("nan"), "optimizer/learning_rate": 0.5}, 2)
    writer.close()
    written = path.read_text().splitlines()[1:]
    assert [json.loads(line, parse_constant=pytest.fail) for line in written] == [
        {"time": 99.5, "attempt": 2, "iteration": 1, "event": "attempt", "format": "neox-metrics-1"},
        {
            "time": 99.5,
            "attempt": 2,
            "iteration": 2,
            "loss/train": None,
            "optimizer/learning_rate": 0.5,
            "nonfinite": {"loss/train": "nan"},
        },
    ]
    first, second = read_metrics(path)
    assert first == {"iteration": 1, "loss/train": float("inf")}
    assert math.isnan(second["loss/train"])


def test_last_iteration_is_not_recorded_twice(tmp_path):
    write_losses(tmp_path, [1, 2], after=0)
    again = JsonlWriter(tmp_path, iteration=2)
    again.write({"loss/train": 1.0}, 2)
    again.write({"loss/validation": 3.0, "loss/train": 1.0}, 2)
    again.write({"loss/train": 1.5}, 3)
    again.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [
        {"iteration": 1, "loss/train": 0.5},
        {"iteration": 2, "loss/train": 1.0},
        {"iteration": 2, "loss/validation": 3.0},
        {"iteration": 3, "loss/train": 1.5},
    ]


def test_a_restart_from_the_beginning_continues_the_file_as_a_new_attempt(tmp_path):
    write_losses(tmp_path, [1, 2, 3], after=0, launch="a")
    writer = JsonlWriter(tmp_path, iteration=0, launch="a")
    writer.write({"loss/train": 7.0}, 1)
    writer.close()
    path = tmp_path / "metrics.jsonl"
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert losses(path) == [(1, 7.0)]
    kept = [
        (record["attempt"], record["loss/train"]) for record in read_records(path) if "event" not in record
    ]
    assert kept == [(1, 0.5), (1, 1.0), (1, 1.5), (2, 7.0)]


def test_a_restart_whose_first_attempt_recorded_nothing_does_not_continue_an_older_record(tmp_path):
    write_losses(tmp_path, [1, 2, 3], after=0, launch="old")
    old, mine = {"launch": "old", "time": 1.0}, {"launch": "new", "time": 2.0}
    (tmp_path / FAILURES).write_text("".join(json.dumps(one) + "\n" for one in (old, mine)) + '{"cut')
    JsonlWriter(tmp_path, iteration=0, launch="new").close()
    assert losses(tmp_path / "metrics.1.jsonl") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert losses(tmp_path / "metrics.jsonl") == []
    assert json.loads((tmp_path / FAILURES).read_text()) == mine
    assert (tmp_path / "failures.1.jsonl").read_text().count("\n") == 2
    # The second restart continues the new record.
    JsonlWriter(tmp_path, iteration=0, launch="new").close()
    starts = [(record["attempt"], record["launch"]) for record in read_records(tmp_path / "metrics.jsonl")]
    assert starts == [(1, "new"), (2, "new")]
    assert not (tmp_path / "metrics.2.jsonl").exists()


def test_failures_of_this_launch_alone_are_not_moved_aside(tmp_path):
    (tmp_path / FAILURES).write_text(json.dumps({"launch": "new", "time": 2.0}) + "\n")
    JsonlWriter(tmp_path, iteration=0, launch="new").close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["failures.jsonl", "metrics.jsonl"]


def test_what_several_later_attempts_repeated_is_in_effect_once(tmp_path):
    write_losses(tmp_path, range(1, 10), after=0)
    write_losses(tmp_path, range(7, 9), after=6)
    write_losses(tmp_path, range(3, 6), after=2)
    path = tmp_path / "metrics.jsonl"
    assert losses(path) == [(n, n / 2) for n in range(1, 6)]
    assert superseded_from(path) == {1: 2, 2: 2}


def test_events_are_readable_at_once_and_must_be_declared(tmp_path):
    writer = JsonlWriter(tmp_path, iteration=0)
    events = Events([SteadyWriter(MonitorWriter(Recorder(), samples=1)), SteadyWriter(writer)])
    assert events.are_recorded
    assert not Events([SteadyWriter(MonitorWriter(Recorder(), samples=1))]).are_recorded
    events.record("save", 3, seconds=0.5)
    *_, record = read_records(tmp_path / "metrics.jsonl")
    assert record.pop("time") > 1.7e9
    assert record == {"attempt": 1, "iteration": 3, "event": "save", "seconds": 0.5}
    with refused(ValueError, "event save", "'minutes'"):
        events.record("save", 3, minutes=1)
    with refused(ValueError, "event sav"):
        events.record("sav", 3)


METRICS = {
    "loss/train": 2.34567,
    "optimizer/learning_rate": 0.0006,
    "optimizer/grad_norm": 0.75,
    "throughput/tokens_per_second": 8300.4,
    "throughput/tflops_per_device": 0.256,
    "time/left": 125.0,
}


def test_console_logs_one_line_per_interval_with_its_mean_loss(caplog, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    caplog.set_level(logging.INFO)
    writer = ConsoleWriter(last_iteration=300)
    writer.write({"loss/train": 2.3}, 99)
    writer.write({**METRICS, "loss/train": 2.4}, 100)
    writer.write({"loss/validation": 2.0}, 100)
    writer.close()
    assert shows(caplog.messages, "100/300", "loss 2.3500", "6.000e-04", "norm 0.750", "8,300 tokens/s")


@pytest.mark.parametrize(("skipped", "text"), [(1.0, "1 update skipped"), (2.0, "2 updates skipped")])
def test_console_counts_skipped_updates(caplog, skipped, text):
    caplog.set_level(logging.INFO)
    writer = ConsoleWriter(last_iteration=300)
    writer.write({**METRICS, "loss/train": 2.4, "optimizer/skipped_iterations": skipped}, 100)
    assert f" | {text} | " in caplog.messages[0]


def test_console_shows_a_slow_device_in_gflops(caplog):
    caplog.set_level(logging.INFO)
    writer = ConsoleWriter(last_iteration=300)
    writer.write({**METRICS, "throughput/tflops_per_device": 0.000639}, 100)
    assert "0.639 GFLOP/s |" in caplog.text


def test_console_shows_the_utilization_by_both_conventions(caplog):
    caplog.set_level(logging.INFO)
    writer = ConsoleWriter(last_iteration=300)
    writer.write({**METRICS, "throughput/mfu": 0.515, "throughput/mfu_causal": 0.481}, 100)
    assert shows(caplog.text, "0.256 TFLOP/s", "MFU 51.5%", "48.1%", "2:05")


def test_tensorboard_gets_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path, iteration=0)
    writer.write({"loss/train": 2.5}, 1)
    writer.write({"loss/train": 1.5}, 2)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/train")] == [(1, 2.5), (2, 1.5)]


def test_a_missing_package_is_named_with_its_setting_and_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(MissingPackageError, "Weights & Biases", "pip install wandb"):
        WandbWriter(project="p")


class FullDisk:
    """A writer on a disk that is full until `has_room`."""

    has_room = False

    def __init__(self):
        self.iterations = []

    def write(self, metrics, iteration):
        self.iterations.append(iteration)

    def flush(self):
        if not self.has_room:
            raise OSError(28, "No space left on device")

    close = flush


def test_full_disk_is_logged_once_and_training_continues(caplog):
    disk = FullDisk()
    writer = SteadyWriter(disk)
    for iteration in (1, 2):
        writer.write({"loss/train": 2.0}, iteration)
        writer.flush()
    assert len(caplog.messages) == 1
    assert shows(caplog.text, "FullDisk", "28")
    disk.has_room = True
    writer.flush()
    disk.has_room = False
    writer.close()
    assert len(caplog.messages) == 2
    assert disk.iterations == [1, 2]


class LostService:
    """A writer whose service cannot be reached for a while."""

    class CommunicationError(Exception):
        """An error of the service's package."""

    is_lost = True

    def write(self, metrics, iteration):
        if self.is_lost:
            raise self.CommunicationError("no route to host")

    def flush(self):
        pass

    close = flush


def test_errors_of_a_service_are_logged_once_per_outage_and_training_continues(caplog):
    service = LostService()
    writer = SteadyWriter(MonitorWriter(service, samples=8))
    for iteration, is_lost in ((1, True), (2, True), (3, False), (4, True)):
        service.is_lost = is_lost
        writer.write({"loss/train": 2.0}, iteration)
        writer.flush()
    writer.close()
    assert (
        caplog.messages
        == ["LostService cannot write metrics, training continues: CommunicationError: no route to host"] * 2
    )


def csv_rows(path):
    return path.read_text().splitlines()


def test_csv_has_a_file_per_metric(tmp_path):
    writer = CsvWriter(tmp_path / "job", step=0)
    writer.write({"Train/Samples/train_loss": 2.5, "Train/Samples/lr": 1e-3}, 8)
    writer.write({"Train/Samples/train_loss": 1.5}, 16)
    writer.close()
    assert csv_rows(tmp_path / "job/Train_Samples_train_loss.csv") == ["step,train_loss", "8,2.5", "16,1.5"]
    assert csv_rows(tmp_path / "job/Train_Samples_lr.csv") == ["step,lr", "8,0.001"]


def test_a_resumed_csv_has_every_step_once_and_an_older_one_is_kept_aside(tmp_path):
    for start, steps in ((0, (8, 16, 24)), (16, (24, 32)), (0, (8,))):
        writer = CsvWriter(tmp_path, step=start)
        for step in steps:
            writer.write({"a/loss": step / 2}, step)
        writer.close()
    assert csv_rows(tmp_path / "a_loss.1.csv") == ["step,loss", "8,4.0", "16,8.0", "24,12.0", "32,16.0"]
    assert csv_rows(tmp_path / "a_loss.csv") == ["step,loss", "8,4.0"]


def test_row_of_the_last_step_is_not_written_again(tmp_path):
    for start, steps in ((0, (8, 16)), (16, (16, 24))):
        writer = CsvWriter(tmp_path, step=start)
        for step in steps:
            writer.write({"loss": step / 2}, step)
        writer.close()
    assert csv_rows(tmp_path / "loss.csv") == ["step,loss", "8,4.0", "16,8.0", "24,12.0"]


@pytest.mark.parametrize("rest", ["24,1", "24,12.0\n30", "nonsense\n"])
def test_truncated_csv_is_continued(tmp_path, rest):
    (tmp_path / "loss.csv").write_text(f"step,loss\n8,4.0\n{rest}")
    writer = CsvWriter(tmp_path, step=16)
    writer.write({"loss": 9.0}, 24)
    writer.close()
    assert csv_rows(tmp_path / "loss.csv") == ["step,loss", "8,4.0", "24,9.0"]


@pytest.mark.parametrize("text", ["", "step,lo"])
def test_a_csv_without_a_whole_heading_begins_again(tmp_path, text):
    (tmp_path / "loss.csv").write_text(text)
    writer = CsvWriter(tmp_path, step=16)
    writer.write({"loss": 9.0}, 24)
    writer.close()
    assert csv_rows(tmp_path / "loss.csv") == ["step,loss", "24,9.0"]


class Recorder:
    """A writer that remembers."""

    def __init__(self):
        self.written, self.calls = [], []

    def write(self, metrics, iteration):
        self.written.append((iteration, metrics))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_a_monitor_counts_samples_and_uses_the_names_of_deepspeed():
    inner = Recorder()
    writer = MonitorWriter(inner, samples=16)
    writer.write({"loss/train": 2.5, "optimizer/learning_rate": 0.1, "loss/validation": 3.0}, 4)
    writer.flush()
    writer.close()
    names = {"Train/Samples/train_loss": 2.5, "Train/Samples/lr": 0.1, "loss/validation": 3.0}
    assert inner.written == [(64, names)]
    assert inner.calls == ["flush", "close"]


def test_a_monitor_writes_once_per_interval_of_samples():
    inner = Recorder()
    writer = MonitorWriter(inner, samples=40, interval=100)
    for iteration in range(1, 9):
        writer.write({"loss/train": 1.0}, iteration)
    assert [step for step, _ in inner.written] == [120, 200, 320]


def test_comet_gets_the_settings_that_were_made_and_every_metric(monkeypatch):
    calls = []

    class Experiment:
        def set_name(self, name):
            calls.append(("name", name))

        def add_tags(self, tags):
            calls.append(("tags", tags))

        def log_others(self, others):
            calls.append(("others", others))

        def log_metrics(self, metrics, step):
            calls.append((step, metrics))

        def get_key(self):
            return "key"

        def end(self):
            calls.append("end")

    module = ModuleType("comet_ml")
    module.start = lambda **settings: calls.append(settings) or Experiment()
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    labels = {"tags": ("a", "b"), "others": {"c": 1}}
    writer = CometWriter(name="first", workspace=None, project_name="p", online=False, **labels)
    writer.write({"loss/train": 2.0}, 3)
    writer.close()
    assert calls == [
        {"project_name": "p", "online": False},
        ("name", "first"),
        ("tags", ["a", "b"]),
        ("others", {"c": 1}),
        (3, {"loss/train": 2.0}),
        "end",
    ]
