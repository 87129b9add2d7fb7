"""Limits of the system that end a process are named, with their values and the remedy."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest

from neox_config.errors import NeoXError
from neox_config.limits import limit_reached
from support.refusals import shows

_FILES = """
import resource, sys
from neox_config.errors import NeoXError
from neox_config.limits import allow_more_files
from neox_launcher.worker.reporting import report_failure

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50))
allow_more_files()
opened = []
try:
    while True:
        opened.append(open("/dev/null"))
except OSError as error:
    failure = error
if sys.argv[1] == "ours":
    failure = NeoXError("no data; check its disk")
    failure.__cause__ = OSError(24, "Too many open files")
if sys.argv[1] == "library":
    failure = RuntimeError("Cannot resolve a name")
sys.exit(report_failure(3, failure))
"""
_MEMORY = """
import ctypes, mmap, os, resource
from neox_config.limits import limit_reached

resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setuid(65534)  # The limit does not hold for root.
memory = mmap.mmap(-1, 2**20)
libc = ctypes.CDLL(None, use_errno=True)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(2**20)) == -1
number = ctypes.get_errno()
print(limit_reached(OSError(number, f"mlock: {os.strerror(number)}")))
"""


def run(program, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("raised", "message"),
    [("system", "OSError: "), ("ours", "no data: "), ("library", "RuntimeError: Cannot resolve a name: ")],
)
def test_a_worker_without_a_free_descriptor_reports_its_limit(tmp_path, raised, message):
    """The soft limit was raised to the hard one first, and the report itself requires a descriptor."""
    done = run(_FILES, raised, NEOX_RUN_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads((tmp_path / "rank-3.error.json").read_text())
    assert report["traceback"] is None
    assert report["message"].startswith(message)
    assert shows(report["message"], "50", "50")


_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes."


def _ours() -> NeoXError:
    error = NeoXError("cannot read c (Cannot allocate memory); check its permissions and its disk")
    error.__cause__ = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(_ALLOCATOR),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        _ours(),
    ],
    ids=str,
)
@pytest.mark.parametrize(("limit", "option"), [(resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")])
def test_a_limit_on_memory_is_named_in_place_of_another_cause(monkeypatch, error, limit, option):
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(
        "neox_config.limits.resource.getrlimit",
        lambda which: (8_388_608, unlimited) if which == limit else (unlimited, unlimited),
    )
    found = str(limit_reached(error))
    assert shows(found, "8,388,608 bytes", f"ulimit {option}")
    assert f"{option} unlimited in" in found
    assert "too little free" not in found


def test_memory_that_may_not_be_locked_is_named_with_the_limit():
    done = run(_MEMORY)
    assert done.stderr == ""
    assert shows(done.stdout, "65,536 bytes", "65,536")
    assert "shell, service (LimitMEMLOCK)" in done.stdout


@pytest.mark.parametrize("text", ["Call to ibv_reg_mr failed with error Cannot allocate memory", "mlock"])
def test_libraries_raise_failures_to_lock_memory_as_text(monkeypatch, text):
    error = RuntimeError(text)
    error.__cause__ = OSError(errno.ENOMEM, "mlock: Cannot allocate memory") if text == "mlock" else None
    monkeypatch.setattr("neox_config.limits.resource.getrlimit", lambda which: (8_388_608, -1))
    assert "8,388,608 bytes of" in str(limit_reached(error))
    monkeypatch.setattr("neox_config.limits.resource.getrlimit", lambda which: (-1, -1))
    assert limit_reached(error) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("unable to open shared memory object: Too many open files (24)"), "ulimit -n"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "sysctl fs.file-max"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None),
        (NeoXError("Too many open files: raise it with ulimit -n"), None),
        (ValueError("24"), None),
        (
            RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {_ALLOCATOR}"),
            "this host has too little",
        ),
        (RuntimeError(_ALLOCATOR), "or start fewer workers"),
        (MemoryError(), "this host has too little"),
        (RuntimeError("can't start new thread"), None),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), None),
        (NeoXError(f"the device has too little memory: {_ALLOCATOR}; set a smaller"), None),
    ],
)
def test_other_errors_are_left_alone(error, expected):
    found = limit_reached(error)
    assert expected in found if expected else found is None


def test_a_chain_of_errors_that_ends_where_it_began_is_followed_once():
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert limit_reached(one) is None
