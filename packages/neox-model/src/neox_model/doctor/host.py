"""What a worker of the doctor reports about its host, and about the connections to other hosts.

The launcher compares all hosts. Facts are reported before the workers join the process group and again after,
so that they are available even if the network fails.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.data import DataSection
from neox_config.schema.sections.training import TrainingSection
from neox_config.spec.model import ModelSpec
from neox_config.spec.run import RunSpec
from neox_launcher.worker.reporting import report_facts
from neox_model.assembly.attention_backend import attention_backends
from neox_model.processes import join_process_group, leave_processes
from neox_model.train.determinism import use_deterministic_algorithms
from neox_model.versions import package_versions

__all__ = ["examine"]

_JOIN_SECONDS = 15
_DRIVER_SECONDS = 10.0
_ROUNDS = 5
_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}


def examine(
    spec: ModelSpec,
    run: RunSpec,
    training: TrainingSection,
    *,
    data: DataSection,
    written: CheckpointSection,
    log_dir: str | None,
    rank: int,
    local_rank: int,
) -> dict[str, Any]:
    """Collect, report and return facts, as one rank of a job. Collective over all ranks.

    Args:
        spec: the model.
        run: how it runs.
        training: whether algorithms are deterministic.
        data: the files of data.
        written: the folder of checkpoints.
        log_dir: the folder of logs; None: there is none.
        rank: this worker's.
        local_rank: its position on this host.
    """
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    facts = {
        "cudnn": "none",
        **package_versions(),
        **_devices(device),
        "files": _files(data),
    }
    report_facts(rank, facts)
    backend = run.layout.backend or ("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_deterministic_algorithms(training, compiles=run.compilation.requested is not False)
    backends = attention_backends(spec, run, device)
    facts["attention"] = {each.kind: each.name for each in backends}
    # Why they are not cuDNN's.
    facts["attention_notes"] = list(dict.fromkeys(each.note for each in backends if each.note))
    join_process_group(backend, timeout=timedelta(seconds=_JOIN_SECONDS))
    facts["folders"], facts["local_folders"] = _folders(written, log_dir, device)
    facts["all_reduce"] = _measure_all_reduce(device)
    report_facts(rank, facts)
    leave_processes()
    return facts


def _devices(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"driver": "none", "gpus": [], "gpu_error": None}
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"driver": _ask_driver("driver_version"), "gpus": names, "gpu_error": _try_device(device)}


def _try_device(device: torch.device) -> str | None:
    """Return the fault of a device, such as wrong results or memory errors; None if there is none."""
    try:
        numbers = torch.arange(512 * 512, dtype=torch.float64).reshape(512, 512) % 7
        if not torch.equal((numbers.to(device) @ numbers.to(device)).cpu(), numbers @ numbers):
            return "it computes wrong results"
    except RuntimeError as error:
        return str(error).splitlines()[0]
    errors = _ask_driver("ecc.errors.uncorrected.volatile.total", device.index)
    return (
        f"{errors} uncorrected memory errors since the driver started"
        if errors.strip("0").isdigit()
        else None
    )


def _ask_driver(what: str, number: int = 0) -> str:
    """Query one value from `nvidia-smi`, selecting the device as in CUDA_VISIBLE_DEVICES."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    device = visible[number] if number < len(visible) else str(number)
    asked = [command, f"--query-gpu={what}", "--format=csv,noheader", f"--id={device}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _files(data: DataSection) -> dict[str, str]:
    """Return data file -> size and modification time, which are equal on all hosts with the same file."""
    kinds = [
        f"{part}_{kind}" for kind in ("data_paths", "label_data_paths") for part in ("train", "valid", "test")
    ]
    prefixes = [data.data_path, *(prefix for kind in kinds for prefix in getattr(data, kind) or ())]
    found = {}
    for prefix in dict.fromkeys(prefix for prefix in prefixes if prefix):
        for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
            try:
                status = path.stat()
                found[str(path)] = f"{status.st_size:,} bytes of {time.ctime(status.st_mtime)}"
            except OSError as error:
                found[str(path)] = error.strerror or str(error)
    return found


def _folders(
    section: CheckpointSection, log_dir: str | None, device: torch.device
) -> tuple[dict[str, str], dict[str, str]]:
    """Return parameter -> fault of its folder on this host, empty if none. Collective.

    Rank 0 creates a file in the folder; a rank that does not see it has a different folder.

    Returns:
        The folders that all hosts must share, and those of which each host must have its own.
    """
    here = zlib.crc32(socket.gethostname().encode())
    numbers = torch.tensor([secrets.randbelow(2**31), here], device=device)
    distributed.broadcast(numbers, src=0)
    mark = f".neox-doctor-{int(numbers[0])}"
    rank = distributed.get_rank()
    found: tuple[dict[str, str], dict[str, str]] = {}, {}
    is_local = section.checkpoint.use_node_local_storage
    written = (("save", section.save, is_local), ("log-dir", log_dir, False))
    for name, path, is_own in written:
        if path is None:
            continue
        folder = Path(path)
        fault = _leave(folder, mark) if rank == 0 else ""
        distributed.barrier()
        if rank != 0 and is_own and int(numbers[1]) != here:
            fault = _try_own(folder, mark, rank)
        elif rank != 0:
            if not (folder / mark).exists():
                fault = f"{folder} is not the same folder as on the host of rank 0"
            elif not os.access(folder, os.W_OK | os.X_OK):
                fault = f"{folder} cannot be written"
        distributed.barrier()
        if rank == 0:
            with suppress(OSError):
                (folder / mark).unlink()
        found[is_own][name] = fault
    return found


def _leave(folder: Path, mark: str) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _try_own(folder: Path, mark: str, rank: int) -> str:
    """Return why a folder is not one of this host alone that can be written to; rank 0 has marked its own."""
    if (folder / mark).exists():
        return f"{folder} is the same folder as on the host of rank 0"
    fault = _leave(folder, f"{mark}-{rank}")
    with suppress(OSError):
        (folder / f"{mark}-{rank}").unlink()
    return fault


def _measure_all_reduce(device: torch.device) -> dict[str, float]:
    """Return the seconds of one all-reduce, and its bytes per second per link ("bus bandwidth")."""
    numbers = torch.ones(_BYTES[device.type] // 4, device=device)
    size = distributed.get_world_size()
    distributed.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(_ROUNDS):
        distributed.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begun) / _ROUNDS
    carried = 2 * (size - 1) / size * numbers.nbytes
    return {"bytes": float(numbers.nbytes), "seconds": seconds, "bytes_per_second": carried / seconds}
