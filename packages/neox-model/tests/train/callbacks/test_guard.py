import math

import pytest
import torch

from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train.callbacks.guard import NonfiniteGuard
from neox_model.train.run import Callback
from neox_model.train.state import StepReport
from support.refusals import refused
from support.runs import a_run

NAN, INF = math.nan, math.inf


class Settled(Callback):
    """Counts how often what is under way is completed."""

    count = 0

    def settle(self):
        self.count += 1


class Watched:
    """A run of four samples per iteration that only its guard watches."""

    def __init__(self, *, patience=3, interval=1, min_loss_scale=None):
        self.guard = NonfiniteGuard(patience=patience, interval=interval, min_loss_scale=min_loss_scale)
        self.settled = Settled()
        self.run = a_run(self.guard, self.settled)

    def iterate(self, loss=1.0, norm=1.0, scale=None, on_device=True):
        values = [loss, norm, not math.isfinite(norm), scale]
        if on_device:
            values = [None if value is None else torch.tensor(value) for value in values]
        report = StepReport(
            loss=torch.tensor(loss), grad_norm=values[1], skipped=values[2], tokens=1, loss_scale=values[3]
        )
        self.run.state.advance(report)
        self.guard.on_step(report)


@pytest.fixture(autouse=True)
def _documents(monkeypatch):
    monkeypatch.setattr(
        "neox_model.train.run.documents_of",
        lambda dataset, samples: f"corpus: documents of {samples.start} to {samples.stop}",
    )


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (1.0, INF), (INF, 1.0)])
def test_a_training_ends_after_the_allowed_number_in_a_row(caplog, loss, norm, on_device):
    watched = Watched(patience=3)
    for _ in range(2):
        watched.iterate()
    for _ in range(3):
        watched.iterate(loss, norm, on_device=on_device)
    with refused(NeoXError, "last 3") as failure:
        watched.iterate()
    for wanted in (
        "iteration 3: loss",
        "iteration 5: loss",
        "resume from the last checkpoint",
        "nonfinite-patience",
    ):
        assert wanted in str(failure.value)
    assert watched.settled.count == 1
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 3
    assert errors[0].endswith("its batch contains samples 8 to 11, from corpus: documents of 8 to 12")


def test_finite_update_resets_the_count(caplog):
    watched = Watched(patience=3)
    for _ in range(10):
        watched.iterate(NAN, NAN)
        watched.iterate(NAN, NAN)
        watched.iterate()
    watched.guard.on_end()
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 20


def test_overflows_in_float16_are_normal_while_the_scale_can_fall(caplog):
    watched = Watched(patience=2, min_loss_scale=1.0)
    for power in range(16, 0, -1):
        watched.iterate(1.0, INF, scale=2.0**power)
    watched.iterate(1.0, INF, scale=1.0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    watched.iterate(1.0, INF, scale=1.0)
    with refused(NeoXError, "minimum, 1"):
        watched.iterate()


def test_reports_are_read_once_per_interval_and_one_iteration_late():
    watched = Watched(patience=1, interval=5)
    for _ in range(5):
        watched.iterate(NAN, NAN)
    with pytest.raises(NeoXError):
        watched.iterate()


def test_the_state_after_a_loss_that_is_not_finite_is_not_saved():
    watched = Watched(patience=3, interval=10)
    for loss, may_be_saved in ((1.0, True), (NAN, False), (1.0, True)):
        watched.iterate(loss, loss)
        if may_be_saved:
            watched.guard.before_save()
        else:
            with refused(CheckpointError, "iteration 2"):
                watched.guard.before_save()


def test_an_overflow_with_a_finite_loss_can_be_saved():
    watched = Watched(min_loss_scale=1.0)
    watched.iterate(1.0, INF, scale=8.0)
    watched.guard.before_save()


def test_remaining_updates_are_checked_at_the_end():
    watched = Watched(patience=2, interval=50)
    for _ in range(2):
        watched.iterate(NAN, NAN)
    with pytest.raises(NeoXError):
        watched.guard.on_end()
