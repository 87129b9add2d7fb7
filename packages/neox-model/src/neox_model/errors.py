"""What the model's parts raise when they are asked for something that cannot be."""

from neox_launcher.errors import NeoXError

__all__ = ["LayoutError", "ModelError"]


class ModelError(NeoXError):
    """Base of this package's errors about the model and its parts."""


class LayoutError(ModelError):
    """Sizes that do not fit together: heads and ranks, widths and heads, stages and layers."""

    exit_code = 2
