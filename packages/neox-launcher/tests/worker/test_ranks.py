"""Ranks from the variables of torchrun and of each MPI."""

import pytest

from neox_config.errors import LaunchError
from neox_launcher.worker.ranks import read_mpi_rank, refuse_mpi_by_hand
from support.refusals import refused

STARTED_BY = {
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"},
    "MVAPICH": {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"},
    "hydra": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"},
    "Slurm": {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
    # What sbatch has set says nothing of the processes that mpirun starts in its script.
    "Open MPI under Slurm": {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
    },
}


@pytest.mark.parametrize("kind", STARTED_BY)
def test_the_rank_of_every_mpi_is_read(kind):
    assert read_mpi_rank(STARTED_BY[kind]) == 3


def test_the_number_of_ranks_may_be_missing():
    assert read_mpi_rank({"PMIX_RANK": "1"}) == 1


@pytest.mark.parametrize("environment", [{}, {"PMI_RANK": ""}, {"PMI_RANK": "x"}, {"RANK": "1"}])
def test_a_process_without_mpi_variables_is_refused(environment):
    with refused(LaunchError, "MPI", code="no-mpi"):
        read_mpi_rank(environment)


@pytest.mark.parametrize("kind", ["Open MPI", "MVAPICH", "hydra"])
def test_processes_started_directly_by_mpi_are_refused(kind):
    with refused(LaunchError, "4 processes", "deepspeed-mpi", code="mpi-by-hand"):
        refuse_mpi_by_hand(STARTED_BY[kind])
    refuse_mpi_by_hand(STARTED_BY[kind] | {"RANK": "3", "WORLD_SIZE": "4"})


def test_a_single_process_is_accepted_however_it_was_started():
    # A batch script knows how many tasks there are, and starts this once.
    for environment in ({}, STARTED_BY["Slurm"], {"PMI_RANK": "0", "PMI_SIZE": "1"}):
        refuse_mpi_by_hand(environment)
