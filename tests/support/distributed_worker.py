"""One rank of `support.distributed.run_ranks`: join the group, call the function, write what came of it."""

import ctypes
import datetime
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_target", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_target"] = module
    spec.loader.exec_module(module)
    return module


def _write(path: Path, value: object) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value))
    aside.replace(path)


def _run(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from neox_model.processes import leave_processes
    from neox_model.torch_compat import init_process_group

    torch.set_num_threads(1)
    call = json.loads((folder / "call.json").read_text())
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    # Before anything touches a device.
    if call["shares_gpu"]:
        torch.cuda.set_device(0)
    elif call["backend"] == "nccl":
        torch.cuda.set_device(rank)
    init_process_group(
        call["backend"], store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=300)
    )
    result = getattr(_load(call["file"]), call["name"])(**call["arguments"])
    _write(folder / f"result-{rank}.json", result)
    dist.barrier()
    leave_processes()


def run_and_exit(folder: Path, parent: int) -> NoReturn:
    """Run this process's rank of the call in a folder, and end the process with an exit code."""
    # Not before the folder of this package is in the path.
    from support.crashes import stop_if_crashed, wait_on_crashes

    _die_with_parent(parent)
    rank, code = int(os.environ["RANK"]), 0
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    crash = folder / f"crash-{rank}.txt"
    wait_on_crashes(crash)
    try:
        _run(folder, rank)
    except BaseException:
        error = {"time": time.time(), "rank": rank, "traceback": traceback.format_exc()}
        _write(folder / f"error-{rank}.json", error)
        code = 1
    stop_if_crashed(crash)
    # A process group that was abandoned half-way may hang in its destructors: leave without them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # The folder of this file must not shadow anything. Tests import from these.
    sys.path[:1] = [str(Path(__file__).resolve().parents[2] / name) for name in ("tests", "tools")]
    run_and_exit(Path(sys.argv[1]), int(sys.argv[2]))
