"""Read what torch.save wrote for GPT-NeoX, without running anything in it.

torch's own restricted unpickler reads the file (`torch.load(weights_only=True)`): it calls no function and
builds no object whose name is not allowed, and it has tensors, dictionaries and numbers. The names allowed in
addition are below. None of them is imported: an argument object becomes a dictionary, and what a conversion
does not use, such as the state of a random generator, becomes an object without behavior. Another unpickler
would have to repeat torch's for tensors, and a subclass of Python's runs what it does not forbid.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from neox_model.convert.errors import ConversionError
from neox_model.convert.weights import UNREADABLE

__all__ = ["Arguments", "read_record"]


class Arguments(dict[str, Any]):
    """An object with attributes, such as the arguments of a program, as a dictionary."""

    def __setstate__(self, state: Any) -> None:
        """Take the attributes."""
        if not isinstance(state, Mapping):
            raise TypeError("the attributes of an argument object are not a dictionary")
        self.update(state)


class Unused:
    """A value that no conversion uses; it keeps nothing and does nothing."""

    def __init__(self, *_: Any) -> None:
        """Take any arguments."""

    def __new__(cls, *_: Any) -> "Unused":
        """Take any arguments."""
        return super().__new__(cls)

    __setstate__ = __init__


_ARGUMENTS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "megatron.neox_arguments.arguments.NeoXArgs",
)
_UNUSED = (
    # States of random generators.
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    # States of loss scaling.
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)


@contextmanager
def _allowing_alone(allowed: list[Any]) -> Iterator[None]:
    """Allow these, and not what a library has allowed, numpy's own functions among them."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(allowed):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


def read_record(path: Path) -> Mapping[str, Any]:
    """Return the dictionary in a file; its tensors are mapped into memory."""
    allowed: list[Any] = [(Arguments, name) for name in _ARGUMENTS]
    allowed += [(Unused, name) for name in _UNUSED]
    with _allowing_alone(allowed):
        try:
            # The parts of the archive are mapped.
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                    raise ValueError("it was compressed after it was saved")
            unknown = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            found = None if unknown else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UNREADABLE as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConversionError(
                f"cannot read {path}: it is damaged, in torch's format of before version 1.6, or contains "
                f"something other than tensors and plain values ({reason}); copy it again"
            ) from error
    if unknown:
        raise ConversionError(
            f"{path} contains {', '.join(unknown)}, which is neither a tensor nor a plain value; nothing in "
            "the file was run, and it was not loaded; use a checkpoint from a source that you trust, saved "
            "without it"
        )
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise ConversionError(f"{path} does not contain a dictionary; copy it again")
    return found
