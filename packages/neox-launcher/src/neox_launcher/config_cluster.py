"""The cluster that `neox-config` judges a configuration for: never this machine's own devices."""

from collections.abc import Callable
from pathlib import Path

import click

from neox_launcher.config import NeoXConfig, Resolved, resolve
from neox_launcher.config.shapes import fewest_devices
from neox_launcher.resources.hostfile import read_hostfile
from neox_launcher.resources.hosts import Pool, select

__all__ = ["cluster_options", "resolve_for"]


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--devices` and `--hostfile`; `resolve_for` takes both."""
    devices = click.option(
        "--devices",
        type=click.IntRange(min=1),
        help="Devices of the job; default: those of its hostfile, else num_gpus, else one copy of the model.",
    )
    hostfile = click.option(
        "--hostfile", metavar="FILE", help="Judge for these hosts, as include, exclude and num_nodes choose."
    )
    return devices(hostfile(command))


def resolve_for(config: NeoXConfig, *, devices: int | None, hostfile: str | None) -> Resolved:
    """The configuration for a number of devices, or for the hosts of a file.

    Args:
        config: as loaded; its own hostfile counts where it is here.
        devices: of the whole job.
        hostfile: instead of devices.

    Raises:
        NeoXError: the configuration or the hostfile is wrong.
    """
    if devices is not None and hostfile is not None:
        raise click.UsageError("--devices and --hostfile both say how many devices there are: give one")
    launch = config.launch
    if hostfile is None and launch.hostfile is not None and Path(launch.hostfile).is_file():
        hostfile = launch.hostfile
    if devices is None and hostfile is not None:
        hosts = select(config, Pool(hosts=read_hostfile(hostfile), origin=f"hostfile {hostfile}"))
        return resolve(config, devices=sum(len(host.slots) for host in hosts), hosts=len(hosts))
    if devices is None and launch.num_gpus is not None and launch.num_gpus > 0:
        devices = launch.num_gpus * max(1, launch.num_nodes or 1)
    return resolve(config, devices=devices or fewest_devices(config))
