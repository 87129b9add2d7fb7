import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")
import lm_eval.api.model
import lm_eval.api.task

from neox_config.errors import ConfigError
from neox_model.errors import ModelError
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.scoring.harness import HarnessModel, Tasks, _guarded, _progress_bars
from support.refusals import refused


class Task(lm_eval.api.task.ConfigurableTask):
    """A task with a function that fails."""

    def __init__(self, name: str) -> None:
        self._config = SimpleNamespace(task=name)

    def process_results(self, doc: dict, results: list) -> dict:
        raise RuntimeError("the metric has no table")


def test_errors_of_a_task_name_it_and_those_of_the_model_are_raised_as_they_are():
    with (
        refused(ModelError, "eval-tasks", "RuntimeError", "test_harness.py"),
        _guarded(["first", "second"], "run", failure=ModelError),
    ):
        Task("second").process_results({}, [])
    message = "eval-tasks: first, second cannot be run: RuntimeError: of the harness"
    with pytest.raises(ModelError, match=message), _guarded(["first", "second"], "run", failure=ModelError):
        raise RuntimeError("of the harness")

    def fail(items: list) -> None:
        raise RuntimeError("CUDA error")

    model = HarnessModel.__new__(HarnessModel)
    model._job = SimpleNamespace(groups=SINGLE_PROCESS)
    with pytest.raises(RuntimeError, match=r"^CUDA error$"), _guarded(["first"], "run", failure=ModelError):
        model._shared([], fail)


def test_data_that_cannot_be_downloaded_has_its_remedy():
    message = (
        r"eval-tasks: lambada cannot be loaded: the task's data cannot be downloaded \(ConnectionError\); "
        r".*the folder that HF_HOME names.*HF_DATASETS_OFFLINE=1 and HF_HUB_OFFLINE=1$"
    )
    with pytest.raises(ModelError, match=message), _guarded(["lambada"], "loaded", failure=ModelError):
        raise ConnectionError("Couldn't reach it")
    with refused(ModelError, "ConnectionError"), _guarded(["own"], "run", failure=ModelError):
        raise ConnectionError("a server of the task")


@pytest.mark.slow
def test_loading_is_announced_and_libraries_log_once(caplog, tmp_path):
    caplog.set_level("INFO", logger="neox_model.scoring.harness")
    logging.getLogger("huggingface_hub").addHandler(logging.StreamHandler())
    with refused(ConfigError, "no task 'none_such'"):
        Tasks(["none_such"], include_path=None, num_fewshot=None, limit=None)
    assert "of lm_eval: none_such" in caplog.text
    assert not logging.getLogger("huggingface_hub").handlers
    assert not logging.getLogger("datasets").handlers


@pytest.mark.parametrize("shows", [True, False])
def test_progress_bars_are_hidden_also_if_the_harness_requests_them(shows, capsys):
    with _progress_bars(shows):
        assert list(lm_eval.api.model.tqdm(range(3), disable=False)) == [0, 1, 2]
        lm_eval.api.model.tqdm.write("a line of a task")
    shown = capsys.readouterr()
    assert ("3/3" in shown.err, shown.out) == (shows, "a line of a task\n")
    list(lm_eval.api.model.tqdm(range(3), disable=False))
    assert "3/3" in capsys.readouterr().err


def test_texts_are_decoded_without_their_prompt_as_by_the_backend_for_transformers():
    words = [" a", " b", "c"]

    def alone(text: str, tokens: list[int], *, drops: bool) -> str:
        def decoded(ids: list[int]) -> str:
            return "".join(words[one] for one in ids).removeprefix(" " * drops)

        model = SimpleNamespace(_tokenizer=SimpleNamespace(decode=decoded))
        return HarnessModel._alone(model, SimpleNamespace(text=text, tokens=tokens))

    assert alone(" a b", [0, 1], drops=True) == "a b"
    assert alone(" a b", [0, 1], drops=False) == " a b"
    assert alone("c a", [2, 0], drops=True) == "c a"
