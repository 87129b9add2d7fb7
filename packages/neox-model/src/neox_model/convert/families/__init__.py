"""The classes of transformers that can be converted, by their `model_type`."""

from collections.abc import Mapping
from typing import Any

from neox_config.spec.model import ModelSpec
from neox_model.convert.classes import model_type_of
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import Family
from neox_model.convert.families.gemma import GEMMA2, GEMMA3
from neox_model.convert.families.gpt2 import GPT2
from neox_model.convert.families.gpt_neox import GPT_NEOX
from neox_model.convert.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from neox_model.convert.families.olmo import OLMO2, OLMO3
from neox_model.convert.families.opt import OPT
from neox_model.convert.families.phi3 import PHI3
from neox_model.convert.families.smollm import SMOLLM3

__all__ = ["FAMILIES", "Family", "family_of_config", "fitting_family"]

_ALL = (*(GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, GEMMA2, GEMMA3, SMOLLM3, PHI3, OPT),)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}


def fitting_family(spec: ModelSpec, name: str | None) -> Family:
    """Return the class that computes a model.

    Args:
        spec: the model.
        name: `model_type` to use; None: the first one that fits.
    """
    # What a class does not have does not come back.
    lacks = {
        each.name: list(map(str, differences(spec, each.read(each.write(spec)))))
        for each in FAMILIES.values()
    }
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
