"""Processes that a scheduler starts once per host are recognized by its variables."""

import pytest

from neox_config.errors import LaunchError
from neox_launcher.plan.planning import Request, plan_launch
from neox_launcher.plan.scheduler import find_member
from support.refusals import refused, shows

TOKEN = "0123456789abcdef" * 4
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "2"}
TRAIN_JOB = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n[3-5]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def member(environment, **changes):
    return find_member({**environment, "NEOX_TOKEN": TOKEN, **changes})


def test_a_pod_of_a_pytorchjob_is_a_host():
    found = member(PYTORCH_JOB)
    assert (found.rank, found.names) == (2, ("host-0", "host-1", "host-2", "host-3"))
    assert (found.address, found.port, found.token) == ("job-master-0", 23456, TOKEN)
    assert (found.name, found.launches) == ("host-2", False)
    assert member(PYTORCH_JOB, RANK="0").launches


def test_variables_that_count_hosts_come_before_those_that_may_count_workers():
    found = member(TRAIN_JOB | PYTORCH_JOB | {"WORLD_SIZE": "24", "RANK": "1"})
    assert (found.rank, len(found.names), found.address, found.port) == (1, 3, "job-node-0-0.job", 29400)


def test_a_task_of_srun_is_a_host_of_the_step():
    found = member(SRUN)
    assert (found.rank, found.names, found.name) == (2, ("n3", "n4", "n5"), "n5")
    assert (found.address, found.port) == ("n3", 20_000 + 123457 % 10_000)
    assert member(SRUN, MASTER_ADDR="n3-ib", MASTER_PORT="7000").address == "n3-ib"
    assert member(SRUN, MASTER_ADDR="n3-ib", MASTER_PORT="7000").port == 7000


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        # A batch script: started once in an allocation of several tasks.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"},
        # srun --pty bash: a shell, from which a user starts one process.
        SRUN | {"SLURM_PTY_PORT": "4711"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        # Exported by hand in a batch script.
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "WORLD_SIZE": "16"},
    ],
)
def test_a_single_process_launches_as_usual(environment):
    assert find_member(environment) is None


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (PYTORCH_JOB | {"LOCAL_WORLD_SIZE": "2"}, "start it once, or once per host"),
        (PYTORCH_JOB | {"LOCAL_RANK": "1"}, "start it once, or once per host"),
        (PYTORCH_JOB | {"TORCHELASTIC_RUN_ID": "x"}, "run neox-launch instead of torchrun"),
        (PYTORCH_JOB | {"MASTER_ADDR": ""}, "MASTER_ADDR, the address of process 0, is not set"),
        (PYTORCH_JOB | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port number"),
        (PYTORCH_JOB | {"RANK": "4"}, "which cannot be right"),
        (PYTORCH_JOB | {"NEOX_TOKEN": ""}, "NEOX_TOKEN is not set"),
        (PYTORCH_JOB | {"NEOX_TOKEN": "secret"}, "NEOX_TOKEN has fewer than 32 ASCII characters"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "24"}, "srun --ntasks-per-node=1"),
        (SRUN | {"SLURM_LOCALID": "3"}, "srun --ntasks-per-node=1"),
        (SRUN | {"SLURM_STEP_NODELIST": "n[3-9]"}, "but lists 7 hosts"),
        ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job:29400"}, "remove elasticPolicy"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}, "set launcher: openmpi"),
    ],
)
def test_processes_that_cannot_join_are_refused(environment, sentence):
    with pytest.raises(LaunchError) as caught:
        find_member({"NEOX_TOKEN": TOKEN} | environment)
    assert sentence in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.fixture
def plan(minimal, tmp_path, monkeypatch):
    """Return a function `plan(environment, "name=value", ..., gpus=...)`."""
    monkeypatch.chdir(tmp_path)

    def build(environment, *overrides, gpus=0, program="train"):
        request = Request(program=program, paths=(str(minimal),), overrides=overrides)
        return plan_launch(request, gpus=gpus, environment={"NEOX_TOKEN": TOKEN, **environment})

    return build


def test_all_processes_plan_one_job(plan):
    plans = [plan(PYTORCH_JOB | {"RANK": str(rank)}, gpus=8) for rank in range(4)]
    assert {planned.world for planned in plans} == {plans[0].world}
    assert plans[0].world.size == 32
    assert [planned.this_host for planned in plans] == [0, 1, 2, 3]
    assert plans[0].master_addr == "job-master-0"
    # MASTER_PORT is that of the launcher; rank 0 takes a free one.
    assert plans[0].master_port == 0
    assert shows(plans[0].describe(), "0 listens", "job-master-0:23456")
    assert TOKEN not in plans[0].describe()


def test_a_loopback_address_of_process_0_is_not_sent_to_the_others(plan):
    assert plan(PYTORCH_JOB | {"RANK": "0", "MASTER_ADDR": "localhost"}).master_addr is None


def test_the_address_of_process_0_is_not_that_of_another_first_host(plan):
    assert plan(SRUN, "exclude=n3", gpus=1).master_addr is None
    assert plan(SRUN, "exclude=n4", gpus=1).master_addr == "n3"


def test_hosts_that_the_job_does_not_use_are_known(plan):
    planned = plan(SRUN, "num-nodes=2", "num-gpus=2", gpus=4)
    assert [(host.name, host.slots) for host in planned.world.hosts] == [("n3", (0, 1)), ("n4", (0, 1))]
    assert planned.this_host is None


@pytest.mark.parametrize(
    "setting",
    [
        "hostfile=hosts",
        "deepspeed-mpi=true",
        "master-port=23456",
        "launcher-port=29400",
        "launcher-address=10.0.0.1",
    ],
)
def test_settings_for_another_way_to_start_are_refused(plan, setting):
    with refused(LaunchError, code="member-of-a-job"):
        plan(PYTORCH_JOB, setting)
