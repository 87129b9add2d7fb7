"""Gloo groups have one worker thread: two corrupt the memory of the process."""

import inspect
import subprocess
import sys

import pytest
import torch.distributed as dist

from neox_model.parallel.topology import create_groups
from neox_model.torch_compat import limit_gloo_threads
from support.distributed import run_ranks
from support.gloo import threads_of_gloo_groups

# With two threads, torch 2.13 to 2.15 die within seconds: each operation frees the name of the one before.
MANY_OPERATIONS = """
import torch
from torch import distributed
from neox_model.torch_compat import init_process_group

init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
group = distributed.new_group([0])
values, gathered = torch.ones(8), torch.zeros(8)
for _ in range(1000):
    for work in [group.allgather_into_tensor_coalesced([gathered], [values]) for _ in range(200)]:
        work.wait()
print(gathered.sum().item())
"""


def form_groups() -> list[list[int]]:
    """Count groups and threads with each further group, of which the last has two threads."""
    counts = [threads_of_gloo_groups()]
    handles = []

    def form_alone(*timeout: object, **settings: object) -> None:
        handles.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, *timeout, **settings))

    def options(threads: int) -> object:
        made = dist.ProcessGroupGloo._Options()
        made._devices = [dist.ProcessGroupGloo.create_default_device()]
        made._threads = threads
        return made

    def plant() -> None:
        limited = dist.ProcessGroupGloo.__init__
        dist.ProcessGroupGloo.__init__ = inspect.unwrap(limited)
        form_alone()
        dist.ProcessGroupGloo.__init__ = limited

    for form in (
        lambda: handles.append(dist.new_group([0, 1])),
        lambda: handles.append(dist.new_group([0])),
        lambda: handles.append(dist.init_device_mesh("cpu", (2, 1)).get_group(1)),
        limit_gloo_threads,
        form_alone,
        lambda: form_alone(dist.default_pg_timeout),
        lambda: form_alone(timeout=dist.default_pg_timeout),
        lambda: form_alone(options(2)),
        lambda: form_alone(options=options(2)),
        plant,
    ):
        form()
        counts.append(threads_of_gloo_groups())
    return [list(pair) for pair in counts]


@pytest.mark.slow
def test_every_way_of_forming_a_group_gives_it_one_worker_thread_and_a_planted_one_is_found():
    for counts in run_ranks(form_groups, size=2):
        (first, *_), *_ = counts
        *limited, (groups, planted) = counts
        assert first == 1
        assert all(threads == number for number, threads in limited)
        assert planted == groups + 1


def form_beside_a_group_of_the_program() -> list[tuple[int, int]]:
    """Count groups and threads with that of a program, and after one more."""
    dist.ProcessGroupGloo.__init__ = inspect.unwrap(dist.ProcessGroupGloo.__init__)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = threads_of_gloo_groups()
    create_groups(1, 1)
    handle = dist.new_group([0])
    after = threads_of_gloo_groups()
    assert handle.size() == 1
    return [before, after]


def test_groups_beside_one_that_the_program_has_formed_have_one_worker_thread():
    for before, after in run_ranks(form_beside_a_group_of_the_program, size=2):
        assert (before, after) == ([1, 2], [2, 3])


@pytest.mark.slow
def test_operations_in_flight_together_do_not_corrupt_the_memory():
    done = subprocess.run(
        [sys.executable, "-c", MANY_OPERATIONS], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "8.0\n"), done.stderr
