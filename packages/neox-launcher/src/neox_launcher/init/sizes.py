"""Models of different sizes for texts without a given model."""

from collections.abc import Mapping
from dataclasses import dataclass

from neox_config.catalogue import find_model

__all__ = ["SIZES", "Candidate", "of_catalogue", "of_size"]

# Layers and width by name: the rounded number of parameters in the layers, 12 x layers x width x width.
SIZES: Mapping[str, tuple[int, int]] = {
    "1m": (4, 128),
    "3m": (4, 256),
    "10m": (6, 384),
    "25m": (8, 512),
    "85m": (12, 768),
    "300m": (24, 1024),
    "1.2b": (24, 2048),
}
_HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that could be trained.

    Args:
        name: its name.
        architecture: its parameters as YAML, without lengths.
        width: hidden size.
        most_positions: longest sequence; None: any.
    """

    name: str
    architecture: str
    width: int
    most_positions: int | None = None

    def text(self, seq_length: int) -> str:
        """Return its parameters as YAML for samples of a length, without `seq-length`."""
        if self.most_positions:
            return self.architecture
        return f"{self.architecture}\nmax-position-embeddings: {seq_length}"


def of_size(name: str) -> Candidate:
    """Return a model of a size."""
    layers, width = SIZES[name]
    lines = (
        f"num-layers: {layers}",
        f"hidden-size: {width}",
        f"num-attention-heads: {width // _HEAD_WIDTH}                # of size {_HEAD_WIDTH} each",
        "pos-emb: rotary",
    )
    return Candidate(name=name, architecture="\n".join(lines), width=width)


def of_catalogue(name: str) -> Candidate:
    """Return a model of the catalogue.

    Raises:
        ConfigError: there is no model with this name.
    """
    model = find_model(name)
    shape = model.resolved.config.model
    lines = (line for line in model.text.splitlines() if not line.startswith(("#", "make-vocab-size")))
    return Candidate(
        name=name,
        architecture="\n".join(lines).strip(),
        width=shape.hidden_size,
        most_positions=shape.max_position_embeddings,
    )
