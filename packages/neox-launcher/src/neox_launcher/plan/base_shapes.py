"""Write the sizes of a model as the base model of others (muP)."""

from pathlib import Path

from neox_config import NeoXConfig
from neox_config.atomic import atomic_write
from neox_config.spec.mup import base_shapes

__all__ = ["save_base_shapes"]


def save_base_shapes(config: NeoXConfig) -> Path:
    """Write `base_shapes_file`, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    assert config.mup.base_shapes_file is not None, "a rule requires it"
    path = Path(config.mup.base_shapes_file)
    with atomic_write(path) as file:
        for name, size in base_shapes(config, of_this_model=True).items():
            file.write(f"{name.replace('_', '-')}: {size}\n")
    return path
