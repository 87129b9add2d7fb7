import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from neox_launcher.controller import failures
from neox_launcher.controller.failures import keep_failures
from neox_launcher.protocol.outcome import Failure
from neox_launcher.worker.reporting import LAUNCH_VARIABLE, RESTART_VARIABLE

LOST = Failure(rank=None, host="h-2", time=5.0, message="agent lost", unreported=True)


@pytest.fixture
def orders(tmp_path):
    """Return the part of a launch's orders that names the log folder."""
    return SimpleNamespace(record_folder=tmp_path / "logs", environment={LAUNCH_VARIABLE: "abc"})


def test_a_lost_host_is_kept_with_the_name_of_the_launch_and_the_number_of_the_restart(orders, tmp_path):
    keep_failures([LOST], orders)
    record = json.loads((tmp_path / "logs" / "failures.jsonl").read_text())
    assert (record["host"], record["rank"], record["launch"], record["restart"]) == ("h-2", None, "abc", 0)
    orders.environment[RESTART_VARIABLE] = "3"
    keep_failures([LOST], orders)
    lines = (tmp_path / "logs" / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["restart"] for line in lines] == [0, 3]


def test_nothing_is_written_without_failures_or_log_folder(orders, tmp_path):
    keep_failures([], orders)
    orders.record_folder = None
    keep_failures([LOST], orders)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_or_hangs_is_reported(orders, tmp_path, monkeypatch, capfd):
    (tmp_path / "logs").touch()
    keep_failures([LOST], orders)
    released = threading.Event()
    monkeypatch.setattr(failures, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: released.wait(60))
    keep_failures([LOST], orders)
    released.set()
    printed = capfd.readouterr()
    printed = printed.out + printed.err
    assert printed.count("not recorded in ") == 2
    assert "File exists" in printed
    assert "a file server" in printed
