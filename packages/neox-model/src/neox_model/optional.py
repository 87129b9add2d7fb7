"""Import optional packages, with an error message that names the package to install."""

import importlib
from types import ModuleType

from neox_model.errors import ModelError

__all__ = ["MissingPackageError", "require"]


class MissingPackageError(ModelError):
    """Raised when a setting or command requires a package that is not installed."""


def require(package: str, *, because: str, install: str) -> ModuleType:
    """Import a package that is not a dependency.

    Args:
        package: name to import.
        because: the setting or command that requires it.
        install: name to pass to pip.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"{because} requires the package {package}, which is not installed; "
            f"install it with: pip install {install}"
        ) from error
