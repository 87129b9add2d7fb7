"""The classes of transformers that can be converted, by their `model_type`."""

from collections.abc import Mapping
from typing import Any

from neox_config.spec.model import ModelSpec
from neox_model.convert.classes import model_type_of
from neox_model.convert.differences import differences
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import Family
from neox_model.convert.families.gpt2 import GPT2
from neox_model.convert.families.gpt_neox import GPT_NEOX
from neox_model.convert.families.llama import LLAMA, MISTRAL, QWEN2

__all__ = ["FAMILIES", "Family", "family_of_config", "fitting_family"]

FAMILIES: Mapping[str, Family] = {family.name: family for family in (GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2)}


def fitting_family(spec: ModelSpec, name: str | None) -> Family:
    """Return the class that computes a model.

    Args:
        spec: the model.
        name: `model_type` to use; None: the first one that fits.

    Raises:
        ConversionError: it does not fit, or none does; the message lists the options that it or each lacks.
    """
    # What a class does not have does not come back.
    found = {each.name: differences(spec, each.read(each.write(spec))) for each in FAMILIES.values()}
    fitting = [family for family in FAMILIES.values() if not found[family.name]]
    if fitting and name is not None and found[name]:
        raise ConversionError(
            f"{FAMILIES[name].class_name} does not have options of this model: "
            f"{'; '.join(map(str, found[name]))}; {fitting[0].class_name} has them: pass --family "
            f"{fitting[0].name} (hf-family in a configuration)"
        )
    if fitting:
        return fitting[0] if name is None else FAMILIES[name]
    lines = [
        f"  {FAMILIES[each].class_name}: {'; '.join(map(str, found[each]))}"
        for each in sorted(found, key=lambda each: len(found[each]))
    ]
    raise ConversionError(
        "no class of transformers computes this model; options that each does not have:\n"
        + "\n".join(lines)
        + "\ntrain a model without these options to export it"
    )


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the class that a config.json names.

    Raises:
        ConversionError: it names none, or one that cannot be converted.
    """
    return FAMILIES[model_type_of(config)]
