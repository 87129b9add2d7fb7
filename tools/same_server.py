"""Run commands of one checkout, each in a process forked from this one, whose imports take seconds.

tools/same_run.py starts it with the Python of the checkout's environment and the kind of the commands,
"light" or "torch", and writes one request a line to its standard input: arguments, environment, folder and
file for the output. For each, one line of standard output has the request's number and the exit
code. The end of the input ends this process.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time
from typing import Any, NamedTuple

# By the kind of the commands. Without a name, its import takes time in each process.
IMPORTED = {
    "light": ("neox_launcher.cli.launch", "neox_launcher.cli.estimate", "neox_data.preprocess.cli"),
    "torch": (
        "torch.distributed",
        "torch._dynamo",
        "deepspeed",
        "transformers",
        # The first one of the two is that of commits without the second one.
        "neox_model.train.run",
        "neox_model.train.open_run",
        "neox_model.generate.run",
        "neox_model.convert.to_hf",
        "neox_model.convert.from_hf",
    ),
}
_POLL_SECONDS = 0.005


class _Running(NamedTuple):
    number: int
    deadline: float


def _prepare(kind: str) -> None:
    for name in IMPORTED[kind]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads - 1} threads run after the imports: a fork would lose them")
    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, own in enumerate((nothing, output, output)):
        os.dup2(own, number)
    os.chdir(request["folder"])


def _end(running: dict[int, _Running], answers: int) -> None:
    """Report the processes that have ended, and kill those whose time is up."""
    for child, (number, deadline) in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            del running[child]
            os.write(answers, b"%d %d\n" % (number, os.waitstatus_to_exitcode(status)))
        elif time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)


def _kill(running: dict[int, _Running], numbers: list[int]) -> None:
    for child, (number, _) in running.items():
        if number in numbers:
            os.killpg(child, signal.SIGKILL)


def serve(answers: int) -> dict[str, Any] | None:
    """Fork a process per request; return the request in a forked process, and None at the end."""
    running: dict[int, _Running] = {}
    received = b""
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_SECONDS if running else None)
        if ready:
            part = os.read(0, 1 << 16)
            if not part:
                break
            *lines, received = (received + part).split(b"\n")
            for request in map(json.loads, lines):
                if "kill" in request:
                    _kill(running, request["kill"])
                    continue
                child = os.fork()
                if child == 0:
                    return request
                with contextlib.suppress(
                    PermissionError, ProcessLookupError
                ):  # It has done so, or has ended.
                    os.setpgid(child, child)
                running[child] = _Running(request["number"], time.monotonic() + request["seconds"])
        _end(running, answers)
    _kill(running, [number for number, _ in running.values()])
    return None


def main() -> None:
    """Serve; in a forked process, run the command as Python would."""
    # The folder of this file must not shadow anything.
    del sys.path[0]
    # Libraries print while they are imported.
    answers = os.dup(1)
    os.dup2(2, 1)
    _prepare(sys.argv[1])
    os.write(answers, b"ready\n")
    request = serve(answers)
    if request is None:
        return
    os.close(answers)
    _become(request)
    first, *rest = request["arguments"]
    if first == "-m":
        sys.argv = list(rest)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
