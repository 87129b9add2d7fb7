"""Reads the models of the catalogue."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from neox_config.catalogue.published import PUBLISHED, Published
from neox_config.errors import ConfigError
from neox_config.estimate.parameters import count_parameters
from neox_config.problems import did_you_mean
from neox_config.read.load import load_config
from neox_config.read.reading import Text
from neox_config.spec.resolve import Resolved, resolve

__all__ = ["Model", "find_model", "model_names"]

_FOLDER = Path(__file__).parent / "models"

# What a configuration requires in addition to a model, without effect on its parameters.
_TRAINING = """
train-iters: 1
train-micro-batch-size-per-gpu: 1
optimizer: {type: Adam, params: {lr: 0.001}}
"""


@dataclass(frozen=True)
class Model:
    """A model of the catalogue.

    Args:
        name: its name in the catalogue.
        published: facts about its published weights.
    """

    name: str
    published: Published

    @property
    def path(self) -> Path:
        """File of its parameters."""
        return _FOLDER / f"{self.name}.yml"

    @cached_property
    def text(self) -> str:
        """Text of the file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def resolved(self) -> Resolved:
        """Its parameters, with a run on one device."""
        texts = (Text(self.text, self.name), Text(_TRAINING, "training"))
        return resolve(load_config([], texts=texts), devices=1)

    def count(self, rows: int | None = None) -> dict[str, int]:
        """Return the number of parameters by part of the model.

        Args:
            rows: rows of the token embedding; None: those of the published weights.
        """
        model = self.resolved.model
        return count_parameters(model, model.embedding.entries(rows or self.published.rows))


def model_names() -> tuple[str, ...]:
    """Return the names of the models, by family and size."""
    return tuple(PUBLISHED)


def find_model(name: str) -> Model:
    """Return a model of the catalogue.

    Raises:
        ConfigError: there is no model with this name.
    """
    if name not in PUBLISHED:
        # Names of the Hugging Face Hub begin with their owner.
        near = did_you_mean(name.rpartition("/")[2], PUBLISHED) or f"the models are {', '.join(PUBLISHED)}"
        raise ConfigError(f"{name} is not a model of the catalogue; {near}")
    return Model(name, PUBLISHED[name])
