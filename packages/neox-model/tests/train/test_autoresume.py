import sys
from types import SimpleNamespace

import pytest
import torch

from neox_model.errors import ModelError
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train.run import Callback
from neox_model.train.callbacks.stop import AutoresumeCallback, find_service
from neox_model.train.loop import Loop
from neox_model.train.state import StepReport, TrainState
from support.distributed import run_ranks


class Service:
    """Requests the end at its second question."""

    def __init__(self, answers=(False, True)):
        self.answers, self.calls = list(answers), []

    def init(self):
        self.calls.append("init")

    def termination_requested(self):
        self.calls.append("asked")
        return self.answers.pop(0)

    def request_resume(self):
        self.calls.append("resume")


class Saving(Callback):
    def __init__(self, calls):
        self.calls = calls

    def on_step(self, state, report):
        if state.finished:
            self.calls.append(f"save {state.iteration}")


def run(service, control=SINGLE_RANK, *, last=100):
    state = TrainState(last_iteration=last, samples_per_iteration=4)
    report = StepReport(loss=torch.tensor(1.0), grad_norm=None, skipped=False, tokens=8)
    hook = AutoresumeCallback(service, control, interval=10)
    Loop(state, lambda batches: report, iter(()), [hook, Saving(service.calls)]).run()
    return state


def test_a_request_saves_the_last_iteration_and_then_requests_another_start():
    service = Service()
    state = run(service)
    assert service.calls == ["init", "asked", "asked", "save 20", "resume"]
    assert (state.iteration, state.stop_reason) == (20, "the autoresume service requests it")


def test_a_complete_training_requests_no_start():
    service = Service([False, True])
    assert run(service, last=20).stop_reason is None
    assert service.calls == ["init", "asked", "save 20"]


def ask_on_two_ranks():
    from neox_model.parallel.topology import create_groups

    groups = create_groups(1, 0)
    # Only rank 1 hears of the request.
    service = Service([groups.world.rank == 1, False])
    state = run(service, groups.control)
    return [state.iteration, service.calls]


def test_a_request_of_one_rank_ends_all_and_rank_0_requests_the_start():
    first, second = run_ranks(ask_on_two_ranks, size=2)
    assert first == [10, ["init", "asked", "save 10", "resume"]]
    assert second == [10, ["init", "asked", "save 10"]]


def test_the_service_is_imported_by_name(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "cluster_service", SimpleNamespace(found=service, other=print))
    assert find_service("cluster_service:found") is service
    with pytest.raises(ModelError, match="has no init and no termination_requested and no request_resume"):
        find_service("cluster_service:other")
    for name in ("cluster_service:absent", "no_such_module_here:AutoResume"):
        with pytest.raises(ModelError, match=r"cannot be imported .* adlr-autoresume-service"):
            find_service(name)
