"""Plans: which hosts, ranks, addresses and variables, and how they are shown."""

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_launcher import launch
from neox_launcher.cli import main
from neox_launcher.config import decode_resolved
from neox_launcher.errors import ConfigError, HostfileError, LaunchError
from neox_launcher.launch import Request, plan_launch
from neox_launcher.resources import hosts as hosts_module
from neox_launcher.resources.host import Host

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "2", "SLURM_JOB_ID": "77"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with a hostfile; no hostfile where the cluster would have one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hosts_module, "DEFAULT_HOSTFILE", tmp_path / "job" / "hostfile")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("worker-0 slots=1\nworker-1 slots=2\nworker-2 slots=1\n")
    return tmp_path


@pytest.fixture
def plan(minimal):
    """plan("name=value", ..., program=..., gpus=..., environment=...)"""

    def build(*overrides, program="train", gpus=0, environment=None):
        request = Request(program=program, paths=(str(minimal),), overrides=overrides)
        return plan_launch(request, gpus=gpus, environment=environment or {})

    return build


def test_ranks_are_dealt_in_the_order_of_hosts_and_slots(plan):
    planned = plan("hostfile=hosts", "exclude=worker-1:0")
    assert [(host.name, host.slots, list(ranks)) for host, ranks in planned.world.with_ranks()] == [
        ("worker-0", (0,), [0]),
        ("worker-1", (1,), [1]),
        ("worker-2", (0,), [2]),
    ]
    assert planned.resolved.derived.world_size == 3
    assert planned.resolved.derived.hosts == 3


def test_the_orders_hold_all_that_nodes_need(plan, folder):
    planned = plan(
        "hostfile=hosts", "log-dir=logs", "detect-nvlink-pairs=true", environment={"NCCL_DEBUG": "INFO"}
    )
    orders = planned.orders()
    assert orders.hosts == planned.world.hosts
    assert (orders.master_addr, orders.master_port) == (None, 0)
    assert orders.environment == {"NCCL_DEBUG": "INFO"}
    assert orders.worker == ("-m", "neox_model.train")
    assert decode_resolved(orders.resolved) == planned.resolved
    assert (orders.working_directory, orders.log_dir) == (str(folder), "logs")
    assert (orders.gpus, orders.detect_nvlink_pairs, orders.bind_cores) == (None, True, False)
    assert (orders.stop_timeout, orders.hang_timeout) == (600, 1800)


def test_a_job_of_this_machine_alone_needs_no_launcher(plan):
    assert plan().launcher == "local"
    assert plan("launcher=slurm", environment=SLURM).launcher == "slurm"
    (Path("hosts")).write_text(f"{socket.gethostname()} slots=2\n")
    planned = plan("hostfile=hosts", gpus=4)
    assert (planned.launcher, planned.world.size, planned.world.gpus) == ("local", 2, 4)
    assert planned.master_addr == "127.0.0.1"


def test_one_other_host_needs_one(plan):
    planned = plan("hostfile=hosts", "include=worker-1", gpus=4)
    assert (planned.launcher, planned.world.gpus, planned.master_addr) == ("pdsh", None, None)


def test_this_machine_under_two_names_is_refused(plan):
    Path("hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    with pytest.raises(HostfileError, match=r"localhost and 127\.0\.0\.1 are both this machine"):
        plan("hostfile=hosts")


def test_local_with_another_host_is_refused(plan):
    with pytest.raises(ConfigError, match="starts workers on this machine alone, and worker-0 is another"):
        plan("hostfile=hosts", "launcher=local")


def test_deepspeed_mpi_takes_an_mpi_on_one_host_too(plan):
    assert plan("deepspeed-mpi=true").launcher == "openmpi"
    assert plan("deepspeed-mpi=true", "launcher=mpich", "hostfile=hosts").launcher == "mpich"


def test_a_hostfile_is_found_where_the_documents_say(plan, folder):
    (folder / "other").write_text("named slots=1\n")
    (folder / "job").mkdir()
    (folder / "job" / "hostfile").write_text("default slots=1\n")
    named = {"DLTS_HOSTFILE": str(folder / "other")}
    assert plan("hostfile=hosts", environment=named).world.hosts[0].name == "worker-0"
    assert plan(environment=named).world.hosts[0].name == "named"
    assert plan().world.hosts[0].name == "default"
    assert plan("launcher=slurm", environment=SLURM).world.hosts[0].name == "default"


def test_this_machine_asked_for_by_name_needs_no_hostfile(plan, folder):
    (folder / "job").mkdir()
    (folder / "job" / "hostfile").write_text("default slots=1\n")
    planned = plan("launcher=local", "num-gpus=2", environment={"DLTS_HOSTFILE": "hosts"})
    assert (planned.launcher, planned.world.hosts) == ("local", (Host("localhost", (0, 1)),))


def test_slurm_says_which_hosts_there_are(plan):
    planned = plan("launcher=slurm", "exclude=n1:1", environment=SLURM)
    assert planned.world.hosts == (Host("n1", (0,)), Host("n2", (0, 1)))
    assert planned.hosts_from == "Slurm allocation 77"
    with pytest.raises(HostfileError, match="inside sbatch or salloc"):
        plan("launcher=slurm")


def test_an_allocation_that_is_still_to_be_made_can_be_planned_and_not_started(plan, monkeypatch):
    planned = plan("launcher=slurm", "num-nodes=2", "num-gpus=4")
    names = ["<host 1 of the allocation>", "<host 2 of the allocation>"]
    assert planned.world.hosts == tuple(Host(name, (0, 1, 2, 3)) for name in names)
    assert planned.hosts_from == "a Slurm allocation, which is still to be made"
    assert planned.rendezvous.startswith("<hostname -I on host 1 of the allocation>:")
    monkeypatch.setattr("neox_launcher.backends.slurm.shutil.which", lambda program: program)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    reason = launch.BACKENDS["slurm"].missing()
    assert reason == "launcher: slurm works inside an allocation alone; start it inside sbatch or salloc"
    with pytest.raises(HostfileError, match="for a --dry-run outside, set num-nodes and num-gpus"):
        plan("launcher=slurm", "num-nodes=2")


def test_an_allocation_that_is_not_used_is_mentioned(plan):
    assert "used with launcher: slurm" in plan(environment=SLURM).hosts_from


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("include=worker-9", "include: worker-9\n    names worker-9, which is not among the hosts"),
        ("num-nodes=4", "num-nodes: 4\n    is more than the 3 hosts that there are"),
        ("num-gpus=2", "num-gpus: 2\n    is more than the 1 slot of worker-0"),
    ],
)
def test_a_choice_that_cannot_be_is_told_with_its_place(plan, override, sentence):
    with pytest.raises(ConfigError) as found:
        plan("hostfile=hosts", override)
    assert str(found.value).startswith("command line: 1 problem")
    assert sentence in str(found.value)


def test_address_and_port_are_the_configured_ones_else_the_environments(plan):
    given = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5000"}
    planned = plan("hostfile=hosts", environment=given)
    assert planned.rendezvous == "10.0.0.7:5000"
    planned = plan("hostfile=hosts", "master-addr=10.0.0.8", "master-port=6000", environment=given)
    assert planned.rendezvous == "10.0.0.8:6000"
    assert plan(environment=given).rendezvous == "127.0.0.1:<a free port of localhost>"
    assert plan("hostfile=hosts").rendezvous == "<hostname -I on worker-0>:<a free port of worker-0>"


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_an_address_that_every_host_takes_for_itself_is_refused(plan, address):
    with pytest.raises(LaunchError, match=r"MASTER_ADDR: .* means another machine on every host"):
        plan("hostfile=hosts", environment={"MASTER_ADDR": address})
    with pytest.raises(LaunchError, match=r"master-addr: .* means another machine on every host"):
        plan("hostfile=hosts", f"master-addr='{address}'")


def test_a_port_of_the_environment_that_is_none_is_refused(plan):
    with pytest.raises(LaunchError, match="MASTER_PORT=ssh is no port"):
        plan("hostfile=hosts", environment={"MASTER_PORT": "ssh"})


def test_text_is_generated_by_the_first_workers_that_hold_one_copy(plan):
    planned = plan("hostfile=hosts", "model-parallel-size=2", program="generate")
    assert planned.world.hosts == (Host("worker-0", (0,)), Host("worker-1", (0,)))


def test_devices_are_explained(plan):
    assert plan(gpus=0).devices == ""
    own = plan(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert own.devices == "slot i is the i-th of CUDA_VISIBLE_DEVICES=6,7"
    others = plan("hostfile=hosts", environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert others.devices.endswith("of its own CUDA_VISIBLE_DEVICES; that of this machine stays here")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def hidden(folder, monkeypatch):
    """Secrets in the environment and in its file."""
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "s3cret-1")
    (folder / ".deepspeed_env").write_text("WANDB_API_KEY=s3cret-2\nPLAIN=seen\n")


def test_a_dry_run_shows_hosts_commands_and_no_secret(minimal, hidden):
    result = run("--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh", "--dry-run")
    # It lacks data.
    assert result.exit_code == 2
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "worker-1 ranks 1 to 2, slots 0, 1" in lines
    assert "started by ssh" in lines
    assert "hosts from hostfile hosts" in lines
    (environment,) = [line for line in lines if line.startswith("environment")]
    assert "PLAIN=seen" in environment
    assert "'WANDB_API_KEY=(hidden)'" in environment
    assert "s3cret" not in result.output
    commands = [line for line in lines if line.startswith("ssh ")]
    assert len(commands) == 3
    assert all("neox_launcher.node" in command for command in commands)
    assert lines.count("# gets the launch's secret on its standard input:") == 3


def test_a_dry_run_for_programs_is_json(minimal, hidden):
    result = run("--config", minimal, "--set", "hostfile=hosts", "--dry-run=json")
    content = json.loads(result.stdout)
    assert content["hosts"][1] == {"name": "worker-1", "node": 1, "slots": [0, 1], "ranks": [1, 2]}
    assert (content["launcher"], content["world_size"]) == ("pdsh", 4)
    assert (content["master_addr"], content["master_port"]) == (None, None)
    assert content["environment"]["WANDB_API_KEY"] == "(hidden)"
    (command,) = content["commands"]
    assert command["argv"][:8] == ["pdsh", "-R", "exec", "-S", "-N", "-f", "3", "-w"]
    assert command["files"] == {"<a private folder>/token": "(hidden)"}
    assert any("data-path" in hindrance for hindrance in content["hindrances"])
    assert "s3cret" not in result.output


def test_a_secret_of_the_configuration_travels_as_a_variable_and_is_never_shown(minimal, plan, folder):
    key = "comet={enabled: true, api_key: s3cret-3}"
    orders = plan(key).orders()
    assert orders.environment == {"COMET_API_KEY": "s3cret-3"}
    assert decode_resolved(orders.resolved).config.monitors.comet.api_key is None
    for form in ("text", "json"):
        result = run("--config", minimal, "--set", key, f"--dry-run={form}")
        assert "COMET_API_KEY" in result.stdout
        assert "s3cret" not in result.output


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_bare_dry_run_takes_no_subcommand_for_its_value(minimal, place):
    words = ["--config", minimal, "--dry-run"]
    words = [*words, "evaluate"] if place == "before" else ["evaluate", *words]
    assert "python -m neox_model.evaluate" in run(*words).stdout


def test_other_ways_of_a_dry_run_are_told(minimal):
    result = run("--config", minimal, "--dry-run=yaml")
    assert result.exit_code == 2
    assert "'yaml' is not one of 'text', 'json'" in result.stderr


def test_a_dry_run_touches_no_host_and_resolves_no_name(minimal, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(launch, "supervise", never)
    monkeypatch.setattr(launch, "unresolved_names", never)
    hosts = ("--set", "hostfile=hosts")
    for form in ("text", "json"):
        assert "neox_launcher.node" in run("--config", minimal, *hosts, f"--dry-run={form}").stdout


def test_many_hosts_are_shown_in_short_and_told_in_full(minimal, folder):
    (folder / "hosts").write_text("".join(f"n{number:04} slots=8\n" for number in range(1000)))
    options = ["--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh"]
    text = " ".join(run(*options, "--dry-run").stdout.split())
    assert "workers 8,000 on 1,000 hosts, one per slot" in text
    assert "... 968 more; all of them: --dry-run=json" in text
    assert "... and 968 more of the same" in text
    content = json.loads(run(*options, "--dry-run=json").stdout)
    assert len(content["hosts"]) == len(content["commands"]) == 1000
    assert content["hosts"][-1]["ranks"] == list(range(7992, 8000))


def test_options_before_and_after_a_subcommand_count(minimal):
    options = ["--bind-cores", "--max-restarts", "2"]
    content = json.loads(run(*options, "--config", minimal, "evaluate", "--dry-run=json").stdout)
    assert (content["bind_cores"], content["max_restarts"]) == (True, 2)
    content = json.loads(run("--config", minimal, "evaluate", *options, "--dry-run=json").stdout)
    assert (content["bind_cores"], content["max_restarts"]) == (True, 2)


def test_a_folder_that_is_gone_is_told(minimal, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run("--config", minimal, "--dry-run")
    assert (result.exit_code, result.stderr.split(";")[0]) == (
        2,
        "the folder that this was started in is gone",
    )


def test_a_name_that_leads_nowhere_is_told_before_the_start(minimal, monkeypatch):
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(launch, "find_hindrances", lambda plan: [])
    monkeypatch.setattr(launch, "unresolved_names", lambda names: list(names)[1:])
    monkeypatch.setattr(type(launch.BACKENDS["ssh"]), "missing", lambda self: None)
    result = run("--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh")
    assert result.exit_code == 2
    assert result.stderr.startswith("hostfile hosts: worker-1, worker-2 cannot be resolved here")
