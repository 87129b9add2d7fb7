"""Run cases in a checkout: copy and write their files, fork their commands, read what they show."""

import hashlib
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from same_case import Case, Command
from same_checkouts import Checkout, versions
from same_observe import Value, observe

__all__ = ["Runner", "environment_of"]

_TOOLS = Path(__file__).parent
_COMMAND_SECONDS = 300.0
# When a rank has failed, others may report why.
_OTHERS_SECONDS = 5.0
_KILLED = -9
# What imports torch; all other commands are forked from a process without it, in a tenth of the time.
_WITH_TORCH = ("-m", "neox-convert", "neox-checkpoint")


def environment_of(checkout: Checkout) -> dict[str, str]:
    """Return the variables of the commands of a checkout; few are those of this process."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "PATH": f"{checkout.environment / 'bin'}:{checkout.scripts}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }


class Runner:
    """Runs cases of one checkout; may be called from several threads.

    Args:
        checkout: whose commands.
        inputs: the folder of inputs.
        base: the runner of the base, if this is not it.
        keeps: results are kept and read again.
    """

    _ports = count(21000 + os.getpid() % 4000)

    def __init__(self, checkout: Checkout, inputs: Path, *, base: "Runner | None" = None) -> None:
        self.checkout, self.inputs, self.base = checkout, inputs, base
        self._servers: dict[str, _Server] = {}
        self._lock = threading.Lock()
        programs = ("same_observe.py", "same_run.py", "same_server.py")
        texts = b"".join((_TOOLS / name).read_bytes() for name in programs)
        self._surroundings = versions(), hashlib.sha256(texts).hexdigest()

    def close(self) -> None:
        """End the processes."""
        for server in self._servers.values():
            server.close()

    def folder(self, case: Case) -> Path:
        """Return the folder in which a case runs."""
        return self.checkout.store / "runs" / case.slug

    def result(self, case: Case, *, keeps_folder: bool) -> dict[str, Value]:
        """Return what a case shows; that of the base is read, if it has run before.

        Args:
            case: what to run.
            keeps_folder: what the commands write is needed later.
        """
        if self.base is not None:
            return self._run(case, keeps_folder=keeps_folder)
        path = self.checkout.store / "results" / f"{case.slug}-{case.key(*self._surroundings)}.json"
        if path.exists() and (not keeps_folder or self.folder(case).exists()):
            found: dict[str, Value] = json.loads(path.read_text())
            return found
        found = self._run(case, keeps_folder=keeps_folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(found))
        aside.replace(path)
        return found

    def _run(self, case: Case, *, keeps_folder: bool) -> dict[str, Value]:
        folder = self.folder(case)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if not self._prepare(case, folder):
            return {"copies": "missing, because a case of the base failed"}
        codes = []
        for number, command in enumerate(case.commands, 1):
            codes.append(self._command(command, folder, number))
            if any(codes[-1]):
                break
        hidden = {
            str(folder): "RUN",
            # Before the checkout, whose folder may contain it.
            str(self.inputs): "INPUTS",
            str(self.checkout.environment): "ENVIRONMENT",
            str(self.checkout.scripts.parent): "ENVIRONMENT",
            str(self.checkout.sources): "CHECKOUT",
        }
        found = observe(case, folder, codes, hidden)
        if not keeps_folder:
            shutil.rmtree(folder)
        return found

    def _prepare(self, case: Case, folder: Path) -> bool:
        for target, source in case.copies.items():
            path = self._source(source)
            if not path.exists():
                return False
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, folder / target)
            else:
                shutil.copy2(path, folder / target)
        for name, text in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return True

    def _source(self, source: str) -> Path:
        if not source.startswith("base:"):
            return self.inputs / source
        title, _, path = source.removeprefix("base:").rpartition(":")
        base = self.base or self
        group, _, name = title.partition(": ")
        return base.folder(Case(group, name, ())) / path

    def _command(self, command: Command, folder: Path, number: int) -> list[int]:
        first, *rest = command.arguments
        arguments = [first if first == "-m" else str(self.checkout.scripts / first), *rest]
        with self._lock:
            kind = "torch" if first in _WITH_TORCH else "light"
            server = self._servers.get(kind) or self._servers.setdefault(kind, _Server(self.checkout, kind))
            port = _free_port(self._ports)
        requests = []
        for rank in range(command.ranks):
            variables = environment_of(self.checkout)
            if command.ranks > 1:
                variables |= _rank_variables(rank, command.ranks, port)
            output = str(folder / f"output-{number}-{rank}")
            requests.append(
                {"arguments": arguments, "environment": variables, "folder": str(folder), "output": output}
            )
        return server.run(requests)


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port(ports: Any) -> int:
    """Return a port below those that the system gives to connections."""
    for port in ports:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return int(port)
    raise AssertionError("the numbers do not end")


class _Server:
    """A process that forks the commands of a checkout (tools/same_server.py)."""

    def __init__(self, checkout: Checkout, kind: str) -> None:
        self._errors = (checkout.store / f"server-{kind}.log").open("wb")
        self._process = subprocess.Popen(
            [checkout.python, _TOOLS / "same_server.py", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment_of(checkout),
            cwd=checkout.store,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            sys.exit(f"the process that forks commands has ended: see {self._errors.name}")
        self._numbers = count()
        self._answers: dict[int, queue.SimpleQueue[tuple[int, int]]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, code = map(int, line.split())
            self._answers.pop(number).put((number, code))
        for number, answers in list(self._answers.items()):
            answers.put((number, _KILLED))

    def run(self, requests: list[Mapping[str, Any]]) -> list[int]:
        """Run commands at the same time; return their exit codes."""
        answers: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        numbers = []
        for request in requests:
            number = next(self._numbers)
            self._answers[number] = answers
            numbers.append(number)
            self._write({"number": number, "seconds": _COMMAND_SECONDS, **request})
        codes: dict[int, int] = {}
        deadline = None
        while len(codes) < len(numbers):
            try:
                wait = _COMMAND_SECONDS + 60 if deadline is None else max(0.0, deadline - time.monotonic())
                number, code = answers.get(timeout=wait)
            except queue.Empty:
                if deadline is None:
                    sys.exit(f"the process that forks commands does not answer: see {self._errors.name}")
                self._write({"kill": [number for number in numbers if number not in codes]})
                deadline = None
                continue
            codes[number] = code
            if code and deadline is None:
                deadline = time.monotonic() + _OTHERS_SECONDS
        return [codes[number] for number in numbers]

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process, and the commands that it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
