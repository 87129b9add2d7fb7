"""The first process of a pretended host: it makes the host's own view of the machine, and ends with the test.

Started inside new network, UTS and mount namespaces as `cluster_host.py NAME FOLDER`. It waits until its
standard input ends, which happens when the test's process is gone for whatever reason, then kills whatever
still runs in its network.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def hide_behind(source: Path, target: str) -> None:
    """Let this host see another file under a well-known name."""
    subprocess.run(["mount", "--bind", source, target], check=True)


def processes_here() -> list[int]:
    """Everything in this network but this process."""
    own = os.readlink("/proc/self/ns/net")
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "net") == own and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:  # It has ended meanwhile.
            continue
    return found


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    socket.sethostname(name)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/sshd").mkdir()
    hide_behind(folder / "hosts", "/etc/hosts")
    hide_behind(folder / "ssh_config", "/etc/ssh/ssh_config")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    while victims := processes_here():
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


if __name__ == "__main__":
    main()
