"""What a worker writes down, and who it is."""

import json
import logging
import threading
import time

from neox_launcher.errors import ConfigError, NeoXError
from neox_launcher.log import configure_logging
from neox_launcher.ranks import RankInfo, read_rank
from neox_launcher.worker import (
    Progress,
    answer_questions,
    is_restart,
    report_facts,
    report_failure,
    worker_file,
)


def test_a_report_is_written_for_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    assert report_failure(3, NeoXError("what\nto do")) == 1
    report = json.loads((tmp_path / "rank-3.error.json").read_text())
    assert report["message"] == "what\nto do"
    assert report["traceback"] is None
    assert (report["rank"], report["exit_code"]) == (3, 1)
    assert set(report) == {"time", "host", "rank", "message", "traceback", "exit_code"}


def test_an_accident_is_reported_with_its_traceback(tmp_path, monkeypatch):
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


def test_only_rank_0_talks_and_all_warn(capsys):
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
    assert [line.split("  ")[-1] for line in lines] == ["hello 0", "careful 0", "careful 3"]
    assert " r0003 neox_model.example  " in lines[2]


def test_a_thread_answers_whenever_it_is_asked(tmp_path, monkeypatch):
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


def test_what_takes_long_is_progress_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setenv("NEOX_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("neox_launcher.worker._BEAT_SECONDS", 0.001)
    path, progress = worker_file(tmp_path, 0, "progress"), Progress(0)
    threads = threading.active_count()
    progress.tell(4)
    with progress.kept_up(4):
        for _ in range(3):
            seen = path.stat().st_mtime_ns
            deadline = time.monotonic() + 60
            while path.stat().st_mtime_ns == seen:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert int(path.read_text()) == 4
    assert threading.active_count() == threads


def test_the_workers_of_a_restart_know_it(monkeypatch):
    monkeypatch.delenv("NEOX_RESTART", raising=False)
    assert not is_restart()
    monkeypatch.setenv("NEOX_RESTART", "1")
    assert is_restart()


def test_by_hand_nobody_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("NEOX_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    report_facts(0, {})
    answer_questions(0, str)
    Progress(0).tell(1)
    assert list(tmp_path.iterdir()) == []
