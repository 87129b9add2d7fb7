"""The native stacks of a rank that crashes, from gdb.

A handler inside the process could neither name functions of torch, whose libraries have few exported names,
nor allocate memory where it is corrupted. A core dump is where the system's settings put it, and 200 MB
large. So a thread that receives a fatal signal waits, after faulthandler has written Python's stacks, until
gdb has read those of all threads.
"""

import ctypes
import faulthandler
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["native_stacks", "stop_if_crashed", "wait_on_crashes"]

# Those of faulthandler.
_FATAL = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1
_GDB_SECONDS = 300
_FRAMES = 40


def wait_on_crashes(report: Path) -> None:
    """Let this process wait for gdb when it receives a fatal signal, with Python's stacks in a file."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    # Where another process than the parent may read this one only if it allows it.
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
    # It calls the handlers that were set before.
    faulthandler.disable()
    for number in _FATAL:
        libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
    # faulthandler keeps the file open.
    faulthandler.enable(report.open("wb"), all_threads=True)


def stop_if_crashed(report: Path) -> None:
    """Wait to be killed if another thread of this process has crashed: the process must not succeed."""
    if report.exists() and report.stat().st_size:
        _wait()


def _wait() -> NoReturn:
    while True:
        time.sleep(1)


def native_stacks(process: int) -> str:
    """Return the native stacks of all threads of a process; without gdb, how to get them."""
    if shutil.which("gdb") is None:
        return "for the native stacks, install gdb"
    command = ["gdb", "-nx", "-quiet", "-batch", "-p", str(process)]
    command += ["-iex", "set debuginfod enabled off", "-ex", f"thread apply all backtrace {_FRAMES}"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GDB_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"gdb did not read the native stacks within {_GDB_SECONDS} s"
    _, found, stacks = done.stdout.partition("\nThread ")
    return f"native stacks:\n{found.strip()} {stacks}" if found else f"gdb read no stacks:\n{done.stderr}"
