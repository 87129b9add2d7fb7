"""What is known about each optimizer: the rules, the reference and the tests read it here.

An optimizer is elementwise where the update of an element depends on the gradients of that element alone.
Only such an optimizer gives the same update for any part of a weight, as ZeRO and tensor parallelism need it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OPTIMIZER_FACTS", "OptimizerFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer.

    Args:
        name: as the documents spell it; compared in lower case.
        states: what it may keep for each weight, and what a checkpoint stores.
        arguments: what it takes beside `lr` and `weight_decay`; where it is not torch's, beside the declared
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
    arguments: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    is_of_torch: bool = False
    is_elementwise: bool = True
    is_tried_with_zero: bool = False
    skips_on_device: bool = False
    decays_weights: bool = True
    remark: str = ""


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")

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
        OptimizerFacts(name="Lamb", is_elementwise=False),
        OptimizerFacts(name="OneBitAdam", is_tried_with_zero=True),
        OptimizerFacts(name="OneBitLamb", is_elementwise=False),
        OptimizerFacts(name="ZeroOneAdam", is_tried_with_zero=True),
        OptimizerFacts(name="SM3", arguments=("momentum", "beta"), is_elementwise=False),
        OptimizerFacts(
            name="madgrad_wd",
            states=("step", "start", "grad_sum", "grad_sum_sq"),
            arguments=("momentum",),
        ),
        _of_torch("Adadelta", ("step", "square_avg", "acc_delta"), "rho", "eps"),
        _of_torch(
            "Adafactor",
            ("step", "row_var", "col_var", "variance"),
            "beta2_decay",
            "d",
            refused=_ADAFACTOR,
            is_elementwise=False,
        ),
        _of_torch(
            "Adagrad",
            ("step", "sum"),
            "lr_decay",
            "initial_accumulator_value",
            "eps",
            "fused",
            refused=_NOT_CAPTURABLE,
        ),
        _of_torch("Adamax", ("step", "exp_avg", "exp_inf"), "betas", "eps"),
        _of_torch(
            "ASGD",
            ("step", "eta", "mu", "ax"),
            "lambd",
            "alpha",
            "t0",
            remark="The averages `ax` are kept, and the model is the last weights, not their average.",
        ),
        _of_torch(
            "NAdam",
            (*_MOMENTS, "mu_product"),
            "betas",
            "eps",
            "momentum_decay",
            "decoupled_weight_decay",
        ),
        _of_torch("RAdam", _MOMENTS, "betas", "eps", "decoupled_weight_decay"),
        _of_torch(
            "RMSprop",
            ("step", "square_avg", "momentum_buffer", "grad_avg"),
            "alpha",
            "eps",
            "momentum",
            "centered",
        ),
        _of_torch(
            "Rprop",
            ("step", "prev", "step_size"),
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
        ),
    )
}
"""Name in lower case to what is known."""
