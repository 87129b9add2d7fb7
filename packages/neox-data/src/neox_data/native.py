"""Load the compiled extension, which is built if the package is installed with a compiler.

Its functions return the same results as the numpy implementations, only faster.
"""

import logging
from functools import cache
from types import ModuleType

try:
    from neox_data import _native
except ImportError as error:
    _extension: ModuleType | None = None
    _absence = str(error)
else:
    _extension, _absence = _native, ""

__all__ = ["load_native"]

logger = logging.getLogger(__name__)


@cache
def load_native() -> ModuleType | None:
    """Return the extension, None if it was not built; log once if it was not."""
    if _extension is None:
        logger.info("sample index: numpy, because the extension was not built (%s)", _absence)
    return _extension
