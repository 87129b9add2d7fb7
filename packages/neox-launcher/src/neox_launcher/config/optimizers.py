"""What is known about each optimizer: the rules, the reference and the tests read it here.

An optimizer is elementwise where the update of an element depends on the gradients of that element alone.
Only such an optimizer gives the same update for any part of a weight, as ZeRO and tensor parallelism need it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OPTIMIZER_FACTS", "OptimizerFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer.

    Args:
        name: as the documents spell it; compared in lower case.
        states: tensors that it may keep for each weight, in the weight's shape.
        numbers: single numbers that it keeps for each weight.
        other_shapes: tensors that it keeps for each weight, in other shapes and smaller.
        optional: states that it keeps only with an argument -> that argument.
        arguments: what it takes in addition to `lr` and `weight_decay`; if not torch's, to the declared
            parameters of `optimizer.params`.
        refused: arguments that the class takes and that cannot be given here, and why.
        is_of_torch: a class of torch.optim under its own name.
        is_elementwise: the update of an element depends on that element's gradients alone.
        is_tried_with_zero: DeepSpeed has tried it with ZeRO; any other needs zero_allow_untested_optimizer.
        skips_on_device: skips an update that is not finite without the host; with any other optimizer the
            host reads one number per update.
        decays_weights: applies weight decay.
        remark: what else a user must know, a sentence.
    """

    name: str
    states: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("step",)
    other_shapes: tuple[str, ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    is_of_torch: bool = False
    is_elementwise: bool = True
    is_tried_with_zero: bool = False
    skips_on_device: bool = False
    decays_weights: bool = True
    remark: str = ""

    @property
    def kept(self) -> tuple[str, ...]:
        """Everything that a checkpoint may hold of the optimizer, for each weight."""
        return (*self.numbers, *self.states, *self.other_shapes)

    def values_per_element(self, given: Mapping[str, Any]) -> int:
        """How many values it keeps for each element of a weight.

        Args:
            given: its arguments.
        """
        return sum(name not in self.optional or bool(given.get(self.optional[name])) for name in self.states)


_MOMENTS = ("exp_avg", "exp_avg_sq")

_NEVER_USED = {
    "capturable": "is for CUDA graphs, which are not used here",
    "differentiable": "is for gradients through the update, which are not computed here",
    "maximize": "would raise the loss",
}


def _of_torch(
    name: str,
    states: tuple[str, ...],
    *arguments: str,
    refused: Mapping[str, str] | None = None,
    **facts: object,
) -> OptimizerFacts:
    """Describe a class of torch.optim; most take the arguments of `_NEVER_USED`."""
    return OptimizerFacts(
        name=name,
        states=states,
        arguments=(*arguments, "foreach"),
        refused=_NEVER_USED if refused is None else refused,
        is_of_torch=True,
        **facts,  # type: ignore[arg-type]
    )


_NOT_CAPTURABLE = {name: why for name, why in _NEVER_USED.items() if name != "capturable"}
_ADAFACTOR = {
    "maximize": _NEVER_USED["maximize"],
    "eps": "is a pair of numbers in Adafactor, which always uses its default here",
}

OPTIMIZER_FACTS: Mapping[str, OptimizerFacts] = {
    facts.name.lower(): facts
    for facts in (
        OptimizerFacts(name="Adam", states=_MOMENTS, is_tried_with_zero=True, skips_on_device=True),
        OptimizerFacts(name="AdamW", states=_MOMENTS, is_tried_with_zero=True, skips_on_device=True),
        OptimizerFacts(name="CPU_Adam", states=_MOMENTS, is_tried_with_zero=True, skips_on_device=True),
        OptimizerFacts(name="CPU_torch_adam", states=_MOMENTS, is_tried_with_zero=True),
        OptimizerFacts(name="Lamb", states=_MOMENTS, is_elementwise=False),
        OptimizerFacts(name="OneBitAdam", states=_MOMENTS, is_tried_with_zero=True),
        OptimizerFacts(name="OneBitLamb", states=_MOMENTS, is_elementwise=False),
        OptimizerFacts(name="ZeroOneAdam", states=_MOMENTS, is_tried_with_zero=True),
        OptimizerFacts(
            name="SM3", states=("momentum_buffer",), arguments=("momentum", "beta"), is_elementwise=False
        ),
        OptimizerFacts(
            name="madgrad_wd",
            states=("start", "grad_sum", "grad_sum_sq"),
            arguments=("momentum",),
        ),
        _of_torch("Adadelta", ("square_avg", "acc_delta"), "rho", "eps"),
        _of_torch(
            "Adafactor",
            (),
            "beta2_decay",
            "d",
            refused=_ADAFACTOR,
            other_shapes=("row_var", "col_var", "variance"),
            is_elementwise=False,
        ),
        _of_torch(
            "Adagrad",
            ("sum",),
            "lr_decay",
            "initial_accumulator_value",
            "eps",
            "fused",
            refused=_NOT_CAPTURABLE,
        ),
        _of_torch("Adamax", ("exp_avg", "exp_inf"), "betas", "eps"),
        _of_torch(
            "ASGD",
            ("ax",),
            "lambd",
            "alpha",
            "t0",
            numbers=("step", "eta", "mu"),
            remark="The averages `ax` are kept, and the model is the last weights, not their average.",
        ),
        _of_torch(
            "NAdam",
            _MOMENTS,
            "betas",
            "eps",
            "momentum_decay",
            "decoupled_weight_decay",
            numbers=("step", "mu_product"),
        ),
        _of_torch("RAdam", _MOMENTS, "betas", "eps", "decoupled_weight_decay"),
        _of_torch(
            "RMSprop",
            ("square_avg", "momentum_buffer", "grad_avg"),
            "alpha",
            "eps",
            "momentum",
            "centered",
            optional={"momentum_buffer": "momentum", "grad_avg": "centered"},
        ),
        _of_torch(
            "Rprop",
            ("prev", "step_size"),
            "etas",
            "step_sizes",
            decays_weights=False,
            remark="The learning rate of the first update is the first step size; later ones have no effect.",
        ),
        _of_torch(
            "SGD",
            ("momentum_buffer",),
            "momentum",
            "dampening",
            "nesterov",
            "fused",
            refused=_NOT_CAPTURABLE,
            numbers=(),
            optional={"momentum_buffer": "momentum"},
        ),
    )
}
"""Name in lower case to what is known."""
