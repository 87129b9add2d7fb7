"""The exact command of every backend, and its reasons for refusing."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from neox_config.errors import ConfigError
from neox_config.schema.config import parameter_named
from neox_config.schema.sections.launch import MPI_LAUNCHERS
from neox_launcher.backends import BACKENDS, Contact, base
from neox_launcher.backends.mpi import Flavour, flavour_of
from neox_launcher.backends.pdsh import _SSH
from neox_launcher.plan.planning import Request, plan_launch
from support.refusals import refused

CONTACT = Contact(addresses=("10.0.0.9", "fd00::9"), port=4321, token="s3cret", folder="/run/x y")
HOSTS = "zeta slots=1\nalpha slots=2\nmiddle slots=1\n"
AGENT = ["/venv/bin/python", "-P", "-m", "neox_launcher.agent", "--launcher", "10.0.0.9,fd00::9:4321"]
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
    """Return a function `plan(launcher, hosts=..., name=value ...)` that plans over several hosts."""
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
    """Return `programs(mpirun=Flavour.OPEN_MPI, ...)`, which puts only these on PATH, with --version."""
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


def test_local_starts_the_agent_with_the_token_in_its_environment(plan):
    command = only(plan("pdsh", hosts="localhost slots=3"))
    assert list(command.argv) == [*AGENT, "--host-number", "0"]
    assert (command.stdin, command.environment) == ("", {"NEOX_TOKEN": "s3cret"})
    assert command.host_number == 0


def test_ssh_starts_one_command_for_each_host(plan):
    found = commands(plan("ssh", "launcher-args=-p 2222 -i 'my key'"))
    options = ["-p", "2222", "-i", "my key", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert [list(command.argv) for command in found] == [
        ["ssh", *options, name, shlex.join([*AGENT, "--host-number", str(number)])]
        for number, name in enumerate(["zeta", "alpha", "middle"])
    ]
    assert [command.host_number for command in found] == [0, 1, 2]
    assert {command.stdin for command in found} == {"s3cret\n"}


def test_pdsh_starts_all_hosts_at_once(plan):
    command = only(plan("pdsh", "launcher-args=-t 5"))
    assert list(command.argv) == [
        *shlex.split("pdsh -R exec -S -N -f 3 -w '^/run/x y/hosts' -t 5"),
        *("sh", "-c", _SSH),
        *("/run/x y/token", "/run/x y/given-up-%n"),
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "%h"),
        shlex.join([*AGENT, "--host-number"]) + " %n",
    ]
    assert command.files == {"/run/x y/hosts": "zeta\nalpha\nmiddle\n", "/run/x y/token": "s3cret\n"}
    assert command.environment == {"WCOLL": "/run/x y/hosts"}


def test_pdsh_gets_a_path_with_a_comma_in_the_environment_alone(plan):
    contact = replace(CONTACT, folder="/run/x,y")
    (command,) = BACKENDS["pdsh"].commands(plan("pdsh"), contact)
    assert "-w" not in command.argv
    assert command.environment == {"WCOLL": "/run/x,y/hosts"}


def test_pdsh_reaches_more_hosts_than_it_starts_by_itself(plan):
    command = only(plan("pdsh", hosts="".join(f"n{number} slots=1\n" for number in range(100))))
    assert command.argv[command.argv.index("-f") + 1] == "100"


def test_openmpi_gives_each_rank_a_line_of_the_host_file(plan, programs):
    folder = programs(mpirun=Flavour.OPEN_MPI)
    command = only(plan("openmpi", "launcher-args=--mca btl tcp,self"))

    assert list(command.argv) == [
        *(f"{folder}/mpirun", "--oversubscribe", "--mca", "btl", "tcp,self"),
        *("-n", "4", "--hostfile", "/run/x y/hosts", "--map-by", "seq", "--bind-to", "none"),
        *("-x", "NEOX_TOKEN", *AGENT, "--mpi"),
    ]
    assert command.files == {"/run/x y/hosts": "zeta\nalpha\nalpha\nmiddle\n"}
    assert command.environment == {"NEOX_TOKEN": "s3cret"}


def test_openmpi_does_not_look_up_the_lines_of_one_host(plan, programs):
    programs(mpirun=Flavour.OPEN_MPI)
    command = only(plan("openmpi", hosts="alpha slots=3"))
    assert command.argv[command.argv.index("--map-by") + 1] == "slot"
    assert list(command.files.values()) == ["alpha\nalpha\nalpha\n"]


def test_hydra_gives_ranks_by_the_machine_file(plan, programs):
    folder = programs(mpiexec_hydra=Flavour.HYDRA)
    command = only(plan("mpich", "launcher-args=-iface ib0"))
    assert list(command.argv) == [
        *(f"{folder}/mpiexec.hydra", "-machinefile", "/run/x y/machines", "-n", "4"),
        *("-genvlist", "NEOX_TOKEN,I_MPI_PIN", "-iface", "ib0"),
        *(*AGENT, "--mpi"),
    ]
    assert command.files == {"/run/x y/machines": MACHINES}
    assert command.environment == {"NEOX_TOKEN": "s3cret", "I_MPI_PIN": "0"}


def test_mpirun_rsh_gets_the_token_in_a_file(plan, programs):
    """According to its user guide: mpirun_rsh -np N -hostfile FILE [NAME=VALUE ...] PROGRAM ARGUMENTS."""
    folder = programs(mpirun_rsh=Flavour.MPIRUN_RSH, mpiexec_hydra=Flavour.HYDRA)
    command = only(plan("mvapich", "launcher-args=-show"))
    assert list(command.argv) == [
        *(f"{folder}/mpirun_rsh", "-ssh", "-np", "4", "-hostfile", "/run/x y/machines", "-show"),
        "MV2_ENABLE_AFFINITY=0",
        *(*AGENT, "--mpi", "--token-file", "/run/x y/token"),
    ]
    assert command.files == {"/run/x y/machines": MACHINES, "/run/x y/token": "s3cret\n"}
    assert command.environment == {}


def test_a_newer_mvapich_uses_hydra(plan, programs):
    folder = programs(mpiexec=Flavour.HYDRA)
    command = only(plan("mvapich"))
    assert command.argv[0] == f"{folder}/mpiexec"
    assert command.files == {"/run/x y/machines": MACHINES}


def test_slurm_starts_one_task_on_each_host(plan):
    command = only(plan("slurm", "launcher-args=--partition gpu"))
    assert list(command.argv) == [
        *("srun", "--nodelist=/run/x y/hosts", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"),
        *("--cpu-bind=none", "--mem=0", "--overlap"),
        *("--export=ALL", "--kill-on-bad-exit=0", "--wait=0"),
        *("--partition", "gpu", *AGENT, "--slurm"),
    ]
    assert command.files == {"/run/x y/hosts": "zeta\nalpha\nmiddle\n"}
    assert command.environment == {"NEOX_TOKEN": "s3cret"}


def test_slurm_gets_comment_and_account(plan):
    command = only(plan("slurm", "comment=a b", "account=c"))
    assert {"--comment=a b", "--account=c"} <= set(command.argv)
    assert not any("a b" in word for word in only(plan("pdsh", "comment=a b")).argv)


SETUP = "module load cuda; source 'my venv/bin/activate'"
PREFIX = "apptainer exec --nv 'my image.sif'"


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "openmpi", "mpich"])
def test_the_setup_and_the_prefix_precede_the_agent(plan, programs, launcher):
    programs(mpirun=Flavour.OPEN_MPI, mpiexec=Flavour.HYDRA)
    command = commands(plan(launcher, f'remote-setup="{SETUP}"', f'remote-prefix="{PREFIX}"'))[-1]
    words = shlex.split(command.argv[-1]) if launcher == "ssh" else list(command.argv)
    start = len(words) - words[::-1].index("bash") - 1
    inside = ["apptainer", "exec", "--nv", "my image.sif", *AGENT]
    assert words[start : start + 5] == ["bash", "-l", "-c", base._SETUP, SETUP]
    assert words[start + 5 : start + 5 + len(inside)] == inside


def test_the_setup_is_for_other_hosts(plan):
    command = only(plan("pdsh", f'remote-setup="{SETUP}"', "remote-prefix=x", hosts="localhost slots=1"))
    assert list(command.argv) == [*AGENT, "--host-number", "0"]


def test_mpirun_rsh_refuses_what_it_would_split(plan, programs):
    programs(mpirun_rsh=Flavour.MPIRUN_RSH)
    assert "mpirun_rsh splits" in BACKENDS["mvapich"].refuses(plan("mvapich", "remote-prefix=x"))
    assert BACKENDS["mvapich"].refuses(plan("mvapich")) is None


def test_a_prefix_with_an_open_quote_is_refused(plan):
    with refused(ConfigError, "split into words"):
        plan("ssh", 'remote-prefix="docker exec \'x"')


@pytest.mark.parametrize("launcher", BACKENDS)
def test_the_token_is_not_on_command_lines_or_in_the_text_of_commands(plan, launcher):
    hosts = "localhost slots=1" if launcher == "local" else HOSTS
    for command in commands(plan(launcher, hosts=hosts)):
        assert not any("s3cret" in word for word in command.argv)
    assert "s3cret" not in repr(CONTACT)


@pytest.mark.parametrize("launcher", sorted(set(BACKENDS) - {"local"}))
def test_a_missing_program_is_reported_with_its_package(plan, programs, launcher):
    programs()
    missing = BACKENDS[launcher].missing()
    assert missing.startswith(f"launcher: {launcher} requires ")
    assert "on PATH" in missing
    assert "package" in missing


@pytest.mark.parametrize("name", ["torch", "neox_model"])
def test_what_trains_is_missing_with_the_command_that_installs_it(monkeypatch, name):
    from neox_launcher.backends import local

    monkeypatch.setattr(local.importlib.util, "find_spec", lambda package: None if package == name else name)
    missing = BACKENDS["local"].missing()
    assert missing.startswith(f"{name.replace('_', '-')} is not installed here; ")
    assert "pip install ./packages/neox-{launcher,data,kernels,model}" in missing


@pytest.mark.parametrize(
    ("launcher", "name", "flavour"),
    [
        ("openmpi", "mpirun", Flavour.HYDRA),
        ("openmpi", "mpirun", Flavour.UNKNOWN),
        ("mpich", "mpirun", Flavour.OPEN_MPI),
        ("mvapich", "mpiexec", Flavour.OPEN_MPI),
    ],
)
def test_the_wrong_mpi_is_reported(programs, launcher, name, flavour):
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


def test_srun_requires_an_allocation(programs, monkeypatch):
    programs(srun=Flavour.UNKNOWN)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    assert "Slurm allocation" in BACKENDS["slurm"].missing()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert BACKENDS["slurm"].missing() is None


@pytest.mark.parametrize("launcher", sorted(set(BACKENDS) - {"local"}))
def test_ipv6_addresses_are_refused_by_tools_that_cannot_parse_them(plan, launcher):
    refusal = BACKENDS[launcher].refuses(plan(launcher, hosts="fd00::1 slots=1\nb slots=1"))
    assert (refusal is None) == (launcher == "ssh")
    assert BACKENDS[launcher].refuses(plan(launcher)) is None


def test_the_ssh_of_pdsh_uses_its_variable_and_reports_a_failure(tmp_path):
    (tmp_path / "ssh").write_text('#!/bin/sh\nprintf "<%s>" "$@"; cat; exit 7\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "token").write_text("s3cret")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PDSH_SSH_ARGS_APPEND": "-p 2222 -o A=*"}
    words = ["sh", "-c", _SSH, tmp_path / "token", tmp_path / "failed", "host", "a b"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("<-p><2222><-o><A=*><host><a b>s3cret", 7)
    assert (tmp_path / "failed").exists()


def test_pdsh_reports_a_failed_host_before_all_have_ended(plan, tmp_path):
    """Check it because pdsh itself waits for all hosts, and the others would wait for the failed one."""
    contact = replace(CONTACT, folder=str(tmp_path))
    (command,) = BACKENDS["pdsh"].commands(plan("pdsh"), contact)
    assert not command.has_given_up(1)
    (tmp_path / "given-up-1").touch()
    assert [command.has_given_up(number) for number in range(3)] == [False, True, False]


LONG_NAMES = [f"gpu-node-{number:05}.rack-{number // 40:03}.research.example.org" for number in range(10_000)]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mpich", "mvapich", "slurm"])
def test_names_of_10_000_hosts_are_in_a_file_and_not_on_the_command_line(plan, programs, launcher):
    programs(mpirun=Flavour.OPEN_MPI, mpiexec_hydra=Flavour.HYDRA, mpirun_rsh=Flavour.MPIRUN_RSH)
    command = only(plan(launcher, hosts="".join(f"{name} slots=2\n" for name in LONG_NAMES)))
    assert not any(LONG_NAMES[0] in word for word in command.argv)
    assert sum(map(len, command.argv)) < 2_000
    (listed,) = [text for path, text in command.files.items() if not path.endswith("token")]
    names = [line.partition(":")[0] for line in listed.splitlines()]
    assert list(dict.fromkeys(names)) == LONG_NAMES


def test_pdsh_reads_10_000_hosts_from_its_file(plan, tmp_path):
    """A pdsh of the test prints every host of the file and its index, as -R exec would run it."""
    (tmp_path / "pdsh").write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "for number, name in enumerate(open(os.environ['WCOLL']).read().splitlines()):\n"
        "    print(name, sys.argv[-1].rpartition(' ')[2].replace('%n', str(number)))\n"
    )
    (tmp_path / "pdsh").chmod(0o755)
    folder = tmp_path / "a folder"
    folder.mkdir()
    big = plan("pdsh", hosts="".join(f"{name} slots=2\n" for name in LONG_NAMES))
    (command,) = BACKENDS["pdsh"].commands(big, replace(CONTACT, folder=str(folder)))
    for path, text in command.files.items():
        Path(path).write_text(text)
    words = [str(tmp_path / "pdsh"), *command.argv[1:]]
    done = subprocess.run(words, env=command.environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} {number}" for number, name in enumerate(LONG_NAMES)]
