"""The exact command of every backend, and when one says that it cannot work."""

import os
import shlex
import subprocess
from dataclasses import replace

import pytest

from neox_launcher.backends import BACKENDS, Contact
from neox_launcher.backends.mpi import Flavour, flavour_of
from neox_launcher.backends.pdsh import _SSH
from neox_launcher.config.schema import parameter_named
from neox_launcher.config.sections.launch import MPI_LAUNCHERS
from neox_launcher.launch import Request, plan_launch

CONTACT = Contact(addresses=("10.0.0.9", "fd00::9"), port=4321, token="s3cret", folder="/run/x y")
HOSTS = "zeta slots=1\nalpha slots=2\nmiddle slots=1\n"
NODE = ["/venv/bin/python", "-P", "-m", "neox_launcher.node", "--launcher", "10.0.0.9,fd00::9:4321"]
MACHINES = "zeta:1\nalpha:2\nmiddle:1\n"
VERSIONS = {
    Flavour.OPEN_MPI: "mpirun (Open MPI) 4.1.4",
    Flavour.HYDRA: "HYDRA build details:\n    Version: 4.0.2\n    Configure options: '--prefix=/usr'",
    Flavour.INTEL: "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307",
    Flavour.MPIRUN_RSH: "Version: mvapich2-2.3.7",
    Flavour.UNKNOWN: "0.1",
}


@pytest.fixture
def plan(minimal, tmp_path, monkeypatch):
    """plan(launcher, hosts=..., name=value ...): a plan over several hosts."""
    monkeypatch.chdir(tmp_path)

    def build(launcher, *overrides, hosts=HOSTS):
        (tmp_path / "hosts").write_text(hosts)
        request = Request(
            program="train",
            paths=(str(minimal),),
            overrides=(f"launcher={launcher}", "hostfile=hosts", *overrides),
        )
        return replace(plan_launch(request, environment={}), python="/venv/bin/python")

    return build


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """programs(mpirun=Flavour.OPEN_MPI, ...): the only programs on PATH, with what their --version says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(**found):
        for name, flavour in found.items():
            program = folder / name.replace("_hydra", ".hydra")
            # Nothing but the shell itself: PATH holds no other program.
            echo = 'while read -r line; do echo "$line"; done'
            program.write_text(f"#!/bin/sh\n{echo} <<'END'\n{VERSIONS[flavour]}\nEND\n")
            program.chmod(0o755)
        flavour_of.cache_clear()
        return folder

    return install


def commands(plan):
    return BACKENDS[plan.launcher].commands(plan, CONTACT)


def only(plan):
    (command,) = commands(plan)
    return command


def test_every_launcher_has_a_backend():
    assert set(parameter_named("launcher").choices) == set(BACKENDS)
    assert set(MPI_LAUNCHERS) < set(BACKENDS)


def test_local_starts_the_node_and_hands_it_the_token(plan):
    command = only(plan("pdsh", hosts="localhost slots=3"))
    assert list(command.argv) == [*NODE, "--node", "0"]
    assert (command.stdin, command.environment) == ("", {"NEOX_TOKEN": "s3cret"})
    assert command.node == 0


def test_ssh_starts_one_command_for_each_host(plan):
    found = commands(plan("ssh", "launcher-args=-p 2222 -i 'my key'"))
    options = ["-p", "2222", "-i", "my key", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert [list(command.argv) for command in found] == [
        ["ssh", *options, name, shlex.join([*NODE, "--node", str(node)])]
        for node, name in enumerate(["zeta", "alpha", "middle"])
    ]
    assert [command.node for command in found] == [0, 1, 2]
    assert {command.stdin for command in found} == {"s3cret\n"}


def test_pdsh_starts_all_hosts_at_once(plan):
    command = only(plan("pdsh", "launcher-args=-t 5"))
    assert list(command.argv) == [
        *shlex.split("pdsh -R exec -S -N -f 3 -w zeta,alpha,middle -t 5"),
        *("sh", "-c", _SSH),
        *("/run/x y/token", "/run/x y/given-up-%n"),
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "%h"),
        shlex.join([*NODE, "--node"]) + " %n",
    ]
    assert command.files == {"/run/x y/token": "s3cret\n"}


def test_pdsh_reaches_more_hosts_than_it_starts_by_itself(plan):
    command = only(plan("pdsh", hosts="".join(f"n{number} slots=1\n" for number in range(100))))
    assert command.argv[command.argv.index("-f") + 1] == "100"


def test_openmpi_gives_ranks_part_by_part(plan, programs):
    folder = programs(mpirun=Flavour.OPEN_MPI)
    command = only(plan("openmpi", "launcher-args=--mca btl tcp,self"))

    def part(count, host):
        options = ["-n", count, "--host", f"{host}:{count}", "--bind-to", "none", "-x", "NEOX_TOKEN"]
        return [*options, *NODE, "--mpi"]

    assert list(command.argv) == [
        *(f"{folder}/mpirun", "--oversubscribe", "--mca", "btl", "tcp,self"),
        *part("1", "zeta"),
        *(":", *part("2", "alpha")),
        *(":", *part("1", "middle")),
    ]
    assert command.environment == {"NEOX_TOKEN": "s3cret"}


def test_hydra_gives_ranks_by_the_machine_file(plan, programs):
    folder = programs(mpiexec_hydra=Flavour.HYDRA)
    command = only(plan("mpich", "launcher-args=-iface ib0"))
    assert list(command.argv) == [
        *(f"{folder}/mpiexec.hydra", "-machinefile", "/run/x y/machines", "-n", "4"),
        *("-genvlist", "NEOX_TOKEN,I_MPI_PIN", "-iface", "ib0"),
        *(*NODE, "--mpi"),
    ]
    assert command.files == {"/run/x y/machines": MACHINES}
    assert command.environment == {"NEOX_TOKEN": "s3cret", "I_MPI_PIN": "0"}


def test_mpirun_rsh_gets_the_token_in_a_file(plan, programs):
    """As its user guide has it: mpirun_rsh -np N -hostfile FILE [NAME=VALUE ...] PROGRAM ARGUMENTS."""
    folder = programs(mpirun_rsh=Flavour.MPIRUN_RSH, mpiexec_hydra=Flavour.HYDRA)
    command = only(plan("mvapich", "launcher-args=-show"))
    assert list(command.argv) == [
        *(f"{folder}/mpirun_rsh", "-ssh", "-np", "4", "-hostfile", "/run/x y/machines", "-show"),
        "MV2_ENABLE_AFFINITY=0",
        *(*NODE, "--mpi", "--token-file", "/run/x y/token"),
    ]
    assert command.files == {"/run/x y/machines": MACHINES, "/run/x y/token": "s3cret\n"}
    assert command.environment == {}


def test_a_newer_mvapich_comes_with_hydra(plan, programs):
    folder = programs(mpiexec=Flavour.HYDRA)
    command = only(plan("mvapich"))
    assert command.argv[0] == f"{folder}/mpiexec"
    assert command.files == {"/run/x y/machines": MACHINES}


def test_slurm_starts_one_task_on_each_host(plan):
    command = only(plan("slurm", "launcher-args=--partition gpu"))
    assert list(command.argv) == [
        *("srun", "--nodelist=zeta,alpha,middle", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"),
        *("--cpu-bind=none", "--mem=0", "--overlap"),
        *("--export=ALL", "--kill-on-bad-exit=0", "--wait=0"),
        *("--partition", "gpu", *NODE, "--slurm"),
    ]
    assert command.environment == {"NEOX_TOKEN": "s3cret"}


@pytest.mark.parametrize("launcher", BACKENDS)
def test_the_token_stands_on_no_command_line_and_in_no_text_of_a_command(plan, launcher):
    hosts = "localhost slots=1" if launcher == "local" else HOSTS
    for command in commands(plan(launcher, hosts=hosts)):
        assert not any("s3cret" in word for word in command.argv)
    assert "s3cret" not in repr(CONTACT)


@pytest.mark.parametrize("launcher", sorted(set(BACKENDS) - {"local"}))
def test_what_is_not_installed_is_named_with_its_package(plan, programs, launcher):
    programs()
    missing = BACKENDS[launcher].missing()
    assert missing.startswith(f"launcher: {launcher} needs ")
    assert "on PATH" in missing
    assert "package" in missing


@pytest.mark.parametrize(
    ("launcher", "name", "flavour"),
    [
        ("openmpi", "mpirun", Flavour.HYDRA),
        ("openmpi", "mpirun", Flavour.UNKNOWN),
        ("mpich", "mpirun", Flavour.OPEN_MPI),
        ("mvapich", "mpiexec", Flavour.OPEN_MPI),
    ],
)
def test_another_mpi_than_the_wanted_one_is_told(programs, launcher, name, flavour):
    programs(**{name: flavour})
    assert f"here is {flavour.value}" in BACKENDS[launcher].missing()


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("openmpi", {"mpirun": Flavour.HYDRA, "orterun": Flavour.OPEN_MPI}),
        ("mpich", {"mpiexec": Flavour.OPEN_MPI, "mpirun": Flavour.HYDRA}),
        ("mpich", {"mpiexec": Flavour.INTEL}),
        ("mvapich", {"mpirun_rsh": Flavour.MPIRUN_RSH}),
    ],
)
def test_the_right_mpi_is_found_among_several(programs, launcher, names):
    programs(**names)
    assert BACKENDS[launcher].missing() is None


def test_srun_alone_is_not_enough(programs, monkeypatch):
    programs(srun=Flavour.UNKNOWN)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    assert "works inside an allocation alone" in BACKENDS["slurm"].missing()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert BACKENDS["slurm"].missing() is None


@pytest.mark.parametrize("launcher", sorted(set(BACKENDS) - {"local"}))
def test_an_ipv6_address_goes_only_where_its_colons_are_understood(plan, launcher):
    refusal = BACKENDS[launcher].refuses(plan(launcher, hosts="fd00::1 slots=1\nb slots=1"))
    assert (refusal is None) == (launcher == "ssh")
    assert BACKENDS[launcher].refuses(plan(launcher)) is None


def test_the_ssh_of_pdsh_takes_the_variable_of_pdsh_and_tells_of_a_failure(tmp_path):
    (tmp_path / "ssh").write_text('#!/bin/sh\nprintf "<%s>" "$@"; cat; exit 7\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "token").write_text("s3cret")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PDSH_SSH_ARGS_APPEND": "-p 2222 -o A=*"}
    words = ["sh", "-c", _SSH, tmp_path / "token", tmp_path / "failed", "host", "a b"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("<-p><2222><-o><A=*><host><a b>s3cret", 7)
    assert (tmp_path / "failed").exists()


def test_pdsh_tells_of_one_host_before_all_have_ended(plan, tmp_path):
    """It would wait for the others, which wait for the one that never came."""
    contact = replace(CONTACT, folder=str(tmp_path))
    (command,) = BACKENDS["pdsh"].commands(plan("pdsh"), contact)
    assert not command.has_given_up(1)
    (tmp_path / "given-up-1").touch()
    assert [command.has_given_up(node) for node in range(3)] == [False, True, False]
