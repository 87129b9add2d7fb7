"""A launch from beginning to end: check, plan, start, watch."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from neox_launcher.backends import BACKENDS
from neox_launcher.config import NeoXConfig, load_config, resolve
from neox_launcher.config.elasticity import without_elasticity
from neox_launcher.config.not_yet import not_built_yet
from neox_launcher.config.problems import Problem, config_error, in_words, place_of
from neox_launcher.config.sections.launch import MPI_LAUNCHERS
from neox_launcher.environment import secret_variables, travelling_variables
from neox_launcher.errors import HostfileError, LaunchError
from neox_launcher.file_checks import check_files
from neox_launcher.plan import LaunchPlan
from neox_launcher.resources.host import Host
from neox_launcher.resources.hosts import find_pool, first_workers, is_this_machine, select
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.names import unresolved_names
from neox_launcher.resources.world import World, missing_devices
from neox_launcher.restarts import run_with_restarts
from neox_launcher.supervision import Outcome, supervise

__all__ = ["Request", "find_hindrances", "plan_launch", "refuse_what_cannot_run", "run_plan"]

_LOOPBACK = "127.0.0.1"
_LOOPBACKS = (_LOOPBACK, "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for.

    Args:
        program: train, generate or evaluate.
        paths: configuration files.
        overrides: `name=value`.
        resume_overrides: `name=value`, stronger than those.
        directory: folder of the files.
        bind_cores: tie each worker to its share of its host's cores.
        max_restarts: how often a failed launch begins again from the newest checkpoint.
        output: whose output the terminal shows.
    """

    program: str
    paths: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    resume_overrides: tuple[str, ...] = ()
    directory: str | None = None
    bind_cores: bool = False
    max_restarts: int = 0
    output: Literal["rank0", "all"] = "rank0"


def plan_launch(
    request: Request, *, gpus: int | None = None, environment: Mapping[str, str] | None = None
) -> LaunchPlan:
    """What would run where; touches no other host and resolves no name.

    Args:
        request: what is asked for.
        gpus: GPUs of this machine; None counts them where they matter.
        environment: read instead of the process's own.

    Raises:
        ConfigError: the configuration is wrong.
        HostfileError: the hosts are not known.
        LaunchError: it cannot be started as asked.
    """
    env = os.environ if environment is None else environment
    count = cache(lambda: count_gpus(env) if gpus is None else gpus)
    config = load_config(
        request.paths,
        overrides=request.overrides,
        resume_overrides=request.resume_overrides,
        directory=request.directory,
    )
    if request.program == "generate":
        config = _without_batch(config)
        copy = _devices_of_one_copy(config)
        pool = find_pool(config, env, count_gpus=count, processes=copy)
        hosts = first_workers(select(config, pool), copy)
    else:
        pool = find_pool(config, env, count_gpus=count)
        hosts = select(config, pool)
    is_local, folder = _are_this_machine(hosts), _working_folder()
    world = World(hosts=hosts, gpus=count() if is_local else None)
    return LaunchPlan(
        program=request.program,
        launcher=_choose_launcher(config, hosts),
        world=world,
        hosts_from=pool.origin,
        devices=_devices_in_words(world, env),
        master_addr=_address(config, env, is_local=is_local),
        master_port=_port(config, {} if is_local else env),
        environment={
            **travelling_variables(env, home=Path(os.path.expanduser("~")), folder=folder),
            **secret_variables(config),
        },
        resolved=resolve(config, devices=world.size, hosts=len(hosts)),
        python=sys.executable,
        working_directory=str(folder),
        launcher_args=tuple(shlex.split(config.launch.launcher_args or "")),
        bind_cores=request.bind_cores,
        max_restarts=request.max_restarts,
        output=request.output,
    )


def find_hindrances(plan: LaunchPlan) -> list[Problem]:
    """Why the workers of a plan would not get far: parts not built yet, missing devices and files."""
    config = plan.resolved.config
    devices = missing_devices(config, plan.world)
    return not_built_yet(config) + devices + check_files(config, program=plan.program)


def refuse_what_cannot_run(plan: LaunchPlan) -> None:
    """Stop a launch whose workers would only find out later.

    Raises:
        ConfigError: there are hindrances.
        LaunchError: a program is missing, or cannot start this plan.
    """
    problems = find_hindrances(plan)
    if problems:
        raise config_error(problems, plan.resolved.config.files)
    backend = BACKENDS[plan.launcher]
    reason = backend.missing() or backend.refuses(plan)
    if reason is not None:
        raise LaunchError(reason)
    unknown = unresolved_names([host.name for host in plan.world.hosts]) if backend.uses_names else []
    if unknown:
        raise LaunchError(
            f"{plan.hosts_from}: {', '.join(unknown)} cannot be resolved here, neither by name nor by ssh's "
            "configuration; mend the names, or /etc/hosts, or ~/.ssh/config"
        )


def run_plan(plan: LaunchPlan) -> Outcome:
    """Start the workers and watch them until all have ended, again and again where restarts are allowed.

    Raises:
        LaunchError: a command cannot be started.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    return run_with_restarts(plan, _run_once)


def _run_once(plan: LaunchPlan) -> Outcome:
    backend = BACKENDS[plan.launcher]
    return supervise(
        lambda contact: backend.commands(plan, contact),
        plan.orders(),
        is_local=plan.launcher == "local",
        start_timeout=plan.resolved.config.launch.start_timeout,
    )


def _without_batch(config: NeoXConfig) -> NeoXConfig:
    """Text is generated by one copy of the model, however many are trained, with no batch to fill."""
    training = config.training.replaced(
        train_batch_size=None,
        train_micro_batch_size_per_gpu=config.training.train_micro_batch_size_per_gpu or 1,
    )
    return without_elasticity(config).model_copy(update={"training": training})


def _devices_of_one_copy(config: NeoXConfig) -> int:
    parallel = config.parallelism
    return max(1, parallel.model_parallel_size) * max(1, parallel.pipe_parallel_size)


def _working_folder() -> Path:
    """The folder that the launcher was started in.

    Raises:
        LaunchError: it is gone.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise LaunchError("the folder that this was started in is gone; go to one that exists") from error


def _are_this_machine(hosts: tuple[Host, ...]) -> bool:
    """Whether the job has no other host than this one.

    Raises:
        HostfileError: this machine is among the hosts under two names; its devices would be used twice.
    """
    own = [host.name for host in hosts if is_this_machine(host.name)]
    if len(own) > 1:
        raise HostfileError(f"{own[0]} and {own[1]} are both this machine; name it once, with all its slots")
    return len(own) == len(hosts)


def _choose_launcher(config: NeoXConfig, hosts: tuple[Host, ...]) -> str:
    """How the nodes are started: this machine alone needs no help, unless MPI is asked for.

    Raises:
        ConfigError: `local` was asked for, and there are other hosts.
    """
    launch = config.launch
    if launch.deepspeed_mpi:
        return launch.launcher if launch.launcher in MPI_LAUNCHERS else "openmpi"
    other = next((host.name for host in hosts if not is_this_machine(host.name)), None)
    if other is None:
        return "local"
    if launch.launcher == "local":
        what = f"starts workers on this machine alone, and {other} is another host of the job"
        problem = Problem("launcher", what, "use pdsh, ssh, slurm or an MPI; or num-nodes: 1")
        place = place_of(config.sources, "launcher")
        raise config_error([problem.located(place, in_words("local"))], config.files)
    return launch.launcher


def _address(config: NeoXConfig, environment: Mapping[str, str], *, is_local: bool) -> str | None:
    """Where rank 0 waits: as configured, as MASTER_ADDR says, or None for what the first host will tell.

    Raises:
        LaunchError: that is an address by which every host means itself.
    """
    given = config.launch.master_addr
    if is_local:
        return given or _LOOPBACK
    address = given or environment.get("MASTER_ADDR") or None
    if address in _LOOPBACKS:
        name = "master-addr" if given else "MASTER_ADDR"
        raise LaunchError(
            f"{name}: {address} means another machine on every host; give the address of the first host, or "
            "leave it out"
        )
    return address


def _devices_in_words(world: World, environment: Mapping[str, str]) -> str:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if world.gpus:
        return f"slot i is the i-th of CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    if world.gpus is None:
        stays = "; that of this machine stays here" if visible is not None else ""
        return f"slot i is a host's i-th GPU, or the i-th of its own CUDA_VISIBLE_DEVICES{stays}"
    return ""


def _port(config: NeoXConfig, environment: Mapping[str, str]) -> int:
    """The port that was asked for; 0 for a free one: two launches on one host must not meet.

    Raises:
        LaunchError: MASTER_PORT is no port.
    """
    if "master_port" in config.sources:
        return config.launch.master_port
    text = environment.get("MASTER_PORT", "0")
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"MASTER_PORT={text} is no port; unset it, or set master-port")
    return int(text)
