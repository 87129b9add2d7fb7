"""Configurations are checked for the devices of a hostfile, a number of devices, or their own settings."""

import pytest
from click.testing import CliRunner

from neox_launcher.cli.config import main
from support.refusals import shows


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("one slots=4\ntwo slots=4\nthree slots=4\n")
    return path


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [
        ([], 12),
        (["num-nodes=2"], 8),
        (["exclude=two"], 8),
        (["include=one@two:1,2"], 6),
        (["num-gpus=2"], 6),
    ],
)
def test_devices_are_counted_from_the_hostfile(minimal, hosts, chosen, devices):
    overrides = [option for text in chosen for option in ("--set", text)]
    for arguments in (("--hostfile", hosts), ("--set", f"hostfile={hosts}")):
        shown = run("show", minimal, *overrides, *arguments).stdout
        assert f"# world_size: {devices} " in shown
        assert f"# train_batch_size: {2 * devices} " in shown
        assert f"devices {devices} " in " ".join(
            run("estimate", minimal, *overrides, *arguments).stdout.split()
        )


def test_devices_take_precedence_over_the_hostfile_of_the_configuration(minimal, hosts):
    assert "# world_size: 3 " in run("show", minimal, "--set", f"hostfile={hosts}", "--devices", 3).stdout


def test_a_missing_hostfile_does_not_stop_a_check(minimal):
    assert run("check", minimal, "--set", "hostfile=/elsewhere/hosts").exit_code == 0


def test_without_a_cluster_num_gpus_is_used_or_one_copy(minimal):
    assert "# world_size: 8 " in run("show", minimal, "--set", "num-gpus=4", "--set", "num-nodes=2").stdout
    assert "# world_size: 2 " in run("show", minimal, "--set", "model-parallel-size=2").stdout


def test_a_layout_that_does_not_fit_the_hosts_is_reported(minimal, hosts):
    done = run("check", minimal, "--set", "model-parallel-size=8", "--hostfile", hosts)
    assert done.exit_code == 2
    assert shows(done.stderr, "12 devices", "job (3")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hostfile", "nowhere"], "hostfile: nowhere does not exist"),
        (["--hostfile", "nowhere", "--devices", 4], "--devices and --hostfile exclude each other"),
    ],
)
def test_an_invalid_cluster_is_refused(minimal, arguments, sentence):
    for command in ("check", "show", "estimate", "schedule"):
        done = run(command, minimal, *arguments)
        assert done.exit_code == 2
        assert sentence in done.stderr
