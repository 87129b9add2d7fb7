"""A cluster on this machine: hosts that are namespaces, joined by a bridge, with the cluster's real tools.

Each host has a network, a hostname, /etc/hosts and ssh configuration of its own, and an sshd with throw-away
keys; /tmp is the disk that they share. Nothing of the machine itself is changed: what is made lives in
namespaces, which end with the processes in them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

__all__ = ["LOGIN", "Cluster", "Host", "wait_until", "why_not_here"]

_HOST = Path(__file__).with_name("cluster_host.py")
_SUBNET = "10.77.0"
_PATIENCE_SECONDS = 240.0
LOGIN = "login"


def why_not_here(*programs: str) -> str | None:
    """Why no cluster can be made on this machine; None when it can.

    Args:
        programs: that a test needs besides.
    """
    if sys.platform != "linux" or os.getuid() != 0:
        return "namespaces and a bridge need root on Linux"
    for program in ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd", *programs):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        check=False,
    )
    return None if tried.returncode == 0 else "this machine allows no network namespaces with a bridge"


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.05)


class Host:
    """One pretended host.

    Args:
        name: its hostname.
        folder: holds its hosts file and ssh configuration.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", sys.executable, _HOST, name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", f"{name} did not start"
        self.pid = self._process.pid
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")

    def command(self, *argv: str | Path) -> list[str]:
        """Return the words that run a command on this host."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount"]
        return [*enter, f"--wd={os.getcwd()}", "--", *map(str, argv)]

    def run(self, *argv: str | Path) -> str:
        """Run a command to its end; its output."""
        done = subprocess.run(self.command(*argv), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self, containing: str) -> list[int]:
        """Return the processes of this host whose command line contains a text."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                is_here = os.readlink(entry / "ns" / "net") == self._network
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # It has ended meanwhile.
                continue
            if is_here and containing in command:
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        """End the host and everything on it."""
        self._process.communicate(timeout=_PATIENCE_SECONDS)


class Cluster:
    """A login host and workers, with addresses 10.77.0.1 and on.

    Args:
        folder: private, for keys and configuration.
        workers: how many hosts `worker-1`, `worker-2`, ... there are.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        """Variables of every command that `start` starts."""
        names = [LOGIN, *(f"worker-{number}" for number in range(1, workers + 1))]
        self._stack = ExitStack()
        self._write_files(names)
        try:
            self._switch = self._start_host("switch")
            self._switch.run("ip", "link", "add", "br0", "type", "bridge")
            self._switch.run("ip", "link", "set", "br0", "up")
            self.hosts = {name: self._join(name, number) for number, name in enumerate(names, 1)}
            for name in names:
                self.boot(name)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def workers(self) -> list[Host]:
        """The hosts that are not for logging in."""
        return [host for name, host in self.hosts.items() if name != LOGIN]

    def start(
        self, *argv: str | Path, environment: Mapping[str, str] | None = None, on: str = LOGIN
    ) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            self.hosts[on].command(*argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment, **(environment or {})},
        )

    def cut(self, name: str) -> None:
        """Take a host off the network, as a pulled cable does."""
        self._switch.run("ip", "link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        """Put the cable back."""
        self._switch.run("ip", "link", "set", self._cable(name), "up")

    def crash(self, name: str) -> None:
        """Kill all processes of a host, so that it no longer answers."""
        host = self.hosts[name]
        while victims := [pid for pid in host.processes("") if pid != host.pid]:
            for pid in victims:
                with suppress(ProcessLookupError):  # It went with another.
                    os.kill(pid, signal.SIGKILL)

    def boot(self, name: str) -> None:
        """Let a host that has crashed be reached again."""
        self.hosts[name].run("/usr/sbin/sshd", "-f", self.folder / "sshd_config")

    def leftovers(self, containing: str) -> list[str]:
        """Return the processes of any host whose command line contains a text."""
        return [f"{host.name}: {pid}" for host in self.hosts.values() for pid in host.processes(containing)]

    def kill(self, pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
        """End processes at once, or send them another signal."""
        for pid in pids:
            os.kill(pid, number)

    def _cable(self, name: str) -> str:
        return f"to-{name}"[:15]

    def _start_host(self, name: str) -> Host:
        host = Host(name, self.folder)
        self._stack.callback(host.close)
        return host

    def _join(self, name: str, number: int) -> Host:
        host = self._start_host(name)
        cable = self._cable(name)
        self._switch.run(
            *("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        )
        self._switch.run("ip", "link", "set", cable, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{_SUBNET}.{number}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")
        return host

    def _write_files(self, names: Sequence[str]) -> None:
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True
            )
        addresses = [f"{_SUBNET}.{number} {name}" for number, name in enumerate(names, 1)]
        # A known address without a host.
        addresses.append(f"{_SUBNET}.250 worker-gone")
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        public = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{name} {public}" for name in names))
        (self.folder / "ssh_config").write_text(
            f"IdentityFile {self.folder}/user_key\n"
            f"UserKnownHostsFile {self.folder}/known_hosts\n"
            "GlobalKnownHostsFile /dev/null\nCheckHostIP no\nStrictHostKeyChecking yes\nConnectTimeout 5\n"
        )
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/user_key.pub\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPrintMotd no\n"
            "MaxStartups 100\n"
        )
