import errno
import os
from unittest.mock import Mock

import pytest

from neox_config.errors import NeoXError
from neox_model.checkpoint.errors import CheckpointError
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train.callbacks import checkpoint
from neox_model.train.callbacks.checkpoint import CheckpointCallback, SaveClock
from neox_model.train.callbacks.stop import StopCallback
from neox_model.train.run import Callback
from support.refusals import refused
from support.runs import Record, count


class Saves:
    """Saves that are noted; those of some iterations fail."""

    def __init__(self, failing=(), error="the disk is full"):
        self.saved, self._failing, self._error = [], failing, error

    def __call__(self, run, folder):
        self.saved.append(run.state.iteration)
        if run.state.iteration in self._failing:
            raise CheckpointError(self._error)


class Watch(Callback):
    """Notes what happens around saves."""

    def __init__(self):
        self.calls = []

    def before_save(self):
        self.calls.append(("before", self.run.state.iteration))

    def after_save(self, iteration):
        self.calls.append(("after", iteration))


def saved(tmp_path, *others, saves=None, last=7, interval=3, iteration=0, **settings):
    """Train with saves, and return the iterations of these."""
    saves = Saves() if saves is None else saves
    count(
        *others,
        CheckpointCallback(tmp_path, interval=interval, save=saves, **settings),
        last=last,
        iteration=iteration,
    )
    return saves.saved


def test_saves_at_the_interval_and_once_at_the_end(tmp_path):
    assert saved(tmp_path) == [3, 6, 7]
    assert saved(tmp_path, last=6) == [3, 6]
    assert saved(tmp_path, StopCallback(SINGLE_RANK, exit_interval=4)) == [3, 4]


@pytest.mark.parametrize(
    ("growth", "expected"),
    [(2, [1, 2, 4, 8, 16, 20]), (1.5, [1, 2, 3, 5, 7, 11, 17, 20]), (100.0, [1, 20])],
)
def test_saves_at_powers_rounded_down_as_gpt_neox_does(tmp_path, growth, expected):
    assert saved(tmp_path, interval=None, growth=growth, last=20) == expected


def test_extra_iterations_are_saved_once_and_in_any_order(tmp_path):
    assert saved(tmp_path, interval=4, last=9, extra=(7, 4, 1)) == [1, 4, 7, 8, 9]
    assert saved(tmp_path, interval=4, last=9, extra=(9, 10)) == [4, 8, 9]


def test_iteration_0_is_saved_before_the_first_one_without_reporting_it_as_progress(tmp_path, monkeypatch):
    watched, while_saving = [], checkpoint.while_saving

    def watch(progress, iteration):
        watched.append(iteration)
        return while_saving(progress, iteration)

    monkeypatch.setattr(checkpoint, "while_saving", watch)
    assert saved(tmp_path, interval=4, last=9, extra=(0, 2)) == [0, 2, 4, 8, 9]
    assert watched == [2, 4, 8, 9]
    assert saved(tmp_path, interval=4, last=9, extra=(0, 2), iteration=5) == [8, 9]
    assert saved(tmp_path, interval=4, last=9, extra=(0,), iteration=9) == []


class Ticks:
    """A clock that each reading advances by half a minute."""

    def __init__(self):
        self.readings = 0

    def __call__(self):
        self.readings += 1
        return 30.0 * self.readings


def clock_of(minutes):
    return SaveClock(SINGLE_RANK, minutes=minutes, now=Ticks())


@pytest.mark.parametrize(
    ("minutes", "expected"), [(0.5, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (1, [2, 4, 6, 8, 9]), (100, [4, 8, 9])]
)
def test_a_save_is_due_that_many_minutes_after_the_last_one(tmp_path, minutes, expected):
    """One reading starts the clock anew, and one follows each iteration."""
    assert saved(tmp_path, interval=4, last=9, clock=clock_of(minutes)) == expected


def test_a_save_at_the_interval_restarts_the_clock(tmp_path):
    """Due after 3 readings: at 3; then the interval saves at 4, so that the next one is due at 7."""
    assert saved(tmp_path, interval=4, last=9, clock=clock_of(1.5)) == [3, 4, 7, 8, 9]


def test_a_save_by_time_that_fails_is_tried_again_after_the_same_time(tmp_path, caplog):
    saves = Saves(failing={2})
    assert saved(tmp_path, saves=saves, interval=4, last=9, clock=clock_of(1)) == [2, 4, 6, 8, 9]
    assert caplog.messages == ["iteration 2 was not saved, training continues: the disk is full"]


def test_failed_scheduled_save_is_logged_and_training_continues(tmp_path, caplog):
    assert saved(tmp_path, saves=Saves(failing={3})) == [3, 6, 7]
    assert caplog.messages == ["iteration 3 was not saved, training continues: the disk is full"]


def test_a_last_save_that_fails_fails_the_run(tmp_path):
    with refused(NeoXError, "iteration, 7", "disk is full"):
        saved(tmp_path, saves=Saves(failing={7}))


def test_every_save_is_recorded_and_callbacks_hear_of_it(tmp_path):
    record, watch = Record(), Watch()
    callback = CheckpointCallback(tmp_path, interval=3, save=Saves(failing={3}))
    count(watch, callback, last=7, writers=[record])
    assert watch.calls == [("before", 3), ("before", 6), ("after", 6), ("before", 7), ("after", 7)]
    assert [(kind, iteration, sorted(content)) for kind, iteration, content in record.events] == [
        ("save_failed", 3, ["message"]),
        ("save", 6, ["seconds"]),
        ("save", 7, ["seconds"]),
    ]


@pytest.mark.parametrize("iteration", [3, 7])
def test_a_save_that_fails_on_a_full_disk_has_a_remedy(tmp_path, caplog, iteration):
    # As the failure of any rank is reported on all of them.
    reason = f"saving x failed: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}"
    saves = Saves(failing={iteration}, error=reason)
    remedy = "No space left on device; free disk space"
    if iteration == 7:
        with pytest.raises(NeoXError) as raised:
            saved(tmp_path, saves=saves)
        assert str(raised.value).endswith(f"{remedy}, then start again from the latest checkpoint")
    else:
        saved(tmp_path, saves=saves)
        assert caplog.messages[0].endswith(remedy)


class Slow:
    """Background saves that take two iterations, or until they are waited for; some fail."""

    def __init__(self, failing=()):
        self.calls, self.iteration, self._failing, self._remaining = [], None, failing, 0

    def start(self, directory, run, *, iteration, **settings):
        assert self.iteration is None
        self.calls.append(f"start {iteration}")
        self.iteration, self._remaining = iteration, 2

    def prepare(self, run, *, save_optimizer):
        assert save_optimizer
        self.calls.append("prepare")

    def proceed(self):
        self._remaining -= 1
        if self._remaining == 0:
            self._end("done")

    def finish(self):
        if self.iteration is not None:
            self._end("waited for")

    def settle(self):
        assert self.iteration is None

    def _end(self, how):
        iteration, self.iteration = self.iteration, None
        if iteration in self._failing:
            raise CheckpointError("the writer was killed")
        self.calls.append(f"{how} {iteration}")


@pytest.fixture
def save_in_background(tmp_path):
    """A function that trains with background saves, and returns their calls."""

    def train(slow, *others, interval, last, extra=()):
        def save(run, folder, *, save=lambda folder, run, iteration: slow.calls.append(f"save {iteration}")):
            save(folder, run, iteration=run.state.iteration)

        callback = CheckpointCallback(
            tmp_path,
            interval=interval,
            extra=extra,
            background=slow,
            save=save,
        )
        count(*others, callback, last=last)
        return slow.calls

    return train


def test_a_save_in_the_background_is_waited_for_by_the_next_one_and_the_last_is_synchronous(
    save_in_background,
):
    watch = Watch()
    calls = save_in_background(Slow(), watch, interval=3, last=7)
    assert calls == ["prepare", "start 3", "done 3", "start 6", "waited for 6", "save 7"]
    # A checkpoint is announced when it is complete.
    assert watch.calls == [
        *(("before", 3), ("after", 3), ("before", 6), ("after", 6), ("before", 7), ("after", 7))
    ]
    calls = save_in_background(Slow(), interval=1, last=3, extra=(0,))
    assert calls == [
        *("start 0", "prepare", "waited for 0", "start 1", "waited for 1", "start 2", "waited for 2"),
        "save 3",
    ]


@pytest.mark.parametrize("last", [4, 7])
def test_a_save_in_the_background_that_fails_is_logged_and_training_continues(
    save_in_background, caplog, last
):
    calls = save_in_background(Slow(failing={3}), interval=3, last=last)
    assert caplog.messages == ["iteration 3 was not saved, training continues: the writer was killed"]
    rest = ["save 4"] if last == 4 else ["start 6", "waited for 6", "save 7"]
    assert calls == ["prepare", "start 3", *rest]


def test_a_save_under_way_is_complete_before_the_state_is_checked(save_in_background):
    slow = Slow()

    class Refusal(Callback):
        def before_save(self):
            slow.calls.append("check")
            if "start 3" in slow.calls:
                raise CheckpointError("the loss is nan")

    with refused(NeoXError, "iteration, 4", "nan"):
        save_in_background(slow, Refusal(), interval=3, last=4)
    assert slow.calls == ["prepare", "check", "start 3", "waited for 3", "check"]


def test_a_failed_preparation_is_a_warning_and_the_save_reports_the_reason(save_in_background, caplog):
    slow = Slow()
    slow.prepare = Mock(side_effect=CheckpointError("this state cannot be saved"))
    assert save_in_background(slow, interval=3, last=4) == ["start 3", "waited for 3", "save 4"]
    slow.prepare.assert_called_once()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "cannot prepare asynchronous saves: this state cannot be saved")
    ]
