import pytest

pytest.importorskip("lm_eval")
import lm_eval.api.model

from neox_model.scoring.harness import _progress_bars


@pytest.mark.parametrize("shows", [True, False])
def test_progress_bars_are_hidden_also_if_the_harness_requests_them(shows, capsys):
    kept = lm_eval.api.model.tqdm
    with _progress_bars(shows):
        assert list(lm_eval.api.model.tqdm(range(3), disable=False)) == [0, 1, 2]
        lm_eval.api.model.tqdm.write("a line of a task")
    shown = capsys.readouterr()
    assert ("3/3" in shown.err, shown.out) == (shows, "a line of a task\n")
    assert lm_eval.api.model.tqdm is kept
