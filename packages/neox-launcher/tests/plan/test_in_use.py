"""What another job holds is noticed before workers start."""

import fcntl
import os
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_config.errors import ConfigError
from neox_launcher.cli import launch
from neox_launcher.plan.in_use import refuse_what_is_in_use
from neox_launcher.protocol.claims import SAVES_TO, bound_socket, folder_in_use, is_locked, lock_of
from support.refusals import shows

SAVES = "save: runs\nsave-interval: 5\n"


@contextmanager
def locked(folder):
    """Hold the lock of a folder, as a run does."""
    folder.mkdir(exist_ok=True)
    with lock_of(folder).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_locked_only_while_its_training_runs(tmp_path):
    assert not is_locked(tmp_path / "missing")
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_looking_at_a_folder_leaves_nothing_there_and_is_not_seen_by_others(tmp_path):
    assert not is_locked(tmp_path)
    assert os.listdir(tmp_path) == []
    with lock_of(tmp_path).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # Another launcher that looks.
        assert not is_locked(tmp_path)


def test_a_training_is_refused_while_another_one_saves_to_its_folder(load, here):
    config = load(SAVES)
    refuse_what_is_in_use(config, program="train", is_local=False)
    with locked(here / "runs"):
        with pytest.raises(ConfigError) as refusal:
            refuse_what_is_in_use(config, program="train", is_local=False)
        for text, program in ((SAVES, "evaluate"), ("", "train")):
            refuse_what_is_in_use(load(text), program=program, is_local=True)
        on_each_host = load(SAVES + "checkpoint: {use_node_local_storage: true}\n")
        refuse_what_is_in_use(on_each_host, program="train", is_local=False)
    (problem,) = refusal.value.problems
    assert (refusal.value.exit_code, problem.name, problem.value, problem.place.line) == (
        2,
        "save",
        "runs",
        1,
    )
    assert f"{problem.what}; {problem.remedy}" == folder_in_use("runs", SAVES_TO)


def test_a_server_is_refused_if_its_address_is_taken_on_this_host(load):
    with listening() as port:
        config = load(f"serve: {{port: {port}}}\n")
        with pytest.raises(ConfigError) as refusal:
            refuse_what_is_in_use(config, program="serve", is_local=True)
        # The address may be free on the other host.
        refuse_what_is_in_use(config, program="serve", is_local=False)
        refuse_what_is_in_use(config, program="generate", is_local=True)
    (problem,) = refusal.value.problems
    assert (refusal.value.exit_code, problem.name, problem.value) == (2, "serve.port", str(port))
    assert shows(problem.what, "127.0.0.1 port", port)
    assert problem.remedy.startswith("set serve.port to another port (0: a free one)")
    refuse_what_is_in_use(config, program="serve", is_local=True)


def test_a_host_that_is_not_known_is_reported_as_the_host(load):
    with pytest.raises(ConfigError) as refusal:
        refuse_what_is_in_use(load("serve: {host: no-host.invalid}\n"), program="serve", is_local=True)
    (problem,) = refusal.value.problems
    assert (problem.name, problem.value) == ("serve.host", "no-host.invalid")
    assert problem.what.startswith("cannot be used: ")


def test_an_address_that_is_looked_at_can_be_used_at_the_same_time():
    with bound_socket("127.0.0.1", 0) as looked_at:
        port = looked_at.getsockname()[1]
        with bound_socket("127.0.0.1", port) as server:
            server.listen()


@pytest.mark.usefixtures("can_train")
def test_neox_launch_starts_no_worker_for_a_folder_in_use(minimal, folder, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_plan", started.append)
    monkeypatch.setattr(launch, "refuse_what_cannot_run", lambda plan: None)
    minimal.write_text(minimal.read_text() + SAVES)
    with locked(Path("runs")):
        result = CliRunner().invoke(launch.main, ["--config", str(minimal)])
        assert (result.exit_code, started) == (2, [])
        assert "saves to runs" in result.output
        assert "use another folder" in result.output
        # The plan of a run that runs can be printed.
        assert CliRunner().invoke(launch.main, ["--config", str(minimal), "--dry-run"]).exit_code != 1
    assert sorted(os.listdir("runs")) == [".lock"]
