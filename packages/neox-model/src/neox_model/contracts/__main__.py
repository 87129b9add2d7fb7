"""`python -m neox_model.contracts`: check what we use of torch and DeepSpeed beyond their documentation.

It runs on the CPU, in seconds, and prints a line for each contract that is broken; then the exit code is 1.
"""

import os
import sys
from contextlib import redirect_stdout

import click
from torch import distributed

from neox_model.bounds import installed_version
from neox_model.contracts import CONTRACTS, broken_contracts

__all__ = ["main"]

# A group of this process over the loopback, wherever it is started.
_ENVIRONMENT = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    "WORLD_SIZE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
}


@click.command()
def main() -> None:
    """Check what NeoX uses of the installed torch and DeepSpeed beyond their documentation."""
    os.environ.update(_ENVIRONMENT)
    packages = {package: installed_version(package) for package in CONTRACTS.values()}
    # DeepSpeed logs to standard output.
    with redirect_stdout(sys.stderr):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        results = [
            result
            for module, package in CONTRACTS.items()
            if packages[package] is not None
            for result in broken_contracts(module)
        ]
        distributed.destroy_process_group()
    broken = [result for result in results if result is not None]
    versions = " and ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
    click.echo("\n".join(broken) or f"{len(results)} checks passed with {versions}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
