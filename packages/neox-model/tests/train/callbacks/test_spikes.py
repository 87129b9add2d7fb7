import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from neox_config.errors import NeoXError
from neox_config.facts.spikes import LEFT_OUT
from neox_model.checkpoint.errors import CheckpointError
from neox_model.train import loading
from neox_model.train.callbacks import spikes
from neox_model.train.callbacks.guard import NonfiniteGuard
from neox_model.train.callbacks.spikes import (
    RepeatedSpikesError,
    RollbackError,
    SpikeDetection,
    SpikeHandler,
)
from neox_model.train.callbacks.steps import LeftOutBatches
from neox_model.train.data.position import merged
from neox_model.train.loading import read_left_out, write_left_out
from neox_model.train.recent_losses import RecentLosses
from neox_model.train.run import Callback
from neox_model.train.state import StepReport, TrainState
from support.read_backs import ReadBacks
from support.refusals import refused, shows
from support.runs import AfterStep, Record, a_run, train
from support.settings import SMALL_TRAINING, resolved_from

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

    accumulation = 2

    def __init__(self, losses):
        self.losses, self.trained = losses, []

    def __call__(self, batches):
        numbers = [next(batches), next(batches)]
        self.trained.append(numbers)
        loss = self.losses[numbers[0] // 2]
        return StepReport(loss=torch.tensor(loss), grad_norm=None, skipped=False, tokens=8)


@pytest.fixture(autouse=True)
def _documents(monkeypatch):
    monkeypatch.setattr(
        "neox_model.train.run.documents_of",
        lambda dataset, samples: f"documents of {samples.start} to {samples.stop}",
    )


class Attempts:
    """A run of four samples per iteration, in attempts like those of the launcher."""

    def __init__(self, monkeypatch, losses, action, *, patience=3, batches=1):
        self.losses, self.saved, self.stored, self.record = losses, None, (), Record()
        self._handler = partial(SpikeHandler, action, patience=patience, batches=batches)
        monkeypatch.setattr(spikes, "leave_out", lambda run, ranges: setattr(self, "stored", ranges))

    def attempt(self, *, until=None, saves=()):
        """Train from the saved state on; save after iteration `until` and end there, and at `saves`."""
        state = TrainState(
            last_iteration=until or len(self.losses),
            samples_per_iteration=4,
            recent_losses=window([]),
        )
        if self.saved is not None:
            state.load_state_dict(self.saved)
        state.left_out = merged(state.left_out, self.stored)
        self.state, self.step = state, Step(self.losses)

        def save(run):
            if state.iteration in saves:
                run.before_save()
                self.saved = json.loads(json.dumps(state.state_dict()))
                run.after_save(state.iteration)

        handler = self._handler()
        run = a_run(
            *(SpikeDetection(6.0, skips=False), LeftOutBatches(), handler, guard_of(handler)),
            AfterStep(save),
            state=state,
            step=self.step,
            writers=[self.record],
        )
        train(run, range(2 * state.iteration, 1000))
        self.saved = json.loads(json.dumps(state.state_dict()))


@pytest.fixture
def attempts(monkeypatch):
    return partial(Attempts, monkeypatch)


def guard_of(handler, patience=3):
    return NonfiniteGuard(patience=patience, interval=1, min_loss_scale=None, spikes=handler)


def test_a_spike_is_reported_with_its_documents(attempts, caplog):
    run = attempts([*NORMAL, SPIKE, 2.0], "continue")
    run.attempt()
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("the loss of iteration 7, 9, is a spike (the limit is 3.8")
    assert text.endswith("its batch contains samples 24 to 27, from documents of 24 to 28")
    assert run.state.recent_losses.values() == pytest.approx([1.5, 2.2, 1.9, 2.1, SPIKE, 2.0][-WINDOW:])


def test_a_spike_is_recorded_before_a_rollback_ends_the_attempt(attempts):
    for action, ending in (("continue", nullcontext()), ("rollback", pytest.raises(RollbackError))):
        run = attempts([*NORMAL, SPIKE, 2.0], action)
        with ending:
            run.attempt()
        [(kind, iteration, content)] = run.record.events
        assert (kind, iteration) == ("spike", 7)
        # Median 2.1 and median absolute deviation 0.2 of the last five losses.
        expected = {"loss": 9.0, "limit": 2.1 + 6 * 1.4826 * 0.2, "action": action}
        assert {name: content.pop(name) for name in expected} == pytest.approx(expected)
        assert content == {"first_sample": 24, "last_sample": 27, "documents": "documents of 24 to 28"}


@pytest.mark.parametrize("batches", [1, 3])
def test_a_rollback_leaves_out_the_batches_and_resumes_exactly(attempts, batches):
    run = attempts([*NORMAL, SPIKE, 2.0, 2.3, 2.4], "rollback", batches=batches)
    run.attempt(until=5)
    with refused(RollbackError, "leaves out samples") as failure:
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


def test_rollbacks_to_the_same_checkpoint_end_at_the_limit(attempts):
    run = attempts([*NORMAL, SPIKE, SPIKE, SPIKE, 2.0], "rollback", patience=2)
    for expected in (((24, 28),), ((24, 28), (28, 32))):
        with pytest.raises(RollbackError):
            run.attempt()
        assert run.stored == expected
    with refused(RepeatedSpikesError, "iteration 9", "9", "after 2") as failure:
        run.attempt()
    assert failure.value.exit_code == 5


def test_rollbacks_to_different_checkpoints_do_not_add_up(attempts):
    run = attempts([*NORMAL, SPIKE, 2.0, SPIKE, 2.0], "rollback", patience=1)
    with pytest.raises(RollbackError):
        run.attempt()
    run.attempt(until=8)
    with pytest.raises(RollbackError):
        run.attempt()
    run.attempt()
    assert run.state.position.left_out == ((24, 28), (32, 36))


def test_a_rollback_leaves_out_nothing_before_the_checkpoint_that_was_saved_last(attempts):
    run = attempts([*NORMAL, SPIKE, 2.0], "rollback", batches=5)
    run.attempt(until=2)
    with refused(RollbackError, "samples 20", "to 27"):
        run.attempt(saves=[5])
    assert run.stored == ((20, 28),)
    run.attempt()
    assert run.state.skipped_iterations == 2


def test_patience_counts_rollbacks_since_the_last_save(attempts):
    run = attempts([*NORMAL, SPIKE, 2.0, SPIKE, 2.0], "rollback", patience=1)
    with pytest.raises(RollbackError):
        run.attempt()
    # This attempt passes the batch that is left out, saves, and finds the next spike.
    with pytest.raises(RollbackError):
        run.attempt(saves=[8])
    run.attempt()
    assert run.state.position.left_out == ((24, 28), (32, 36))


def test_all_ranks_use_the_loss_that_they_agree_on(monkeypatch):
    agreed = [torch.tensor(9.0), torch.tensor(2.0)]
    monkeypatch.setattr(spikes, "all_reduce", lambda loss, group, op: agreed.pop(0))
    state = TrainState(last_iteration=2, samples_per_iteration=4, recent_losses=window([2.0] * WINDOW))
    found = []

    class Watch(Callback):
        def on_step(self, report):
            found.append(bool(report.spiked))

    train(a_run(SpikeDetection(6.0, skips=False), Watch(), state=state, step=Step([2.0, 50.0])), range(4))
    assert found == [True, False]
    assert state.recent_losses.values() == [2.0, 2.0, 2.0, 9.0, 2.0]


def test_an_iteration_is_judged_once_even_if_that_ends_the_run():
    judged = []

    class Failing:
        def handle(self, iteration):
            judged.append(iteration.number)
            raise NeoXError("the end")

    guard = guard_of(Failing())
    state = TrainState(last_iteration=9, samples_per_iteration=4, iteration=1, samples=4)
    a_run(guard, state=state)
    report = StepReport(loss=torch.tensor(9.0), grad_norm=None, skipped=False, tokens=8, spiked=True)
    guard.on_step(report)
    with refused(NeoXError, "the end"):
        guard.catch_up()
    guard.catch_up()
    assert judged == [1]


class Pending:
    """An update that is about to be made: notes whether it is left out."""

    def __init__(self, loss):
        self.loss = lambda: torch.tensor(loss)

    def leave_out(self, flag):
        self.flag = flag


class SkippingStep(Step):
    """As an engine: calls what must run before the update, and reports what was decided."""

    def __init__(self, losses, decide):
        super().__init__(losses)
        self._decide = decide

    def __call__(self, batches):
        report = super().__call__(batches)
        pending = Pending(float(report.loss))
        self._decide(pending)
        return StepReport(loss=report.loss, grad_norm=None, skipped=pending.flag, tokens=8)


def test_skipped_spikes_do_not_enter_the_window_and_end_at_the_limit(caplog):
    losses = [*NORMAL, SPIKE, 2.0, SPIKE, SPIKE, SPIKE]
    state = TrainState(last_iteration=len(losses), samples_per_iteration=4, recent_losses=window([]))
    detection = SpikeDetection(6.0, skips=True)
    handler = SpikeHandler("skip", patience=3, batches=1)
    step = SkippingStep(losses, detection.decide)
    with refused(RepeatedSpikesError, "last 3") as failure:
        train(a_run(detection, handler, guard_of(handler, 1), state=state, step=step), range(100))
    assert failure.value.exit_code == 5
    assert int(state.skipped_iterations) == 4
    assert state.recent_losses.values() == pytest.approx([*NORMAL, 2.0][-WINDOW:])
    assert sum("its update is skipped" in record.getMessage() for record in caplog.records) == 4


def owner(name):
    return lambda count: {"model": name, "samples": f"the first {count} of {name}"}


def test_the_file_of_left_out_samples(tmp_path):
    mine, other = owner("mine"), owner("other")
    assert read_left_out(tmp_path, mine) == ()
    write_left_out(tmp_path / "save", ((4, 8), (12, 16)), mine)
    assert read_left_out(tmp_path / "save", mine) == ((4, 8), (12, 16))
    assert read_left_out(tmp_path / "save", other) is None
    for damaged in (
        *("", "{}", '{"left_out": [[1, 2]]}', "[" * 100_000),
        *(
            json.dumps({"owner": {}, "left_out": ranges})
            for ranges in (3, [[1]], [[2, 2]], [[-1, 2]], [[4, 8], [0, 2]], [[0, True]], [[0.0, 4]])
        ),
    ):
        (tmp_path / LEFT_OUT).write_text(damaged)
        with refused(CheckpointError, "is damaged", "delete it"):
            read_left_out(tmp_path, mine)


def run_of(save, load, *, seed=0, finetune=False, samples=0):
    """A run of which `add_left_out` reads the settings and the samples."""
    saves = {} if save is None else {"save": save, "save_interval": 100}
    settings = {"data_path": "unread", "load": load, "finetune": finetune, **saves}
    return a_run(
        state=TrainState(last_iteration=99, samples_per_iteration=4, samples=samples),
        resolved=resolved_from(SMALL_TRAINING | settings),
        load=None if load is None else Path(load),
        datasets={"train": np.random.default_rng(seed).integers(0, 50, (64, 5))},
    )


def left_out(*arguments, **settings):
    run = run_of(*arguments, **settings)
    loading.add_left_out(run)
    return run.state.left_out


def store(folder, ranges, **settings):
    write_left_out(Path(folder), ranges, loading.owner_of(run_of(None, None, **settings)))


@pytest.mark.parametrize("load", [None, "ck", "ck/", "other"])
def test_a_list_in_save_is_used_before_and_after_the_first_save(tmp_path, monkeypatch, load):
    monkeypatch.chdir(tmp_path)
    store("ck", ((4, 8),))
    assert left_out("ck", load) == ((4, 8),)
    assert Path("ck", LEFT_OUT).exists()


def test_the_lists_of_load_and_save_are_merged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store("load", ((4, 8),))
    store("save", ((12, 16),))
    assert left_out("save", "load") == ((4, 8), (12, 16))
    assert left_out("save", "load", finetune=True) == ((12, 16),)


@pytest.mark.parametrize(("load", "remains"), [(None, False), ("elsewhere", False), ("ck/", True)])
def test_a_list_of_other_samples_is_not_used(tmp_path, monkeypatch, caplog, load, remains):
    monkeypatch.chdir(tmp_path)
    store("ck", ((4, 8),), seed=1)
    assert left_out("ck", load) == ()
    assert Path("ck", LEFT_OUT).exists() == remains
    assert shows(caplog.text, "of other samples")


def test_the_ranges_to_come_are_named(tmp_path, caplog):
    store(tmp_path, ((4, 8), (8, 28), (28, 32)))
    left_out(str(tmp_path), None, samples=8)
    assert [record.getMessage() for record in caplog.records] == [
        "samples 8 to 27 are left out",
        "samples 28 to 31 are left out",
    ]
