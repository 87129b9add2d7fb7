"""Capture and restore the random generators of one rank: python, numpy, torch and its device.

The parallel random streams have no other state (`neox_model.parallel.random`).
"""

import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neox_model.checkpoint.blocks import whole_block
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import DamagedCheckpointError, DamagedManifestError, quoted
from neox_model.checkpoint.names import rng_prefix
from neox_model.checkpoint.shards import ShardReader

__all__ = ["capture", "check", "read", "restore"]


def capture() -> dict[str, Tensor]:
    """Return the state of every default generator, by name, as flat tensors on the CPU."""
    _, python_words, python_gauss = random.getstate()
    from_numpy = np.random.get_state(legacy=False)
    assert isinstance(from_numpy, dict), "legacy=False returns a dictionary"
    twister = from_numpy["state"]
    states = {
        "python": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
        "numpy": torch.tensor(
            [*twister["key"].tolist(), twister["pos"], from_numpy["has_gauss"]], dtype=torch.int64
        ),
        "numpy_gauss": torch.tensor([from_numpy["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def read(manifest: Manifest, reader: ShardReader, rank: int) -> dict[str, Tensor] | None:
    """Read and check the states of a rank's generators; None if they were not saved.

    Args:
        manifest: the checkpoint's.
        reader: reads its shards.
        rank: of the run that wrote it.

    Raises:
        DamagedCheckpointError: a state is damaged.
    """
    prefix = rng_prefix(rank)
    records = {name: record for name, record in manifest.tensors.items() if name.startswith(prefix)}
    if not records:
        return None
    states = {}
    for name, record in records.items():
        if len(record.shape) != 1:
            raise DamagedManifestError(f"{quoted(name)} is not one-dimensional")
        # Before memory is allocated for a size that the manifest only claims.
        reader.check([(name, (whole_block(record.shape), 0, record.shape[0]), None)])
        states[name.removeprefix(prefix)] = reader.values(name)
    check(states)
    return states


def check(states: Mapping[str, Tensor]) -> None:
    """Restore captured states into new generators, so that `restore` finds nothing wrong.

    Raises:
        DamagedCheckpointError: a state is missing or cannot be restored.
    """
    for name, (dtype, sizes) in _FORMS.items():
        state = states.get(name)
        if state is None or state.dtype != dtype or (sizes is not None and state.numel() not in sizes):
            raise DamagedCheckpointError(f"the state {name!r} of the random generators is missing or damaged")
    try:
        random.Random().setstate(_python_state(states))
        np.random.RandomState().set_state(_numpy_state(states))
        torch.Generator().set_state(states["torch"])
    except (ValueError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"the states of the random generators are damaged: {quoted(str(error))}"
        ) from error


def restore(states: Mapping[str, Tensor]) -> None:
    """Restore every generator to a captured state; skip a device that does not exist here."""
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _python_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gauss = states["python_gauss"].tolist()
    return 3, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    *words, position, has_gauss = states["numpy"].tolist()
    return "MT19937", np.array(words, dtype=np.uint32), position, has_gauss, states["numpy_gauss"].item()


# The dtype and the permitted numbers of elements of each state; torch checks the sizes of its states.
_FORMS: Mapping[str, tuple[torch.dtype, Collection[int] | None]] = {
    "python": (torch.int64, (625,)),
    "python_gauss": (torch.float64, (0, 1)),
    "numpy": (torch.int64, (626,)),
    "numpy_gauss": (torch.float64, (1,)),
    "torch": (torch.uint8, None),
}
