"""Optional packages: imported where a setting asks for them, or refused with what to install."""

import importlib
from types import ModuleType

from neox_model.errors import ModelError

__all__ = ["MissingPackageError", "require"]


class MissingPackageError(ModelError):
    """A setting or command needs a package that is not installed."""


def require(package: str, *, because: str, install: str) -> ModuleType:
    """Import a package that is not a dependency.

    Args:
        package: name to import.
        because: the setting or command that needs it.
        install: what to give pip.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"{because} needs the package {package}, which is not installed; "
            f"install it with: pip install {install}"
        ) from error
