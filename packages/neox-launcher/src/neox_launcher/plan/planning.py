"""Builds a launch plan from a request on the command line, without contacting another host."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from neox_config import NeoXConfig, Resolved, load_config, resolve
from neox_config.derive.elasticity import without_elasticity
from neox_config.derive.problems import refusal
from neox_config.errors import ConfigError, HostfileError, LaunchError
from neox_config.problems import Problem, config_error
from neox_config.schema.sections.launch import MPI_LAUNCHERS
from neox_launcher.plan.environment import secret_variables, travelling_variables
from neox_launcher.plan.epochs import config_for
from neox_launcher.plan.plan import LaunchPlan
from neox_launcher.plan.preflight import check_files
from neox_launcher.plan.scheduler import Member, find_member
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import address_of, is_host_name, shortened
from neox_launcher.resources.hosts import (
    Pool,
    find_pool,
    first_workers,
    is_this_machine,
    select,
)
from neox_launcher.resources.local_gpus import count_gpus
from neox_launcher.resources.world import World, missing_devices

__all__ = ["Request", "plan_launch", "refuse_hosts"]

_LOOPBACK = "127.0.0.1"
_BROADCAST = "255.255.255.255"
_HIGHEST_PORT, _PORT_DIGITS = 65535, 5
# Programs that use one copy of the model, however many devices there are.
_ONE_COPY = ("generate", "serve", "find-blocks")
# Programs for which the batch sizes of the run have no meaning.
_WITHOUT_TRAINING = (*_ONE_COPY, "index-blocks")
# Parameters that are addresses, and the host that each is an address of.
_ADDRESSES = {"master_addr": "the first host", "launcher_address": "this machine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request on the command line.

    Args:
        program: train, generate, serve or evaluate.
        paths: configuration files.
        overrides: settings as `name=value`.
        resume_overrides: settings as `name=value` that take precedence over `overrides`.
        directory: directory of the configuration files.
        bind_cores: bind each worker to its share of the host's CPU cores.
        max_restarts: maximum restarts after a failure, each from the latest checkpoint.
        output: ranks whose output is printed to the terminal.
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
    """Build the plan of a launch without contacting other hosts or resolving names.

    Args:
        request: from the command line.
        gpus: number of GPUs of this machine; None counts them when needed.
        environment: used instead of the environment of this process.

    Raises:
        ConfigError: the configuration is invalid.
        HostfileError: the list of hosts is missing or invalid.
        LaunchError: the launch cannot be started as requested.
    """
    env = os.environ if environment is None else environment
    count = cache(lambda: count_gpus(env) if gpus is None else gpus)
    member = find_member(env)
    config = load_config(
        request.paths,
        overrides=request.overrides,
        resume_overrides=request.resume_overrides,
        directory=request.directory,
    )
    if request.program in _WITHOUT_TRAINING:
        config = _without_training(config)
    pool, world = _find_world(request.program, config, member, env, count)
    hosts, is_local, folder = world.hosts, world.gpus is not None, _working_folder()
    _check_address(config, "launcher_address", is_local=is_local)
    resolved = _resolve(request.program, config, world)
    config = resolved.config
    launcher = "local" if member else _choose_launcher(config, hosts)
    return LaunchPlan(
        program=request.program,
        launcher=launcher,
        world=world,
        hosts_from=pool.origin,
        devices=_devices_in_words(world, env),
        master_addr=_address(config, env, member, hosts, is_local=is_local),
        # The processes that a scheduler started use its MASTER_PORT to join each other.
        master_port=_port(config, {} if is_local or member else env),
        environment={
            **travelling_variables(env, home=Path(os.path.expanduser("~")), folder=folder),
            **secret_variables(config),
        },
        resolved=resolved,
        python=sys.executable,
        working_directory=str(folder),
        launcher_args=(*_slurm_options(config, launcher), *shlex.split(config.launch.launcher_args or "")),
        remote_setup=config.launch.remote_setup,
        remote_prefix=tuple(shlex.split(config.launch.remote_prefix or "")),
        bind_cores=request.bind_cores,
        max_restarts=request.max_restarts,
        output=request.output,
        member=member,
    )


def _resolve(program: str, config: NeoXConfig, world: World) -> Resolved:
    """Return the configuration of a program on its devices.

    Raises:
        ConfigError: it does not fit them; the message then lists what else is missing on this machine.
    """
    try:
        config = config_for(program, config, devices=world.size, hosts=len(world.hosts))
        return resolve(config, devices=world.size, hosts=len(world.hosts))
    except ConfigError as error:
        if not error.problems:
            raise
        problems = [*error.problems, *missing_devices(config, world), *check_files(config, program=program)]
        raise config_error(list(dict.fromkeys(problems)), config.files) from error


def _find_world(
    program: str,
    config: NeoXConfig,
    member: Member | None,
    env: Mapping[str, str],
    count: Callable[[], int],
) -> tuple[Pool, World]:
    """Return the hosts that are known, and the workers on those of them that take part."""
    parallel = config.parallelism
    one = max(1, parallel.model_parallel_size) * max(1, parallel.pipe_parallel_size)
    copy = one if program in _ONE_COPY else 1
    if member is None:
        pool = find_pool(config, env, count_gpus=count, processes=copy)
    else:
        pool = _pool_of_members(config, member, count() or max(1, config.launch.num_gpus or 1))
    hosts = select(config, pool)
    if program in _ONE_COPY:
        hosts = first_workers(hosts, copy)
    is_local = member is None and _are_this_machine(hosts)
    return pool, World(hosts=hosts, gpus=count() if is_local else None)


def _pool_of_members(config: NeoXConfig, member: Member, slots: int) -> Pool:
    """Return the hosts on which a scheduler started this program, each with as many slots as this one.

    Raises:
        LaunchError: the configuration selects hosts or ports in another way.
    """
    launch = config.launch
    reasons = {
        "hostfile": launch.hostfile is not None,
        "deepspeed-mpi": launch.deepspeed_mpi,
        "launcher-address": launch.launcher_address is not None,
        "launcher-port": launch.launcher_port != 0,
        f"master-port: {member.port}": "master_port" in config.sources and launch.master_port == member.port,
    }
    wrong = next((name for name, is_wrong in reasons.items() if is_wrong), None)
    if wrong is not None:
        raise LaunchError(
            f"{wrong} cannot be used, because {member.origin} has started this program on every host, and "
            "its processes join each other on MASTER_PORT; leave it out, or start neox-launch once",
            code="member-of-a-job",
        )
    return Pool(
        hosts=tuple(Host(name, tuple(range(slots))) for name in member.names),
        origin=f"{member.origin}, which started this program on every host",
    )


def _slurm_options(config: NeoXConfig, launcher: str) -> Iterator[str]:
    """Yield srun's options for `comment` and `account`, which other launchers do not have."""
    if launcher == "slurm":
        options = {"--comment": config.launch.comment, "--account": config.launch.account}
        yield from (f"{option}={value}" for option, value in options.items() if value)


def _without_training(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration without train batch size and epochs, for programs that train nothing."""
    training = config.training.replaced(
        train_iters=config.training.train_iters or 1,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=config.training.train_micro_batch_size_per_gpu or 1,
    )
    return without_elasticity(config).model_copy(update={"training": training})


def _working_folder() -> Path:
    """Return the working directory of the launcher.

    Raises:
        LaunchError: it does not exist any more.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise LaunchError("the working directory no longer exists; change to another directory") from error


def _are_this_machine(hosts: tuple[Host, ...]) -> bool:
    """Return whether this machine is the only host of the job.

    Raises:
        HostfileError: this machine is listed under two names, so that its devices would be used twice.
    """
    own = [host.name for host in hosts if is_this_machine(host.name)]
    if len(own) > 1:
        raise HostfileError(
            f"{own[0]} and {own[1]} are both this machine; list it once, with all its slots",
            code="one-machine-twice",
        )
    return len(own) == len(hosts)


def refuse_hosts(config: NeoXConfig, hosts: tuple[Host, ...]) -> None:
    """Refuse hosts that the configuration cannot start, without looking at this machine's environment.

    Raises:
        NeoXError: the launcher or the address of rank 0 does not fit the hosts.
    """
    is_local = _are_this_machine(hosts)
    _choose_launcher(config, hosts)
    _address(config, {}, None, hosts, is_local=is_local)


def _choose_launcher(config: NeoXConfig, hosts: tuple[Host, ...]) -> str:
    """Return the backend that starts the agents: `local` for this machine alone, unless MPI is requested.

    Raises:
        ConfigError: the launcher is `local`, but the job has other hosts.
    """
    launch = config.launch
    if launch.deepspeed_mpi:
        return launch.launcher if launch.launcher in MPI_LAUNCHERS else "openmpi"
    other = next((host.name for host in hosts if not is_this_machine(host.name)), None)
    if other is None:
        return "local"
    if launch.launcher == "local":
        what = f"starts workers on this machine only, but the job has another host, {other}"
        remedy = "use pdsh, ssh, slurm or an MPI, or set num-nodes: 1"
        raise refusal(config, Problem("launcher", what, remedy))
    return launch.launcher


def _address(
    config: NeoXConfig,
    environment: Mapping[str, str],
    member: Member | None,
    hosts: tuple[Host, ...],
    *,
    is_local: bool,
) -> str | None:
    """Return the address of rank 0 from the configuration or MASTER_ADDR, or None to use the first host's.

    Raises:
        ConfigError, LaunchError: other hosts cannot connect to the address.
    """
    given = config.launch.master_addr
    _check_address(config, "master_addr", is_local=is_local)
    if is_local:
        return given or _LOOPBACK
    if member is not None and given is None:
        # Some schedulers give process 0 a loopback address, and the configuration may leave its host out.
        # Then the first host reports its own.
        is_first = hosts[0].name == member.names[0]
        is_usable = is_first and _wrong_address(member.address, is_local=False) is None
        return member.address if is_usable else None
    named = environment.get("MASTER_ADDR")
    wrong = _wrong_address(named, is_local=is_local) if named and given is None else None
    if wrong is not None:
        remedy = f"use the name or an address of {_ADDRESSES['master_addr']}, or unset it"
        raise LaunchError(f"MASTER_ADDR={shortened(named or '')} {wrong}; {remedy}", code="loopback")
    return given or named or None


def _check_address(config: NeoXConfig, name: str, *, is_local: bool) -> None:
    """Refuse an address in the configuration to which other processes cannot connect.

    Args:
        config: sets the address.
        name: key of _ADDRESSES.
        is_local: the job uses only this machine.

    Raises:
        ConfigError: names the location of the parameter.
    """
    address = getattr(config.launch, name)
    wrong = None if address is None else _wrong_address(address, is_local=is_local)
    if wrong is not None:
        remedy = f"use the name or an address of {_ADDRESSES[name]}, or leave it out"
        raise refusal(config, Problem(name, wrong, remedy))


def _wrong_address(address: str, *, is_local: bool) -> str | None:
    """Return why other processes cannot connect to an address; None if they may."""
    if not is_host_name(address):
        return "is neither a host name nor an address"
    number = None if is_local else address_of(address)
    if address.lower().partition(".")[0] == "localhost" and not is_local:
        return "is this machine for every host: other hosts cannot reach it"
    if number is None:
        return None
    if number.is_loopback:
        return "is a loopback address, which other hosts cannot reach"
    # Not `is_reserved`: some clouds use 240.0.0.0/4, and versions of Python differ on ::ffff:0:0/96.
    if number.is_unspecified or number.is_multicast or str(number) == _BROADCAST:
        return "is not the address of a host"
    return None


def _devices_in_words(world: World, environment: Mapping[str, str]) -> str:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if world.gpus:
        return f"slot i is the i-th of CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    if world.gpus is None:
        stays = "; this machine's CUDA_VISIBLE_DEVICES is not passed on" if visible is not None else ""
        return f"slot i is a host's i-th GPU, or the i-th of its own CUDA_VISIBLE_DEVICES{stays}"
    return ""


def _port(config: NeoXConfig, environment: Mapping[str, str]) -> int:
    """Return the requested port of rank 0, or 0 for a free one, so that two launches on a host can coexist.

    Raises:
        LaunchError: MASTER_PORT is not a port number.
    """
    if "master_port" in config.sources:
        return config.launch.master_port
    text = environment.get("MASTER_PORT", "0")
    if not (text.isdecimal() and len(text) <= _PORT_DIGITS and int(text) <= _HIGHEST_PORT):
        raise LaunchError(
            f"MASTER_PORT={shortened(text)} is not a port number; unset it, or set master-port",
            code="no-port",
        )
    return int(text)
