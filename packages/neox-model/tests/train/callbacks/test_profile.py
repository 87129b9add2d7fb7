"""Traces of the profiled iterations, and of no others."""

import gzip
import json
import logging
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import support
from neox_launcher.worker.reporting import Progress
from neox_model.train.callbacks.profilers import ProfileCallback
from neox_model.train.state import StepReport
from support.refusals import shows
from support.runs import a_run, count

CPU = torch.device("cpu")


def step(batches: Any) -> StepReport:
    """Multiply two matrices."""
    loss = (torch.ones(8, 8) @ torch.ones(8, 8)).sum()
    return StepReport(loss=loss, grad_norm=None, skipped=False, tokens=1)


def traced(
    folder: Path,
    iterations: range,
    *,
    first: int = 0,
    last: int = 6,
    is_of_memory: bool = False,
    **parts: Any,
) -> list[str]:
    """Names of the files after a run from iteration `first` + 1 to `last`."""
    callback = ProfileCallback(iterations, [folder], rank=0, device=CPU, is_of_memory=is_of_memory)
    count(callback, last=last, iteration=first, step=step, **parts)
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def spans_of(path: Path) -> set[str]:
    return {event["name"] for event in events_of(path) if event["name"].startswith("iteration")}


RANGES = {
    "in the middle": (range(3, 5), {}, "3-4", {"iteration 3", "iteration 4"}),
    "from the first": (range(1, 2), {}, "1-1", {"iteration 1"}),
    "to the end of the run": (range(6, 10), {}, "6-6", {"iteration 6"}),
    "resumed inside": (range(2, 5), {"first": 3}, "4-4", {"iteration 4"}),
    "resumed before": (range(5, 6), {"first": 3}, "5-5", {"iteration 5"}),
}


@pytest.mark.parametrize("case", RANGES)
def test_the_trace_holds_the_iterations_of_the_range_and_no_others(tmp_path, case):
    iterations, given, name, spans = RANGES[case]
    files = traced(tmp_path, iterations, **given)
    assert files == [f"rank-00000.iterations-{name}.pt.trace.json.gz"]
    assert spans_of(tmp_path / files[0]) == spans
    multiplications = [event for event in events_of(tmp_path / files[0]) if event["name"] == "aten::mm"]
    assert len(multiplications) == len(spans)


@pytest.mark.parametrize(
    ("iterations", "first"),
    [(range(1, 4), 3), (range(2, 3), 5), (range(8, 9), 0), (range(7, 8), 0)],
    ids=["resumed after it", "long after it", "after the end", "only prepared"],
)
def test_outside_of_the_range_nothing_is_written(tmp_path, iterations, first):
    assert traced(tmp_path / "profile", iterations, first=first) == []


def test_the_log_lists_the_operators_that_take_the_most_time(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        traced(tmp_path, range(3, 5))
    assert shows(caplog.text, "iterations 3", "to 4", "rank 0")
    (row,) = (line.split() for line in caplog.text.splitlines() if line.split()[:1] == ["aten::mm"])
    assert row[-1] == "2"


def test_allocations_are_traced_on_request(tmp_path):
    (plain,) = traced(tmp_path / "plain", range(3, 4))
    (memory,) = traced(tmp_path / "memory", range(3, 4), is_of_memory=True)
    sizes = [
        event["args"]["Bytes"]
        for event in events_of(tmp_path / "memory" / memory)
        if event["name"] == "[memory]"
    ]
    assert sizes.count(8 * 8 * 4) == 3
    assert not [event for event in events_of(tmp_path / "plain" / plain) if event["name"] == "[memory]"]


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    callback = ProfileCallback(range(2, 3), [tmp_path / "file" / "profile"], rank=0, device=CPU)
    assert count(callback, step=step).iteration == 4
    assert shows(caplog.text, "rank 0", "not written", "continues")


def test_an_error_leaves_no_profiler_running(tmp_path):
    callback = ProfileCallback(range(1, 3), [tmp_path], rank=0, device=CPU)
    a_run(callback)
    callback.on_start()
    callback.close()
    assert not torch.autograd._profiler_enabled()
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import json, pathlib, resource, sys
sys.path[:0] = sys.argv[3:]
from support.runs import a_run
from test_profile import traced
a_run()  # Its configuration is read from a file.
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
print(json.dumps(traced(pathlib.Path(sys.argv[1]), range(3, 5))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2000])
def test_a_trace_that_pytorch_could_not_write_is_an_error_and_no_file(tmp_path, limit):
    """PyTorch only prints a message when a file cannot be written, such as on a full disk."""
    folders = [str(Path(__file__).parent), str(Path(support.__file__).parents[1])]
    given = [str(tmp_path / "profile"), str(limit), *folders]
    done = subprocess.run([sys.executable, "-c", LIMITED, *given], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert shows(done.stderr, "rank 0", "not written", "continues")


def test_a_folder_that_cannot_be_written_is_named_and_the_other_one_receives_the_trace(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folders = [tmp_path / "profile", tmp_path / "file" / "memory"]
    count(ProfileCallback(range(2, 3), folders, rank=0, device=CPU), step=step)
    assert len(list(folders[0].iterdir())) == 1
    assert f"the trace {folders[1]}/rank-00000" in caplog.text


def test_writing_is_reported_and_a_range_that_is_past_is_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    written: list[int] = []

    class Reported(Progress):
        def repeated(self, iteration: int) -> AbstractContextManager[None]:
            written.append(iteration)
            return nullcontext()

    traced(tmp_path, range(2, 4), progress=Reported(0))
    assert written == [3]
    traced(tmp_path, range(2, 4), first=3, progress=Reported(0))
    assert written == [3]
    assert shows(caplog.text, "nothing is traced", "iteration 3")
