import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from neox_config.facts.spikes import LEFT_OUT
from neox_model.checkpoint.errors import CheckpointError
from neox_model.metrics.events import Events
from neox_model.train.hooks.guard import NonfiniteGuard
from neox_model.train.hooks.spikes import RepeatedSpikesError, RollbackError, SpikeHandler
from neox_model.train.left_out import forget_left_out, merged, read_left_out, write_left_out
from neox_model.train.loop import train
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.spikes import LeftOutBatches, SpikeDetection
from neox_model.train.state import TrainState
from neox_model.train.step import StepReport
from support.read_backs import ReadBacks

WINDOW = 5
NORMAL, SPIKE = [2.0, 2.5, 1.5, 2.2, 1.9, 2.1], 9.0


def window(values, count=WINDOW):
    losses = RecentLosses(count, torch.device("cpu"))
    losses.load(values)
    return losses


def test_the_limit_is_the_median_and_the_scaled_median_absolute_deviation():
    values = np.random.default_rng(0).normal(3.0, 0.2, 101).astype(np.float32)
    median = np.median(values)
    expected = median + 6 * 1.4826 * np.median(np.abs(values - median))
    assert float(window(values.tolist(), 101).limit(6.0)) == pytest.approx(float(expected), rel=1e-6)


def test_equal_losses_have_a_deviation_of_a_thousandth():
    assert float(window([2.0] * WINDOW).limit(5.0)) == pytest.approx(2.0 + 5 * 0.002)


def test_nothing_is_a_spike_before_the_window_is_full():
    losses = window([2.0] * (WINDOW - 1))
    assert losses.limit(1.0) == math.inf
    losses.add(torch.tensor(2.0), is_applied=True)
    assert losses.limit(1.0) < math.inf


def test_the_window_keeps_the_last_losses_of_applied_updates():
    losses = window([])
    with ReadBacks() as reads:
        for loss, is_applied in ((1, True), (2, True), (3, False), (math.nan, True), (4, torch.tensor(True))):
            losses.add(torch.tensor(float(loss)), is_applied=is_applied)
            losses.limit(3.0)
    assert reads.count == 0
    assert losses.values() == [1, 2, 4]
    losses.load([1, 2, 3, 4, 5, 6, 7])
    assert losses.values() == [3, 4, 5, 6, 7]


class Step:
    """A step with given losses, whose batches are their numbers, two per iteration."""

    def __init__(self, losses):
        self.losses, self.trained = losses, []

    def __call__(self, batches):
        numbers = [next(batches), next(batches)]
        self.trained.append(numbers)
        loss = self.losses[numbers[0] // 2]
        return StepReport(loss=torch.tensor(loss), grad_norm=None, skipped=False, tokens=8)


class Recorded:
    """A writer that keeps events."""

    def __init__(self):
        self.events = []

    def write(self, metrics, iteration):
        pass

    def flush(self):
        pass

    def close(self):
        pass

    def event(self, kind, iteration, content):
        self.events.append((kind, iteration, dict(content)))


class Run:
    """A training of four samples per iteration, in attempts like those of the launcher."""

    def __init__(self, losses, action, **settings):
        self.losses, self.action, self.saved = losses, action, None
        self.settings = {"patience": 3, "batches": 1, **settings}
        self.stored = ()
        self.record = Recorded()

    def attempt(self, *, until=None):
        """Train from the saved state on; save after iteration `until` and end there."""
        state = TrainState(
            last_iteration=until or len(self.losses),
            samples_per_iteration=4,
            recent_losses=window([]),
        )
        if self.saved is not None:
            state.load_state_dict(self.saved)
        state.left_out = merged(state.left_out, self.stored)
        self.state, self.step = state, Step(self.losses)
        handler = SpikeHandler(
            self.action,
            state=state,
            documents=lambda samples: f"documents of {samples.start} to {samples.stop}",
            reports=True,
            before_end=lambda: None,
            leave_out=lambda ranges: setattr(self, "stored", ranges),
            events=Events([self.record]),
            **self.settings,
        )
        guard = NonfiniteGuard(
            patience=3,
            interval=1,
            min_loss_scale=None,
            documents=str,
            reports=True,
            before_end=lambda: None,
            on_spike=handler,
        )
        detection = SpikeDetection(self.step, state.recent_losses, threshold=6.0, skips=None)
        step = LeftOutBatches(detection, accumulation=2, is_left_out=lambda: state.leaves_out_next)
        train(state, step, iter(range(2 * state.iteration, 1000)), [guard])
        self.saved = json.loads(json.dumps(state.state_dict()))


def test_a_spike_is_reported_with_its_documents(caplog):
    run = Run([*NORMAL, SPIKE, 2.0], "continue")
    run.attempt()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("the loss of iteration 7, 9, is a spike (the limit is 3.8")
    assert text.endswith("its batch contains samples 24 to 27, from documents of 24 to 28")
    assert run.state.recent_losses.values() == pytest.approx([1.5, 2.2, 1.9, 2.1, SPIKE, 2.0][-WINDOW:])


def test_a_spike_is_recorded_before_a_rollback_ends_the_attempt():
    for action, ending in (("continue", nullcontext()), ("rollback", pytest.raises(RollbackError))):
        run = Run([*NORMAL, SPIKE, 2.0], action)
        with ending:
            run.attempt()
        [(kind, iteration, content)] = run.record.events
        assert (kind, iteration) == ("spike", 7)
        # Median 2.1 and median absolute deviation 0.2 of the last five losses.
        expected = {"loss": 9.0, "limit": 2.1 + 6 * 1.4826 * 0.2, "action": action}
        assert {name: content.pop(name) for name in expected} == pytest.approx(expected)
        assert content == {"first_sample": 24, "last_sample": 27, "documents": "documents of 24 to 28"}


@pytest.mark.parametrize("batches", [1, 3])
def test_a_rollback_leaves_out_the_batches_and_resumes_exactly(batches):
    run = Run([*NORMAL, SPIKE, 2.0, 2.3, 2.4], "rollback", batches=batches)
    run.attempt(until=5)
    with pytest.raises(RollbackError, match="it leaves out samples") as failure:
        run.attempt()
    assert failure.value.exit_code == 4
    first = max(20, 28 - 4 * batches)
    assert run.stored == ((first, 28),)
    run.attempt(until=8)
    run.stored = ()
    resumed_at_8 = dict(run.saved)
    assert resumed_at_8["left_out"] == [[first, 28]]
    run.attempt()
    assert [numbers[0] // 2 for numbers in run.step.trained] == [8, 9]
    assert run.state.skipped_iterations == min(batches, 2)
    assert run.state.samples == 40
    left_out = run.state.position.left_out
    assert left_out == ((first, 28),)
    # The batch is left out with another batch size, too.
    smaller = TrainState(last_iteration=99, samples_per_iteration=2, samples=26, left_out=left_out)
    assert smaller.leaves_out_next
    smaller.samples = 28
    assert not smaller.leaves_out_next


def test_rollbacks_to_the_same_checkpoint_end_at_the_limit():
    run = Run([*NORMAL, SPIKE, SPIKE, SPIKE, 2.0], "rollback", patience=2)
    for expected in (((24, 28),), ((24, 28), (28, 32))):
        with pytest.raises(RollbackError):
            run.attempt()
        assert run.stored == expected
    with pytest.raises(RepeatedSpikesError, match=r"iteration 9, 9, .* after 2 rollbacks") as failure:
        run.attempt()
    assert failure.value.exit_code == 5


def test_rollbacks_to_different_checkpoints_do_not_add_up():
    run = Run([*NORMAL, SPIKE, 2.0, SPIKE, 2.0], "rollback", patience=1)
    with pytest.raises(RollbackError):
        run.attempt()
    run.attempt(until=8)
    with pytest.raises(RollbackError):
        run.attempt()
    run.attempt()
    assert run.state.position.left_out == ((24, 28), (32, 36))


class Pending:
    """An update that is about to be made: notes whether it is left out."""

    def __init__(self, loss):
        self.loss = lambda: torch.tensor(loss)

    def leave_out(self, flag):
        self.flag = flag


class SkippingStep(Step):
    """As an engine: calls what must run before the update, and reports what was decided."""

    def before(self, call):
        self.call = call

    def __call__(self, batches):
        report = super().__call__(batches)
        pending = Pending(float(report.loss))
        self.call(pending)
        return StepReport(loss=report.loss, grad_norm=None, skipped=pending.flag, tokens=8)


def test_skipped_spikes_do_not_enter_the_window_and_end_at_the_limit(caplog):
    losses = [*NORMAL, SPIKE, 2.0, SPIKE, SPIKE, SPIKE]
    state = TrainState(last_iteration=len(losses), samples_per_iteration=4, recent_losses=window([]))
    step = SkippingStep(losses)
    handler = SpikeHandler(
        "skip",
        patience=3,
        batches=1,
        state=state,
        documents=str,
        reports=True,
        before_end=lambda: None,
        leave_out=lambda ranges: None,
    )
    guard = NonfiniteGuard(
        patience=1,
        interval=1,
        min_loss_scale=None,
        documents=str,
        reports=True,
        before_end=lambda: None,
        on_spike=handler,
    )
    detection = SpikeDetection(step, state.recent_losses, threshold=6.0, skips=step)
    with pytest.raises(RepeatedSpikesError, match="the last 3 updates in a row were skipped") as failure:
        train(state, detection, iter(range(100)), [guard])
    assert failure.value.exit_code == 5
    assert int(state.skipped_iterations) == 4
    assert state.recent_losses.values() == pytest.approx([*NORMAL, 2.0][-WINDOW:])
    assert sum("its update is skipped" in record.getMessage() for record in caplog.records) == 4


def test_the_file_of_left_out_samples(tmp_path):
    assert read_left_out(tmp_path) == ()
    write_left_out(tmp_path / "save", ((4, 8), (12, 16)))
    assert read_left_out(tmp_path / "save") == ((4, 8), (12, 16))
    for damaged in ("", "{}", '{"left_out": 3}', '{"left_out": [[1]]}', "[" * 100_000):
        (tmp_path / LEFT_OUT).write_text(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_left_out(tmp_path)
    forget_left_out(tmp_path)
    forget_left_out(tmp_path)
    assert read_left_out(tmp_path) == ()
