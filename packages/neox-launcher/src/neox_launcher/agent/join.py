"""Joins a launch as the agent of this host, where a scheduler has started `neox-launch` on every host."""

import os
import signal
import socket
import sys
import time

from neox_config.errors import LaunchError
from neox_launcher.agent.agent import Agent
from neox_launcher.protocol.channel import Channel, ConnectionLostError
from neox_launcher.protocol.exit_codes import SIGNALLED
from neox_launcher.protocol.handshake import TOKEN_VARIABLE, connect
from neox_launcher.protocol.run_folder import run_folder

__all__ = ["join_launch"]

_RETRY_SECONDS = 1.0


def join_launch(address: str, port: int, token: str, *, host_number: int, within: float) -> int:
    """Serve the launch as the agent of this host until it ends.

    Args:
        address: address of the launching process.
        port: its port.
        token: secret that both know.
        host_number: number of this host in the plan.
        within: seconds to wait for the launching process.

    Returns:
        Exit code of the launch, so that the scheduler treats all its processes alike.

    Raises:
        LaunchError: the launching process cannot be reached, or the connection to it is lost.
    """
    # Workers must not inherit it.
    os.environ.pop(TOKEN_VARIABLE, None)
    host = socket.gethostname()
    channel = _connect_patiently(address, port, token, host, within=within)
    try:
        with run_folder() as folder, Agent(channel, folder, host) as agent:
            agent.serve({"number": host_number, "name": None, "rank": None})
            return agent.exit_code
    except ConnectionLostError as error:
        raise LaunchError(
            f"host {host}: the connection to the launching process at {address} is lost ({error}); the "
            "workers of this host are ended; see the output of process 0"
        ) from error


def _connect_patiently(address: str, port: int, token: str, host: str, *, within: float) -> Channel:
    """Try to connect until the launching process is ready; it may start later, and its name exist later."""
    # A process that is the first of a container is not ended by signals without a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(SIGNALLED + number))
    deadline, reported = time.monotonic() + within, False
    while True:
        try:
            return connect([address], port, token, host=host)
        except ConnectionLostError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"process 0 did not answer within {within:g} s (start-timeout): {error}; check that it "
                    f"runs, that all processes have the same {TOKEN_VARIABLE}, and that it can be reached"
                ) from error
            if not reported:
                sys.stderr.write(f"waiting for process 0 at {address}:{port} ({error})\n")
                reported = True
        time.sleep(_RETRY_SECONDS)
