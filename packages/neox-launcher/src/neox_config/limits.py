"""Limits of the system on a process: which one an error comes from, its value, and what to do."""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress

from neox_config.errors import NeoXError

__all__ = ["allow_more_files", "limit_reached"]

# Usual limit of Linux on the hard limit (fs.nr_open).
_MOST_FILES = 1_048_576
# What locks memory: system calls, network cards, and CUDA; PyTorch and NCCL raise their failures as text.
_LOCKING = re.compile(r"mlock|ibv_reg_mr|io_uring|cudaHost|pin_memory|pinned|locked memory", re.IGNORECASE)
# PyTorch's allocator on a CPU raises a plain RuntimeError.
_NO_HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't|not enough) |enforce fail at alloc_cpu\.cpp")
# What a limit on the memory also causes: in libraries, in the loader, and in threads.
_NO_ADDRESSES = re.compile(
    r"std::bad_alloc|failed to map segment from shared object|can't start new thread|"
    + re.escape(os.strerror(errno.ENOMEM))
)
# Limits of memory, with their options of ulimit and their names in a service.
_OF_MEMORY = ((resource.RLIMIT_AS, "v", "LimitAS"), (resource.RLIMIT_DATA, "d", "LimitDATA"))
# A library that cannot open a file may raise any error.
_FEW_FILES = 4
_SMALLER = (
    "set a smaller train-micro-batch-size-per-gpu or a smaller model (neox-config estimate shows what needs "
    "the memory)"
)
_NO_MEMORY = (errno.ENOMEM, errno.EAGAIN, errno.EPERM)
_WHERE = "in the shell, service (LimitNOFILE) or job that starts the program"


def allow_more_files() -> None:
    """Raise this process's limit of open files to the hard limit, which an ordinary user cannot raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # The limit of the kernel may be lower.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_reached(error: BaseException) -> str | None:
    """Return the limit of the system, memory included, that an error comes from, and the remedy, or None.

    Errors of libraries, and of other ranks, are recognized by their text.
    """
    # Other errors of ours name their own remedies.
    is_ours = isinstance(error, NeoXError)
    if not is_ours and (_NO_HOST_MEMORY.search(str(error)) or isinstance(error, MemoryError)):
        return _memory() or (
            f"this host has too little free memory for its workers; {_SMALLER}, or start fewer workers"
        )
    for each in _chain(error):
        number, text = getattr(each, "errno", None), str(each)
        if "ulimit -" in text:
            return None  # Named already.
        # First, because its text begins with that of the other.
        if _is(errno.ENFILE, number, text):
            return "this host has reached its limit of open files; raise it with sysctl fs.file-max"
        if _is(errno.EMFILE, number, text):
            return _open_files()
        if _LOCKING.search(text) and any(_is(code, number, text) for code in _NO_MEMORY):
            return _locked_memory()
        if number == errno.ENOMEM or _NO_ADDRESSES.search(text):
            return _memory()
    return None if is_ours or _can_open_files() else _open_files()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from or during."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _is(code: int, number: object, text: str) -> bool:
    return number == code or os.strerror(code) in text


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has reached its limit of open files, {_count(soft)} (hard limit {_count(hard)}); "
        f"raise it with ulimit -n {_WHERE}; if it is the hard limit, the administrator raises it (nofile in "
        "/etc/security/limits.conf)"
    )


def _can_open_files() -> bool:
    """Return whether this process can still open some files."""
    opened: list[int] = []
    try:
        opened += (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_FEW_FILES))
    except OSError as error:
        return error.errno != errno.EMFILE
    finally:
        for each in opened:
            os.close(each)
    return True


def _memory() -> str | None:
    """Return the limit on the memory of this process; None if there is none."""
    for limit, letter, service in _OF_MEMORY:
        soft, hard = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            return (
                f"this process may use {_count(soft)} bytes of memory (ulimit -{letter}, hard limit "
                f"{_count(hard)}), and torch alone maps more than it uses; raise it with ulimit -{letter} "
                f"unlimited {_WHERE.replace('LimitNOFILE', service)}"
            )
    return None


def _locked_memory() -> str | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None  # The memory itself is short.
    return (
        f"this process may lock {_count(soft)} bytes of memory (hard limit {_count(hard)}), and network "
        "cards and pinned memory require more; raise it with ulimit -l unlimited "
        f"{_WHERE.replace('NOFILE', 'MEMLOCK')}; if it is the hard limit, the administrator raises it "
        "(memlock in /etc/security/limits.conf)"
    )


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
