"""The options of `neox-config` that describe a cluster; this machine's own devices are never counted."""

from collections.abc import Callable, Sequence

import click

from neox_config import NeoXConfig, Resolved
from neox_config.command_line import PATH, option
from neox_config.estimate.setup import fewest_devices
from neox_config.files import why_not_readable
from neox_config.problems import Problem, list_problems
from neox_launcher.plan.epochs import resolve_with_data, resolve_without_data
from neox_launcher.resources.host import Host
from neox_launcher.resources.hostfile import read_hostfile
from neox_launcher.resources.hosts import Pool, select

__all__ = [
    "CLUSTER",
    "MOST_DEVICES",
    "cluster_options",
    "hosts_for",
    "resolve_for",
    "show_notes",
]

# Upper limit of --devices, far beyond any cluster.
MOST_DEVICES = 10**7

CLUSTER = "Cluster"
"""Heading of the options that describe it."""


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--devices` and `--hostfile`, the arguments of `resolve_for`."""
    devices = option(
        "--devices",
        heading=CLUSTER,
        type=click.IntRange(1, MOST_DEVICES),
        help="Number of devices of the job. Default: from the hostfile, else from num_gpus, else the number "
        "that one copy of the model needs.",
    )
    hostfile = option(
        "--hostfile",
        heading=CLUSTER,
        type=PATH,
        metavar="FILE",
        help="Take the number of devices from this hostfile, filtered by include, exclude and num_nodes.",
    )
    return devices(hostfile(command))


def resolve_for(
    config: NeoXConfig, *, devices: int | None, hostfile: str | None, requires_data: bool = False
) -> Resolved:
    """Resolve the configuration for a number of devices or for the hosts of a hostfile.

    Args:
        config: loaded configuration. Its own hostfile is used if it exists on this machine.
        devices: number of devices of the whole job, or None.
        hostfile: path of a hostfile, or None; excludes `devices`.
        requires_data: refuse absent data on which the number of iterations depends (`train_epochs`); False:
            leave `train_iters` None.

    Raises:
        NeoXError: the configuration or the hostfile is invalid.
    """
    resolve_it = resolve_with_data if requires_data else resolve_without_data
    hosts = hosts_for(config, devices=devices, hostfile=hostfile)
    if hosts is not None:
        count = sum(len(host.slots) for host in hosts)
        return resolve_it(config, devices=count, hosts=len(hosts))
    launch = config.launch
    if devices is None and launch.num_gpus is not None and launch.num_gpus > 0:
        devices = launch.num_gpus * max(1, launch.num_nodes or 1)
    devices = devices or fewest_devices(config)
    return resolve_it(config, devices=devices)


def show_notes(notes: Sequence[Problem], config: NeoXConfig) -> None:
    """Print notes about a configuration to standard error; nothing if there are none."""
    if notes:
        click.echo(list_problems(notes, config.files, called="note") + "\n", err=True)


def hosts_for(config: NeoXConfig, *, devices: int | None, hostfile: str | None) -> tuple[Host, ...] | None:
    """Return the hosts of a hostfile that the configuration selects; None if there is no hostfile.

    Args:
        config: loaded configuration. Its own hostfile is used if it exists on this machine.
        devices: number of devices of the whole job, used instead of a hostfile, or None.
        hostfile: path of a hostfile, or None; excludes `devices`.

    Raises:
        NeoXError: the selection or the hostfile is invalid.
    """
    if devices is not None and hostfile is not None:
        raise click.UsageError("--devices and --hostfile exclude each other; give one of them")
    given = config.launch.hostfile
    if hostfile is None and given is not None and why_not_readable(given) is None:
        hostfile = given
    if devices is not None or hostfile is None:
        return None
    return select(config, Pool(hosts=read_hostfile(hostfile), origin=f"hostfile {hostfile}"))
