"""Looking a configured name up among the implementations."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from neox_model.errors import ModelError

__all__ = ["DTYPES", "pick"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Choice = TypeVar("Choice")


def pick(table: Mapping[str, Choice], value: str, parameter: str) -> Choice:
    """The implementation of that name.

    Args:
        table: name -> implementation.
        value: the configured name.
        parameter: whose value it is, for the message.

    Raises:
        ModelError: this version has none of that name.
    """
    if value not in table:
        raise ModelError(
            f"{parameter}: {value!r} has no implementation in this version; choose one of {', '.join(table)}"
        )
    return table[value]
