"""Set the folder of torch's compiler cache, whose files are loaded and run, to a private one."""

import os
import stat
import tempfile
from pathlib import Path

from neox_model.errors import ModelError

__all__ = ["private_compiler_cache"]


def private_compiler_cache() -> None:
    """Set torch's compiler cache to a folder on this host that only this user can access.

    torch's default folder has a predictable name, so another user could create it first. On a local disk the
    kernel releases the locks in it when their process ends. `TORCHINDUCTOR_CACHE_DIR` overrides the folder.
    Each rank compiles in its own process; by default torch would start a process per core for each rank.

    Raises:
        ModelError: the folder belongs to another user, or other users can write to it.
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
            f"cannot use {folder} as torch's compiler cache, because other users can access it; remove it, "
            "or set TORCHINDUCTOR_CACHE_DIR to another folder"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
