"""Plans: hosts, ranks, addresses and variables, and their output."""

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from neox_config import decode_resolved
from neox_config.errors import ConfigError, HostfileError, LaunchError
from neox_launcher.cli.launch import main
from neox_launcher.controller import launch
from neox_launcher.plan.plan import ANY_ENDPOINT, Endpoint
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.resources import hosts as hosts_module
from neox_launcher.resources.host import Host
from neox_launcher.resources.names import CheckedNames
from support.refusals import refused, shows

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "2", "SLURM_JOB_ID": "77"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Create a working directory with a hostfile, and hide the default hostfile of a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hosts_module, "DEFAULT_HOSTFILE", tmp_path / "job" / "hostfile")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("worker-0 slots=1\nworker-1 slots=2\nworker-2 slots=1\n")
    return tmp_path


@pytest.fixture
def plan(minimal):
    """Return a function `plan("name=value", ..., program=..., gpus=..., environment=...)`."""

    def build(*overrides, program="train", gpus=0, environment=None):
        request = Request(program=program, paths=(str(minimal),), overrides=overrides)
        return plan_launch(request, gpus=gpus, environment=environment or {})

    return build


def test_ranks_follow_the_order_of_hosts_and_slots(plan):
    planned = plan("hostfile=hosts", "exclude=worker-1:0")
    assert [(host.name, host.slots, list(ranks)) for host, ranks in planned.world.with_ranks()] == [
        ("worker-0", (0,), [0]),
        ("worker-1", (1,), [1]),
        ("worker-2", (0,), [2]),
    ]
    assert planned.resolved.run.layout.world == 3
    assert planned.resolved.run.layout.hosts == 3


def test_a_missing_hostfile_is_refused(plan):
    with pytest.raises(ConfigError) as caught:
        plan("hostfile=absent", "launcher=slurm", "train-batch-size=3", program="doctor")
    assert [problem.name for problem in caught.value.problems] == ["hostfile"]


def test_the_orders_are_complete(plan, folder):
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


def test_a_job_on_this_machine_uses_the_local_backend(plan):
    assert plan().launcher == "local"
    assert plan("launcher=slurm", environment=SLURM).launcher == "slurm"
    (Path("hosts")).write_text(f"{socket.gethostname()} slots=2\n")
    planned = plan("hostfile=hosts", gpus=4)
    assert (planned.launcher, planned.world.size, planned.world.gpus) == ("local", 2, 4)
    assert planned.master_addr == "127.0.0.1"


def test_a_job_with_another_host_uses_the_configured_launcher(plan):
    planned = plan("hostfile=hosts", "include=worker-1", gpus=4)
    assert (planned.launcher, planned.world.gpus, planned.master_addr) == ("pdsh", None, None)


def test_this_machine_under_two_names_is_refused(plan):
    Path("hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    with refused(HostfileError, "127.0.0.1", code="one-machine-twice"):
        plan("hostfile=hosts")


def test_local_with_another_host_is_refused(plan):
    with refused(ConfigError, "worker-0"):
        plan("hostfile=hosts", "launcher=local")


def test_deepspeed_mpi_takes_an_mpi_on_one_host_too(plan):
    assert plan("deepspeed-mpi=true").launcher == "openmpi"
    assert plan("deepspeed-mpi=true", "launcher=mpich", "hostfile=hosts").launcher == "mpich"


def test_hostfiles_are_found_in_the_documented_order(plan, folder):
    (folder / "other").write_text("named slots=1\n")
    (folder / "job").mkdir()
    (folder / "job" / "hostfile").write_text("default slots=1\n")
    named = {"DLTS_HOSTFILE": str(folder / "other")}
    assert plan("hostfile=hosts", environment=named).world.hosts[0].name == "worker-0"
    assert plan(environment=named).world.hosts[0].name == "named"
    assert plan().world.hosts[0].name == "default"
    assert plan("launcher=slurm", environment=SLURM).world.hosts[0].name == "default"


def test_a_default_hostfile_that_cannot_be_read_is_refused(plan, folder):
    """A folder stands for a file without read permission: root could read it."""
    (folder / "job" / "hostfile").mkdir(parents=True)
    with refused(HostfileError, "job/hostfile", code="not-readable"):
        plan()
    assert plan("launcher=local").is_local


def test_launcher_local_ignores_other_hostfiles(plan, folder):
    (folder / "job").mkdir()
    (folder / "job" / "hostfile").write_text("default slots=1\n")
    planned = plan("launcher=local", "num-gpus=2", environment={"DLTS_HOSTFILE": "hosts"})
    assert (planned.launcher, planned.world.hosts) == ("local", (Host("localhost", (0, 1)),))


def test_hosts_are_taken_from_the_slurm_allocation(plan):
    planned = plan("launcher=slurm", "exclude=n1:1", environment=SLURM)
    assert planned.world.hosts == (Host("n1", (0,)), Host("n2", (0, 1)))
    assert planned.hosts_from == "Slurm allocation 77"
    with refused(HostfileError, "--num-nodes", "--num-gpus", code="no-allocation"):
        plan("launcher=slurm")


def test_a_future_allocation_can_be_planned_but_not_started(plan, monkeypatch):
    planned = plan("launcher=slurm", "num-nodes=2", "num-gpus=4")
    names = ["<host 1 of the allocation>", "<host 2 of the allocation>"]
    assert planned.world.hosts == tuple(Host(name, (0, 1, 2, 3)) for name in names)
    assert shows(planned.hosts_from, "future Slurm allocation")
    assert planned.rendezvous.startswith("<hostname -I on host 1 of the allocation>:")
    monkeypatch.setattr("neox_launcher.backends.slurm.shutil.which", lambda program: program)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    reason = launch.BACKENDS["slurm"].missing()
    assert shows(reason, "neox-launch inside sbatch")
    with refused(HostfileError, "--num-gpus", "--dry-run", code="no-allocation"):
        plan("launcher=slurm", "num-nodes=2")


def test_all_that_is_missing_on_this_machine_is_reported_at_once(plan):
    settings = ("model-parallel-size=2", "distributed-backend=nccl", "vocab-file=absent.json")
    with pytest.raises(ConfigError) as refusal:
        plan(*settings, gpus=0)
    found = {problem.name: problem for problem in refusal.value.problems}
    assert {"model_parallel_size", "distributed_backend", "vocab_file"} <= found.keys()
    assert found["model_parallel_size"].remedy == "use 1"


def test_an_unused_allocation_is_mentioned(plan):
    assert "launcher: slurm to" in plan(environment=SLURM).hosts_from


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("include=worker-9", "include: worker-9\n    names worker-9, which is not among the hosts"),
        ("num-nodes=4", "num-nodes: 4\n    is more than the 3 hosts available"),
        ("num-gpus=2", "num-gpus: 2\n    is more than the 1 slot of worker-0"),
    ],
)
def test_an_invalid_selection_is_reported_with_its_location(plan, override, sentence):
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
    assert shows(plan(environment=given).rendezvous, "127.0.0.1:<a free port")
    assert shows(plan("hostfile=hosts").rendezvous, "worker-0>:<a", "worker-0>")


UNREACHABLE = {
    "127.0.0.1": "is a loopback address",
    "127.8.0.1": "is a loopback address",
    "::1": "is a loopback address",
    "localhost": "is this machine for every host",
    "Localhost.localdomain": "is this machine for every host",
    "0.0.0.0": "is not the address of a host",
    "::": "is not the address of a host",
    "224.0.0.1": "is not the address of a host",
    "255.255.255.255": "is not the address of a host",
    "10.0.0.256": "is neither a host name nor an address",
    "10.0.7": "is neither a host name nor an address",
    "worker-0:29500": "is neither a host name nor an address",
    "tcp://worker-0": "is neither a host name nor an address",
    "the first one": "is neither a host name nor an address",
    "w" * 5000 + " ": "is neither a host name nor an address",
}


@pytest.mark.parametrize("address", UNREACHABLE)
def test_an_address_that_other_hosts_cannot_reach_is_refused(plan, address):
    with refused(LaunchError, "MASTER_ADDR=", code="loopback") as found:
        plan("hostfile=hosts", environment={"MASTER_ADDR": address})
    assert UNREACHABLE[address] in str(found.value)
    with refused(ConfigError, "1 problem", "--set master-addr") as found:
        plan("hostfile=hosts", f"master-addr='{address}'")
    assert UNREACHABLE[address] in str(found.value)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_address_of_the_launcher_is_refused_for_other_hosts(plan, address):
    with refused(ConfigError, "launcher-address"):
        plan("hostfile=hosts", f"launcher-address='{address}'")
    assert plan(f"launcher-address='{address}'").is_local


def test_agents_connect_to_the_configured_address_and_port(plan):
    planned = plan("hostfile=hosts", "launcher-address=10.0.0.9", "launcher-port=29400")
    assert planned.endpoint == Endpoint(address="10.0.0.9", port=29400)
    assert plan("hostfile=hosts").endpoint == ANY_ENDPOINT


@pytest.mark.parametrize(
    "address", ["240.0.0.7", "64:ff9b::a00:1", "::ffff:10.0.0.1", "fe80::1%eth0", "n-1_a"]
)
def test_other_addresses_and_names_are_accepted_for_several_hosts(plan, address):
    assert plan("hostfile=hosts", f"master-addr='{address}'").master_addr == address


def test_a_loopback_address_is_accepted_for_one_host_and_nonsense_is_not(plan):
    assert plan("master-addr=localhost").master_addr == "localhost"
    with refused(ConfigError, "neither a host"):
        plan("master-addr='here, I think'")


@pytest.mark.parametrize("port", ["ssh", "65536", "-1", "\u00b2", "9" * 5000])
def test_an_invalid_port_in_the_environment_is_refused(plan, port):
    with refused(LaunchError, "MASTER_PORT=", code="no-port"):
        plan("hostfile=hosts", environment={"MASTER_PORT": port})


@pytest.mark.parametrize("setting", ["num-gpus", "num-nodes"])
def test_a_huge_number_is_refused_before_it_costs_memory(plan, setting):
    for number in (10**6, 10**12, 10**30):
        with refused(ConfigError, setting):
            plan(f"{setting}={number}")


def test_text_is_generated_by_the_first_workers_that_hold_one_copy(plan):
    planned = plan("hostfile=hosts", "model-parallel-size=2", program="generate")
    assert planned.world.hosts == (Host("worker-0", (0,)), Host("worker-1", (0,)))


def test_devices_are_explained(plan):
    assert plan(gpus=0).devices == ""
    own = plan(gpus=2, environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert shows(own.devices, "i-th", "CUDA_VISIBLE_DEVICES=6,7")
    others = plan("hostfile=hosts", environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    assert others.devices.endswith("; this machine's CUDA_VISIBLE_DEVICES is not passed on")


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
    assert shows(lines, "worker-1", "ranks 1", "2")
    assert "started by ssh" in lines
    assert "hosts from hostfile hosts".split() in map(str.split, lines)
    (environment,) = [line for line in lines if line.startswith("environment")]
    assert "PLAIN=seen" in environment
    assert "'WANDB_API_KEY=(hidden)'" in environment
    assert "s3cret" not in result.output
    commands = [line for line in lines if line.startswith("ssh ")]
    assert len(commands) == 3
    assert all("neox_launcher.agent" in command for command in commands)
    assert sum("its standard input" in line for line in lines) == 3


def test_a_dry_run_can_print_json(minimal, hidden):
    result = run("--config", minimal, "--set", "hostfile=hosts", "--dry-run=json")
    content = json.loads(result.stdout)
    assert content["hosts"][1] == {"name": "worker-1", "number": 1, "slots": [0, 1], "ranks": [1, 2]}
    assert (content["launcher"], content["world_size"]) == ("pdsh", 4)
    assert (content["master_addr"], content["master_port"]) == (None, None)
    assert content["environment"]["WANDB_API_KEY"] == "(hidden)"
    (command,) = content["commands"]
    assert command["argv"][:7] == ["pdsh", "-R", "exec", "-S", "-N", "-f", "3"]
    assert command["environment"] == {"WCOLL": "<a private folder>/hosts"}
    assert command["files"] == {
        "<a private folder>/hosts": "worker-0\nworker-1\nworker-2\n",
        "<a private folder>/token": "(hidden)",
    }
    assert any("data-path" in problem for problem in content["problems"])
    assert "s3cret" not in result.output


def test_a_secret_of_the_configuration_is_passed_as_a_variable_and_never_shown(minimal, plan, folder):
    key = "comet={enabled: true, api_key: s3cret-3}"
    orders = plan(key).orders()
    assert orders.environment == {"COMET_API_KEY": "s3cret-3"}
    assert decode_resolved(orders.resolved).config.monitors.comet.api_key is None
    for form in ("text", "json"):
        result = run("--config", minimal, "--set", key, f"--dry-run={form}")
        assert "COMET_API_KEY" in result.stdout
        assert "s3cret" not in result.output


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_bare_dry_run_does_not_take_a_subcommand_as_its_value(minimal, place):
    words = ["--config", minimal, "--dry-run"]
    words = [*words, "evaluate"] if place == "before" else ["evaluate", *words]
    assert "python -m neox_model.evaluate" in run(*words).stdout


def test_an_unknown_form_of_dry_run_is_refused(minimal):
    result = run("--config", minimal, "--dry-run=yaml")
    assert result.exit_code == 2
    assert shows(result.stderr, "'yaml'", "'text', 'json'")


def test_a_dry_run_contacts_no_host_and_resolves_no_name(minimal, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(launch, "supervise", never)
    monkeypatch.setattr(launch, "check_names", never)
    hosts = ("--set", "hostfile=hosts")
    for form in ("text", "json"):
        assert "neox_launcher.agent" in run("--config", minimal, *hosts, f"--dry-run={form}").stdout


def test_many_hosts_are_abbreviated_in_text_and_complete_in_json(minimal, folder):
    (folder / "hosts").write_text("".join(f"n{number:04} slots=8\n" for number in range(1000)))
    options = ["--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh"]
    text = " ".join(run(*options, "--dry-run").stdout.split())
    assert shows(text, "workers 8,000", "1,000 hosts")
    assert shows(text, "968 more", "--dry-run=json")
    assert "968 more commands" in text
    content = json.loads(run(*options, "--dry-run=json").stdout)
    assert len(content["hosts"]) == len(content["commands"]) == 1000
    assert content["hosts"][-1]["ranks"] == list(range(7992, 8000))


def test_options_before_and_after_a_subcommand_count(minimal):
    options = ["--bind-cores", "--max-restarts", "2"]
    content = json.loads(run(*options, "--config", minimal, "evaluate", "--dry-run=json").stdout)
    assert (content["bind_cores"], content["max_restarts"]) == (True, 2)
    content = json.loads(run("--config", minimal, "evaluate", *options, "--dry-run=json").stdout)
    assert (content["bind_cores"], content["max_restarts"]) == (True, 2)


def test_a_deleted_working_directory_is_reported(minimal, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run("--config", minimal, "--dry-run")
    assert result.exit_code == 2
    assert "working directory no" in result.stderr


def test_an_unresolvable_host_name_is_reported_before_the_start(minimal, monkeypatch):
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(launch, "preflight", lambda plan: [])
    checked = CheckedNames(unknown=("worker-1", "worker-2"), unchecked=())
    monkeypatch.setattr(launch, "check_names", lambda names, report: checked)
    monkeypatch.setattr(type(launch.BACKENDS["ssh"]), "missing", lambda self: None)
    result = run("--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh")
    assert result.exit_code == 2
    assert result.stderr.startswith("hostfile hosts: worker-1, worker-2 cannot be resolved here")


def test_a_long_list_of_unresolvable_names_is_cut(minimal, folder, monkeypatch):
    names = [f"n{number:05}" for number in range(10_000)]
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    monkeypatch.setattr(launch, "preflight", lambda plan: [])
    checked = CheckedNames(unknown=tuple(names), unchecked=())
    monkeypatch.setattr(launch, "check_names", lambda names, report: checked)
    monkeypatch.setattr(type(launch.BACKENDS["ssh"]), "missing", lambda self: None)
    result = run("--config", minimal, "--set", "hostfile=hosts", "--set", "launcher=ssh")
    assert result.exit_code == 2
    listed = ", ".join(names[:8])
    assert result.stderr.startswith(f"hostfile hosts: {listed} and 9,992 more cannot be resolved here")


def test_a_launch_says_how_far_the_resolver_is_and_starts_without_its_last_answers(monkeypatch, plan):
    checked = CheckedNames(unknown=(), unchecked=("worker-1",))

    def check(names, report):
        report(2)
        return checked

    monkeypatch.setattr(launch, "preflight", lambda plan: [])
    monkeypatch.setattr(launch, "check_names", check)
    said = []
    monkeypatch.setattr(launch, "print_message", said.append)
    monkeypatch.setattr(type(launch.BACKENDS["ssh"]), "missing", lambda self: None)
    launch.refuse_what_cannot_run(plan("hostfile=hosts", "launcher=ssh"))
    assert said == [
        "neox-launch: resolved 2 of 3 host names\n",
        "neox-launch: these host names were not resolved in time and are not checked before the start: "
        "worker-1\n",
    ]


@pytest.mark.parametrize("launcher", ["pdsh", "slurm"])
def test_a_dry_run_of_10_000_hosts_is_short(minimal, folder, launcher):
    names = [f"gpu-node-{number:05}.research.example.org" for number in range(10_000)]
    (folder / "hosts").write_text("".join(f"{name} slots=8\n" for name in names))
    options = ["--config", minimal, "--set", "hostfile=hosts", "--set", f"launcher={launcher}", "--dry-run"]
    text = run(*options).stdout
    assert len(text) < 20_000
    assert shows(text, "80,000", "10,000 hosts")
    assert shows(text, names[31], "9,968 more")
