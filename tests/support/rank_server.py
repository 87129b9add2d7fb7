"""A process that imports torch, DeepSpeed and the model once, and forks a process for each rank.

`support.distributed` starts it and writes one request a line to its standard input: a rank to start, or a
folder whose ranks to kill. When a rank has ended, its exit code is in `code-RANK` in its folder. The end of
the input ends this process and its ranks.

A rank has what the imports have made: modules, their caches, and the seed of string hashes. Python gives each
fork another random state; numpy's is set here, so that neither ranks nor launches share one by chance. The
permissions of new files and the blocked signals are those of the test that starts the rank. An import that a
module lacks is not noticed, because another module has made it: whole launches show it.
"""

import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

# Those that are installed. The last one is imported when ZeRO 3 starts, and by what watches operators.
IMPORTED = (
    "pytest",
    "torch.distributed",
    "deepspeed",
    "neox_model.train.open_run",
    "neox_model.checkpoint",
    "torch._dynamo",
)
_POLL_SECONDS = 0.005


def _prepare() -> None:
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads) - 1} threads run after the imports: a fork would lose them")
    # Ranks share the pages of what is alive now.
    gc.collect()
    gc.freeze()
    # Or every rank writes what is in the buffer.
    sys.stdout.flush()


def _become_rank(request: dict[str, Any], server: int) -> None:
    """Run a request in this forked process, with its environment, folder and output."""
    import numpy

    from support import distributed_worker

    # Here and in the server, so that it is done before either continues.
    os.setpgid(0, 0)
    numpy.random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    folder, rank = Path(request["folder"]), os.environ["RANK"]
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, own in enumerate((nothing, output, output)):
        os.dup2(own, number)
    os.chdir(request["working_directory"])
    distributed_worker.run_and_exit(folder, server)


def _start(request: dict[str, Any], running: dict[int, Path]) -> None:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _become_rank(request, server)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.setpgid(child, child)
    running[child] = Path(request["folder"], f"code-{request['environment']['RANK']}")


def _write_codes_of_ended(running: dict[int, Path]) -> None:
    for child, path in list(running.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            del running[child]
            aside = path.with_suffix(".tmp")
            with suppress(FileNotFoundError):  # An interrupted test has deleted the folder.
                aside.write_text(str(os.waitstatus_to_exitcode(status)))
                aside.replace(path)


def _kill(folder: Path, running: dict[int, Path]) -> None:
    for child, path in running.items():
        if path.parent == folder:
            os.killpg(child, signal.SIGKILL)


def main() -> None:
    """Serve requests until the input ends."""
    _prepare()
    running: dict[int, Path] = {}
    received = b""
    while True:
        ready, _, _ = select.select([0], [], [], _POLL_SECONDS if running else None)
        if ready:
            part = os.read(0, 1 << 16)
            if not part:
                break
            *lines, received = (received + part).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "kill" in request:
                    _kill(Path(request["kill"]), running)
                else:
                    _start(request, running)
        _write_codes_of_ended(running)
    for child in running:
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    # The folder of this file must not shadow anything. Tests import from these.
    sys.path[:1] = [str(Path(__file__).resolve().parents[2] / name) for name in ("tests", "tools")]
    main()
