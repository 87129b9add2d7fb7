"""Parameter groups with weight decay (matrices and embeddings) and without (biases and norm weights)."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Parameter

from neox_config.spec.run import Multipliers
from neox_model.parallel.logical import is_matrix

__all__ = ["split_by_kind", "split_by_multipliers", "split_by_weight_decay"]


def split_by_weight_decay(parameters: Iterable[Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer, those with weight decay first; empty groups are omitted.

    If a parameter has a logical tensor, the dimensions of that tensor count: under ZeRO stage 3 the parameter
    itself is an empty vector.

    Args:
        parameters: the model's parameters; each trainable one is used once.
        weight_decay: weight decay of the first group; the second has 0.
    """
    decayed: list[Parameter] = []
    plain: list[Parameter] = []
    seen: set[int] = set()
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            (decayed if is_matrix(parameter) else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_by_kind(groups: Iterable[dict[str, Any]], matrices: set[int]) -> list[dict[str, Any]]:
    """Return parameter groups in which `is_of_matrices` is the same for all; empty groups are omitted.

    Args:
        groups: parameter groups; each is divided.
        matrices: ids of the parameters for which it is True.
    """
    divided = [
        {**group, "params": [each for each in group["params"] if (id(each) in matrices) is is_matrix]}
        | {"is_of_matrices": is_matrix}
        for group in groups
        for is_matrix in (True, False)
    ]
    return [group for group in divided if group["params"]]


def split_by_multipliers(
    groups: Iterable[dict[str, Any]],
    multipliers_of: Callable[[Parameter], Multipliers],
    *,
    eps: float | None,
) -> list[dict[str, Any]]:
    """Return parameter groups in which all have the same multipliers of rate, weight decay and epsilon.

    Args:
        groups: parameter groups with `weight_decay`; each is divided.
        multipliers_of: function that returns the multipliers of a parameter.
        eps: epsilon of the optimizer; None: it has none.
    """
    divided: list[dict[str, Any]] = []
    for group in groups:
        parts: dict[tuple[float, float, float], list[Parameter]] = {}
        for parameter in group["params"]:
            found = multipliers_of(parameter)
            parts.setdefault((found.rate, found.decay, found.epsilon), []).append(parameter)
        for (rate, decay, epsilon), parameters in parts.items():
            of_part = {"weight_decay": group["weight_decay"] * decay, "rate_multiplier": rate}
            of_eps = {} if eps is None else {"eps": eps * epsilon}
            divided.append({**group, "params": parameters, **of_part, **of_eps})
    return divided
