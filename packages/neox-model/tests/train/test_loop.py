import json

from neox_model.train.data.position import Position
from neox_model.train.loop import Loop
from neox_model.train.run import Callback
from neox_model.train.state import StepReport, TrainState
from support.runs import SAMPLES, a_run, count, train


class Calls(Callback):
    """Notes its calls, in a list that several may share."""

    def __init__(self, calls, name=""):
        self.calls, self._name = calls, name

    def around_step(self, step, batches):
        self.calls.append((f"{self._name}before", self.run.state.iteration))
        return step(batches)

    def _note(self, call):
        self.calls.append((f"{self._name}{call}", self.run.state.iteration))

    def on_load(self):
        self._note("load")

    def on_start(self):
        self._note("start")

    def on_step(self, report):
        self._note("step")

    def on_end(self):
        self._note("end")

    def on_pause(self):
        self._note("pause")

    def on_resume(self):
        self._note("resume")


def test_callbacks_are_called_around_every_iteration():
    calls = []
    count(Calls(calls), last=2)
    assert calls == [
        *[("load", 0), ("start", 0), ("before", 0), ("step", 1), ("before", 1), ("step", 2)],
        *[("end", 2), ("pause", 2)],
    ]


def test_the_last_callback_is_outermost_around_the_step_and_paused_first():
    calls = []
    count(Calls(calls, "a "), Calls(calls, "b "), last=1)
    assert [name for name, _ in calls] == [
        *["a load", "b load", "a start", "b start", "b before", "a before", "a step", "b step"],
        *["a end", "b end", "b pause", "a pause"],
    ]


def test_a_run_that_is_paused_is_resumed_and_not_started_again():
    calls = []
    run = a_run(Calls(calls), state=TrainState(last_iteration=2, samples_per_iteration=SAMPLES))
    loop = Loop(run, iter(range(100)))
    loop.run(1)
    loop.run()
    assert [name for name, _ in calls] == [
        *["start", "before", "step", "pause"],
        *["resume", "before", "step", "end", "pause"],
    ]


def test_a_finished_run_only_starts_and_ends():
    calls = []
    count(Calls(calls), last=2, iteration=2)
    assert calls == [("load", 2), ("start", 2), ("end", 2), ("pause", 2)]


def test_a_callback_may_replace_a_step():
    class Replaced(Callback):
        def around_step(self, step, batches):
            next(batches)
            return StepReport(loss=None, grad_norm=None, skipped=True, tokens=self.run.state.iteration)

    state = count(Replaced(), last=3)
    assert (state.iteration, state.tokens, state.skipped_iterations) == (3, 0 + 1 + 2, 3)


def test_state_counts_iterations_tokens_and_skipped_updates_and_survives_a_restart():
    state = count(last=6)
    again = TrainState(last_iteration=6, samples_per_iteration=5)
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert (again.iteration, again.tokens, again.skipped_iterations) == (6, 48, 2)
    sizes = ((0, SAMPLES),)
    assert again.position == Position(iteration=6, samples=6 * SAMPLES, batch_sizes=sizes) == state.position


def test_state_records_the_batch_sizes_of_all_iterations():
    saved = None
    for size, last in ((4, 2), (6, 5), (5, 9), (5, 10), (8, 12)):
        state = TrainState(last_iteration=last, samples_per_iteration=size)
        if saved is not None:
            state.load_state_dict(saved)
        train(a_run(state=state), range(100))
        saved = json.loads(json.dumps(state.state_dict()))
    sizes = ((0, 4), (2, 6), (5, 5), (10, 8))
    expected = Position(iteration=12, samples=2 * 4 + 3 * 6 + 5 * 5 + 2 * 8, batch_sizes=sizes)
    assert Position.from_state(saved) == state.position == expected
