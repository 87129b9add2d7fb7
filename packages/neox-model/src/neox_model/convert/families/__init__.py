"""The classes of transformers that can be converted, by their `model_type`."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from neox_config.facts.hugging_face import CLASSES
from neox_config.spec.model import ModelSpec
from neox_model.convert.classes import model_type_of
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import Family

__all__ = ["FAMILIES", "Family", "family_of_config", "fitting_family"]

_MODULES = [import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)]
_TABLES = {
    each.name: each for module in _MODULES for each in vars(module).values() if isinstance(each, Family)
}
FAMILIES: Mapping[str, Family] = {name: _TABLES[name] for name in CLASSES}


def fitting_family(spec: ModelSpec, name: str | None) -> Family:
    """Return the class that computes a model.

    Args:
        spec: the model.
        name: `model_type` to use; None: the first one that fits.
    """
    # What a class does not have does not come back.
    lacks = {each.name: differences(spec, each.read(each.write(spec))) for each in FAMILIES.values()}
    fitting = [FAMILIES[each] for each, options in lacks.items() if not options]
    if not fitting:
        rows = sorted(lacks.items(), key=lambda item: len(item[1]))
        lines = "\n".join(f"  {FAMILIES[each].class_name}: {'; '.join(options)}" for each, options in rows)
        raise ConversionError(
            f"no class of transformers computes this model; options that each does not have:\n{lines}\n"
            "train a model without these options to export it"
        )
    chosen = fitting[0] if name is None else FAMILIES[name]
    if lacks[chosen.name]:
        raise ConversionError(
            f"{chosen.class_name} does not have options of this model: {'; '.join(lacks[chosen.name])}; "
            f"{fitting[0].class_name} has them: pass --family {fitting[0].name} (hf-family in a file)"
        )
    return chosen


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the class that a config.json names."""
    return FAMILIES[model_type_of(config)]
