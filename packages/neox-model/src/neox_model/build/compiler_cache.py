"""Where torch keeps what it compiles: it is loaded and run, so nobody else may have put it there."""

import os
import stat
import tempfile
from pathlib import Path

from neox_model.errors import ModelError

__all__ = ["private_compiler_cache"]


def private_compiler_cache() -> None:
    """Keep what torch compiles in a folder of this user's alone, on this host.

    torch's own choice has a name that others know and can make first. On a disk of this host's, the locks
    in it are the kernel's, which die with their holder. `TORCHINDUCTOR_CACHE_DIR` names another folder.
    Each rank compiles by itself, where torch would start a process per core for each of them.

    Raises:
        ModelError: the folder belongs to somebody else, or others can write into it.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"neox-compiled-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise ModelError(
            f"what torch compiles cannot be kept in {folder}, which is not this user's alone; remove it, or "
            "name another folder in TORCHINDUCTOR_CACHE_DIR"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
