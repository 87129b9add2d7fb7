"""What a job holds alone while it runs: the folder that it saves to, the address on which it listens.

Workers claim both. The launcher looks whether another process has them, before any worker imports torch.
"""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from neox_config.errors import NeoXError

__all__ = [
    "SAVES_TO",
    "bound_socket",
    "cannot_listen",
    "folder_in_use",
    "is_locked",
    "lock_of",
    "name_holder",
]

SAVES_TO = "saves to"
"""What a run that holds the lock of its `save` folder does with it."""
_HOLDER_BYTES = 512


def lock_of(folder: Path) -> Path:
    """Return the file that the kernel locks while a run uses a folder."""
    return folder / ".lock"


def is_locked(folder: Path) -> bool:
    """Return whether another run uses a folder; False if that cannot be seen from here."""
    try:
        file = os.open(lock_of(folder), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that processes that only look do not see each other.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # Some network file systems have no locks.
        return False
    finally:
        os.close(file)
    return False


def name_holder(folder: Path) -> None:
    """Write this process into the file that it has locked, for the messages of others."""
    with suppress(OSError):  # On a full disk these messages lack it.
        lock_of(folder).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")


def folder_in_use(folder: Path | str, use: str) -> str:
    """Return the message for a folder that another run uses.

    Args:
        folder: the folder.
        use: what the other run does with it, such as `saves to`.
    """
    try:
        with lock_of(Path(folder)).open(encoding="utf-8") as file:
            holder = file.read(_HOLDER_BYTES).strip()
    except (OSError, ValueError):  # The message only lacks the name.
        holder = ""
    named = f" ({holder})" if holder else ""
    return f"another run{named} {use} {folder}; wait until it has ended, or use another folder"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address on which no other socket listens.

    Raises:
        NeoXError: the address is not one of this machine, or is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        # Names that no name server can have are errors of Python's codec.
        reason = error.strerror if isinstance(error, OSError) else error
        raise NeoXError(
            f"serve.host {host} cannot be used: {reason}; set another one", code="unknown-host"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error) from error
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> NeoXError:
    """Return the error for an address that cannot be listened on."""
    return NeoXError(
        f"cannot listen on {host} port {port}: {error.strerror}; set serve.port to another port (0: a "
        "free one), or serve.host to an address of this machine",
        code="cannot-listen",
    )
