from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")
import lm_eval.api.model
import lm_eval.api.task

from neox_model.errors import ModelError
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.scoring.harness import HarnessModel, _guarded, _progress_bars


class Task(lm_eval.api.task.ConfigurableTask):
    """A task with a function that fails."""

    def __init__(self, name: str) -> None:
        self._config = SimpleNamespace(task=name)

    def process_results(self, doc: dict, results: list) -> dict:
        raise RuntimeError("the metric has no table")


def test_errors_of_a_task_name_it_and_those_of_the_model_are_raised_as_they_are():
    message = (
        r"eval-tasks: second cannot be run: RuntimeError: the metric has no table \(.*test_harness.py:\d+\)"
    )
    with pytest.raises(ModelError, match=message), _guarded(["first", "second"], "run", failure=ModelError):
        Task("second").process_results({}, [])
    message = "eval-tasks: first, second cannot be run: RuntimeError: of the harness"
    with pytest.raises(ModelError, match=message), _guarded(["first", "second"], "run", failure=ModelError):
        raise RuntimeError("of the harness")

    def fail(items: list) -> None:
        raise RuntimeError("CUDA error")

    model = HarnessModel.__new__(HarnessModel)
    model._groups = SINGLE_PROCESS
    with pytest.raises(RuntimeError, match=r"^CUDA error$"), _guarded(["first"], "run", failure=ModelError):
        model._shared([], fail)


@pytest.mark.parametrize("shows", [True, False])
def test_progress_bars_are_hidden_also_if_the_harness_requests_them(shows, capsys):
    kept = lm_eval.api.model.tqdm
    with _progress_bars(shows):
        assert list(lm_eval.api.model.tqdm(range(3), disable=False)) == [0, 1, 2]
        lm_eval.api.model.tqdm.write("a line of a task")
    shown = capsys.readouterr()
    assert ("3/3" in shown.err, shown.out) == (shows, "a line of a task\n")
    assert lm_eval.api.model.tqdm is kept
