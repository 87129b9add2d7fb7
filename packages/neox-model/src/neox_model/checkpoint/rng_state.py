"""The random generators of one rank as tensors: python's, numpy's, torch's and its device's.

The parallel random streams have no state beyond these (`neox_model.parallel.random`).
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture", "restore"]


def capture() -> dict[str, Tensor]:
    """The state of every default generator, by generator; flat tensors on the CPU."""
    _, python_words, python_gauss = random.getstate()
    from_numpy = np.random.get_state(legacy=False)
    assert isinstance(from_numpy, dict), "asked for the dictionary form"
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


def restore(states: Mapping[str, Tensor]) -> None:
    """Put every generator back where `capture` found it; a device that is not here is left out."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *words, position, has_gauss = states["numpy"].tolist()
    numpy_gauss = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, numpy_gauss))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
