"""Published models by name: their architecture as a file of parameters, and what is known of their weights.

The files are in the folder `models` next to this module, so that an installed package has them;
`configs/models` is a link to it.
"""

from neox_config.catalogue.published import PUBLISHED, Published
from neox_config.catalogue.reading import Model, find_model, model_names

__all__ = ["PUBLISHED", "Model", "Published", "find_model", "model_names"]
