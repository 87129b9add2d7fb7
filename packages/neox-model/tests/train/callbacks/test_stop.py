import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from neox_model.errors import ModelError
from neox_model.parallel.groups import SINGLE_RANK
from neox_model.train.callbacks.checkpoint import UploadCallback
from neox_model.train.callbacks.stop import AutoresumeCallback, StopCallback, find_service
from support.distributed import run_ranks
from support.refusals import refused
from support.runs import AfterStep, count


def signal_after(iteration, *numbers):
    """Return a callback that sends signals to this process after an iteration."""

    def send(run):
        if run.state.iteration == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)

    return AfterStep(send)


def stop_callback(**settings):
    return StopCallback(SINGLE_RANK, **{"exit_interval": None, **settings})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_training_after_the_next_iteration(number):
    before = signal.getsignal(number)
    state = count(signal_after(2, number), stop_callback(), last=50)
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (state.iteration, state.stop_reason) == (3, f"{name} received")
    assert signal.getsignal(number) is before


def test_a_second_signal_meets_the_previous_handler():
    stop = stop_callback()
    with pytest.raises(KeyboardInterrupt):
        count(signal_after(1, signal.SIGINT, signal.SIGINT), stop)


def test_repeated_stop_request_is_one_request():
    state = count(signal_after(2, signal.SIGTERM, signal.SIGTERM), stop_callback(), last=50)
    assert (state.iteration, state.stop_reason) == (3, "SIGTERM received")


@pytest.fixture
def _warning_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    yield
    # Ignored for a moment, so that a pending one is discarded.
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.usefixtures("_warning_blocked")
def test_a_repeated_sigusr1_is_one_request_and_a_sigterm_after_it_ends_nothing_at_once(caplog):
    caplog.set_level(logging.INFO)
    numbers = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
    state = count(signal_after(1, *numbers), stop_callback(save="kept"), last=50)
    assert (state.iteration, state.stop_reason) == (2, "SIGUSR1 received")
    assert caplog.messages == ["stopping after iteration 2: SIGUSR1 received; saving a checkpoint in kept"]


@pytest.mark.usefixtures("_warning_blocked")
def test_a_sigusr1_sent_while_loading_ends_the_training_before_its_first_iteration(caplog):
    caplog.set_level(logging.INFO)
    # To this thread: any other that does not block it would end the process.
    signal.raise_signal(signal.SIGUSR1)
    state = count(stop_callback(), last=50, iteration=7)
    assert (state.iteration, state.stop_reason) == (7, "SIGUSR1 received")
    [line] = caplog.messages
    assert line == "stopping before iteration 8: SIGUSR1 received; nothing new to save"


@pytest.mark.usefixtures("_warning_blocked")
def test_a_sigusr1_after_the_training_stays_pending():
    count(stop_callback(), last=2)
    signal.raise_signal(signal.SIGUSR1)
    assert signal.SIGUSR1 in signal.sigpending()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_signal_during_the_last_upload_does_not_end_it(tmp_path, is_stopped):
    class Uploading:
        poll_count = 0
        ended = False

        def poll(self):
            self.poll_count += 1
            if is_stopped and self.poll_count == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def finish(self):
            os.kill(os.getpid(), signal.SIGTERM)
            self.ended = True

    before = signal.getsignal(signal.SIGTERM)
    uploads = Uploading()
    count(stop_callback(), UploadCallback(uploads, tmp_path), last=50 if is_stopped else 3)
    assert uploads.ended
    assert signal.getsignal(signal.SIGTERM) is before


def test_stop_names_the_signal_that_the_launcher_received(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    (tmp_path / "stop-signal").write_text(str(int(signal.SIGHUP)))

    caplog.set_level(logging.INFO)
    state = count(signal_after(1, signal.SIGTERM), stop_callback(), last=50)
    assert state.stop_reason == "SIGHUP received"
    assert caplog.messages[0].endswith("SIGHUP received; no checkpoint is saved, because `save` is not set")


def test_exit_interval_counts_iterations_of_the_whole_training():
    state = count(stop_callback(exit_interval=5), last=50, iteration=7)
    assert state.iteration == 10


def test_a_training_that_is_complete_is_not_stopped():
    state = count(stop_callback(exit_interval=5), last=10)
    assert (state.iteration, state.stop_reason) == (5, "exit_interval is 5")
    state = count(stop_callback(exit_interval=5), last=10, iteration=5)
    assert (state.iteration, state.stop_reason) == (10, None)


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


def autoresume(service, control=SINGLE_RANK, *, last=100):
    def save(run):
        if run.state.finished:
            service.calls.append(f"save {run.state.iteration}")

    return count(AutoresumeCallback(service, control, interval=10), AfterStep(save), last=last)


def test_a_request_saves_the_last_iteration_and_then_requests_another_start():
    service = Service()
    state = autoresume(service)
    assert service.calls == ["init", "asked", "asked", "save 20", "resume"]
    assert (state.iteration, state.stop_reason) == (20, "the autoresume service requests it")


def test_a_complete_training_requests_no_start():
    service = Service([False, True])
    assert autoresume(service, last=20).stop_reason is None
    assert service.calls == ["init", "asked", "save 20"]


def ask_on_two_ranks():
    from neox_model.parallel.topology import create_groups

    groups = create_groups(1, 0)
    # Only rank 1 hears of the request.
    service = Service([groups.world.rank == 1, False])
    state = autoresume(service, groups.control)
    return [state.iteration, service.calls]


def test_a_request_of_one_rank_ends_all_and_rank_0_requests_the_start():
    first, second = run_ranks(ask_on_two_ranks, size=2)
    assert first == [10, ["init", "asked", "save 10", "resume"]]
    assert second == [10, ["init", "asked", "save 10"]]


def test_the_service_is_imported_by_name(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "cluster_service", SimpleNamespace(found=service, other=print))
    assert find_service("cluster_service:found") is service
    with refused(ModelError, "termination_requested", "request_resume"):
        find_service("cluster_service:other")
    for name in ("cluster_service:absent", "no_such_module_here:AutoResume"):
        with refused(ModelError, "adlr-autoresume-service"):
            find_service(name)
