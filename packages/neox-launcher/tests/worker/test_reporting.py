"""The reports of a worker, and its rank."""

import errno
import faulthandler
import json
import logging
import os
import signal
import threading
import time

import pytest

from neox_config import finite_json
from neox_config.errors import ConfigError, NeoXError
from neox_config.log import configure_logging
from neox_launcher.agent.workers import Workers
from neox_launcher.protocol.outcome import Failure, judge
from neox_launcher.worker.ranks import RankInfo, read_rank
from neox_launcher.worker.reporting import (
    Progress,
    answer_questions,
    is_restart,
    register_worker,
    report_facts,
    report_failure,
    worker_file,
)
from support.refusals import refused


def test_a_report_is_written_for_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    assert report_failure(3, NeoXError("what\nto do")) == 1
    report = json.loads((tmp_path / "rank-3.error.json").read_text())
    assert report["message"] == "what\nto do"
    assert report["traceback"] is None
    assert (report["rank"], report["exit_code"]) == (3, 1)
    assert set(report) == {"time", "host", "rank", "message", "traceback", "exit_code", "is_refused_start"}
    assert not report["is_refused_start"]


def test_an_unexpected_exception_is_reported_with_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    assert report_failure(0, ValueError("oh")) == 1
    report = json.loads((tmp_path / "rank-0.error.json").read_text())
    assert report["message"] == "ValueError: oh"
    assert report["traceback"].endswith("ValueError: oh\n")


def test_without_a_launcher_the_report_goes_to_stderr(monkeypatch, capsys):
    monkeypatch.delenv("NEOX_RUN_DIR", raising=False)
    assert report_failure(0, ConfigError("wrong")) == 2
    assert capsys.readouterr().err == "error: wrong\n"


def test_the_rank_is_read_from_the_environment():
    environment = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    assert read_rank(environment) == RankInfo(
        rank=3, local_rank=1, world_size=4, local_world_size=2, master_addr="10.0.0.1", master_port=1234
    )
    assert read_rank({}) is None


def test_rank_0_logs_info_and_all_ranks_log_warnings(capsys):
    root = logging.getLogger()
    before, level = root.handlers, root.level
    logger = logging.getLogger("neox_model.example")
    try:
        for rank in (0, 3):
            configure_logging(rank)
            logger.info("hello %d", rank)
            logger.warning("careful %d", rank)
            logging.getLogger("other").info("chatter")
    finally:
        root.handlers, root.level = before, level
        for package in ("neox_launcher", "neox_data", "neox_kernels", "neox_model"):
            logging.getLogger(package).setLevel(logging.NOTSET)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[-1] for line in lines] == [
        "hello 0",
        "warning: careful 0",
        "warning: careful 3",
    ]
    assert " r0003 neox_model.example  " in lines[2]


def test_a_thread_answers_every_question(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    words = iter(["first", "second"])
    answer_questions(4, lambda: next(words))
    answer = worker_file(tmp_path, 4, "answer")
    for expected in ("first", "second"):
        with worker_file(tmp_path, 4, "question").open("wb", buffering=0) as question:
            question.write(b"?")
        deadline = time.monotonic() + 60
        while not answer.exists() or answer.read_text() != expected:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_last_report_of_facts_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    report_facts(2, {"a": 1})
    report_facts(2, {"a": 2})
    assert json.loads(worker_file(tmp_path, 2, "facts").read_text()) == {"a": 2}


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """A worker that has registered, after which no new file can be written."""
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    (tmp_path / "agent.pid").write_text(str(os.getppid()))
    registered = []
    monkeypatch.setattr("atexit.register", lambda *what: registered.append(what))
    monkeypatch.setattr("neox_launcher.worker.reporting.die_with_parent", lambda parent: None)
    register_worker(3)

    def fail(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("neox_launcher.worker.reporting.write_aside", fail)
    yield registered
    faulthandler.unregister(signal.SIGUSR2)


def test_the_rank_that_failed_precedes_those_that_heard_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    heard = NeoXError("saving failed on rank 1: full")
    heard.is_of_another_rank = True
    report_failure(0, heard)
    report_failure(1, NeoXError("saving failed on rank 1: full"))
    reports = [json.loads((tmp_path / f"rank-{rank}.error.json").read_text()) for rank in (0, 1)]
    outcome = judge([Failure(**report) for report in reports], [])
    assert (outcome.first_failure.rank, outcome.num_failures) == (1, 2)


def test_a_failure_is_printed_when_the_disk_is_full(tmp_path, full_disk, capfd):
    assert report_failure(3, ConfigError("x" * 100_000 + "the end")) == 2
    assert not (tmp_path / "rank-3.error.json").exists()
    assert capfd.readouterr().err.endswith("xthe end\n")


def test_the_end_is_reported_when_the_disk_is_full(tmp_path, full_disk):
    for function, *arguments in full_disk:
        function(*arguments)
    assert (tmp_path / "rank-3.end").exists()


def test_progress_on_a_full_disk_is_still_a_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    path, progress = worker_file(tmp_path, 0, "progress"), Progress(0)
    progress.report(4)
    os.utime(path, (0, 0))

    def fail(*what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", fail)
    progress.report(5)
    assert int(path.read_text()) == 4
    assert path.stat().st_mtime > 0
    with refused(NeoXError, code="not-writable"):
        Progress(1)


def test_a_long_operation_reports_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("neox_launcher.worker.reporting._BEAT_SECONDS", 0.001)
    path, progress = worker_file(tmp_path, 0, "progress"), Progress(0)
    threads = threading.active_count()
    progress.report(4)
    with progress.repeated(4):
        for _ in range(3):
            seen = path.stat().st_mtime_ns
            deadline = time.monotonic() + 60
            while path.stat().st_mtime_ns == seen:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert int(path.read_text()) == 4
    assert threading.active_count() == threads


def test_is_restart_reads_the_environment(monkeypatch):
    monkeypatch.delenv("NEOX_RESTART", raising=False)
    assert not is_restart()
    monkeypatch.setenv("NEOX_RESTART", "1")
    assert is_restart()


def test_a_worker_started_by_hand_writes_no_reports(tmp_path, monkeypatch):
    monkeypatch.delenv("NEOX_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    report_facts(0, {})
    answer_questions(0, str)
    Progress(0).report(1)
    assert list(tmp_path.iterdir()) == []


def status_of(folder):
    text = worker_file(folder, 0, "status").read_text()
    assert len(text) == 2048
    return finite_json.loads(text)


def test_rank_0_reports_a_status_to_which_changes_are_added(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    progress = Progress(0)
    progress.describe(phase="loading", last_iteration=9)
    progress.describe(iteration=3, metrics={"loss/train": 2.5, "optimizer/loss_scale": 4.0})
    with progress.phase("saving iteration 3"):
        assert status_of(tmp_path)["phase"] == "saving iteration 3"
        time.sleep(0.01)
    assert progress.seconds_in_phases > 0
    progress.describe(metrics={"loss/train": float("inf")})
    assert status_of(tmp_path) == {
        "phase": "loading",
        "iteration": 3,
        "last_iteration": 9,
        "metrics": {"loss/train": float("inf"), "optimizer/loss_scale": 4.0},
    }


def test_only_rank_0_of_an_agent_has_a_status(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    other = Progress(1)
    other.describe(phase="loading")
    assert not other.is_shown
    assert not worker_file(tmp_path, 1, "status").exists()
    monkeypatch.delenv("NEOX_RUN_DIR")
    assert not Progress(0).is_shown


def test_a_status_on_a_full_disk_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    progress = Progress(0)
    progress.describe(iteration=3)

    def fail(*what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", fail)
    progress.describe(iteration=4)
    assert status_of(tmp_path)["iteration"] == 3


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        (
            '{"phase": "", "iteration": 3, "metrics": {"loss/train": 2.5}, "warnings": 1}',
            True,
        ),
        ('{"metrics": {"loss/train": null}, "nonfinite": {"metrics": {"loss/train": "nan"}}}', True),
        ("{}", True),
        ('{"metrics": {"loss/train": null}}', False),
        ('{"metrics": {"loss/train": "2.5"}}', False),
        ('{"metrics": [1.0]}', False),
        ('{"metrics": {}, "nonfinite": {"metrics": {"loss/train": "nan"}}}', False),
        ('{"phase": null}', False),
        ('{"iteration": "3"}', False),
        ('{"iteration": null}', False),
        ('{"warnings": 1.5}', False),
    ],
)
def test_a_status_that_cannot_be_shown_is_dropped_on_its_host(tmp_path, text, is_whole):
    worker_file(tmp_path, 0, "status").write_text(text)
    workers = Workers.__new__(Workers)
    workers._folder, workers._processes = tmp_path, {0: None}
    assert workers.status() == (json.loads(text) if is_whole else {})
