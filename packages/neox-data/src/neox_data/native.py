"""The compiled twin of the slow loops, where the package was installed with a compiler.

Its functions give what the numpy ones give, item for item (the tests compare); only time depends on it.
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
    """The extension, or None where it was not built; which of them is logged, once."""
    if _extension is None:
        logger.info("samples and their orders: numpy, because the extension was not built (%s)", _absence)
    else:
        logger.info("samples and their orders: native")
    return _extension
