"""Properties of each optimizer, used by the rules, the reference documentation and the tests.

An optimizer is element-wise if the update of an element depends only on the gradients of that element. Only
such optimizers give the same update for any part of a weight, as DeepSpeed's ZeRO requires. Tensor
parallelism, and the torch engine's ZeRO, which divides rows, require the same, unless the optimizer itself
joins what it computes of the parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal

__all__ = [
    "ARGUMENT_LIMITS",
    "FORMS_OF_ADAM",
    "MUON_SCALES",
    "OPTIMIZER_FACTS",
    "ArgumentLimit",
    "JoinedParts",
    "OptimizerFacts",
    "WidthRule",
]

FORMS_OF_ADAM = frozenset({"adam", "adamw", "cpu_adam", "cpu_torch_adam"})
"""Types that compute Adam, in lower case: each continues from the states of any other."""

MUON_SCALES: Mapping[str, Callable[[float, float], float]] = {
    "original": lambda rows, columns: sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}
"""Muon's `scale` -> factor of the orthogonal matrix with this number of rows and columns."""

JoinedParts = Literal["matrices", "norms", "maxima"]

WidthRule = Literal["signs", "gradients", "spectral"]
"""What the steps of an optimizer follow: Adam's and Lion's hardly more than the signs of gradients."""


@dataclass(frozen=True, slots=True)
class ArgumentLimit:
    """The values that an undeclared argument of our optimizers may have.

    Args:
        holds: function that returns True for such a value.
        what: what it must be, continuing "must be".
        example: a valid value, in YAML.
    """

    holds: Callable[[Any], bool]
    what: str
    example: str


_LARGEST = 1e30


def _is_number(value: Any) -> bool:
    # Far enough below the largest number of float32, about 3e38, that no update overflows by it alone.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


_FRACTION = ArgumentLimit(
    lambda value: _is_number(value) and 0 <= value < 1, "a number, at least 0 and less than 1", "0.9"
)
_SWITCH = ArgumentLimit(lambda value: isinstance(value, bool), "true or false", "true")


def _one_of(*names: str) -> ArgumentLimit:
    return ArgumentLimit(lambda value: value in names, ", ".join(names[:-1]) + f" or {names[-1]}", names[0])


# Declared parameters with a default of their own in an optimizer have other limits where they are declared.
ARGUMENT_LIMITS: Mapping[str, ArgumentLimit] = {
    "adam_lr": ArgumentLimit(
        lambda value: value is None or (_is_number(value) and value >= 0),
        "a number of at least 0 and at most 1e30, or null",
        "0.001",
    ),
    "beta": _FRACTION,
    "cautious_decay": _SWITCH,
    "coefficients": _one_of("polar_express", "quintic"),
    "eps": ArgumentLimit(
        lambda value: _is_number(value) and value >= 1e-37,
        "a number of at least 1e-37, because float32 has no smaller ones in full precision, and at most 1e30",
        "1e-30",
    ),
    "momentum": _FRACTION,
    "nesterov": _SWITCH,
    "ns_steps": ArgumentLimit(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 100,
        "a whole number from 1 to 99",
        "5",
    ),
    "qkv": _one_of("separate", "per_head", "together"),
    "row_beta": _FRACTION,
    "scale": _one_of(*MUON_SCALES),
}
"""Argument -> limit, whichever of our optimizers takes it; torch's classes check their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer.

    Args:
        name: name as documented; compared in lower case.
        states: tensors that it may store for each weight, with the shape of the weight.
        matrix_states: what it stores for each matrix of a linear layer in place of `states`; empty if there
            is no difference.
        row_states: what it stores for each row of such a matrix in addition.
        numbers: single numbers that it stores for each weight.
        other_shapes: smaller tensors of other shapes that it stores for each weight.
        replica_states: what data-parallel ranks store if there are several, each its own: one value per
            element for the first name, one per element of this rank's part for the second. An optimizer with
            these averages over data-parallel ranks itself, with compressed messages.
        local_states: what each data-parallel rank stores in addition, one value per element, while the ranks
            have different weights. `local_exp_avg` takes the place of `exp_avg`.
        optional: state -> argument without which the state is not stored.
        former: argument -> what versions without it computed, where that is not its default. A run of such a
            version continues with it.
        redefining: arguments that, switched on or off, make states of before useless.
        declared: declared parameters of `optimizer.params` that it takes; the others have no effect. Not used
            for torch.optim, whose classes refuse arguments that they do not take.
        arguments: additional arguments and their defaults, besides `lr`, `weight_decay` and `declared`: those
            that no parameter of `optimizer.params` declares, or that have another default there.
        refused: arguments of the class that cannot be given here -> reason.
        is_of_torch: True for a class of torch.optim with its own name.
        is_elementwise: True if the update of an element depends only on the gradients of that element.
        joins_split_weights: True if it is not element-wise, but computes what it requires of a whole weight
            across the tensor-parallel ranks that split it.
        gathers_rows: what it also joins of each weight whose rows are divided over data-parallel ranks; None
            if it requires all rows, or is element-wise.
        is_tried_with_zero: True if DeepSpeed has tested it with ZeRO; others require
            zero_allow_untested_optimizer.
        skips_on_device: True if non-finite updates are skipped without the host; otherwise the host reads one
            number per update.
        decays_weights: True if it applies weight decay.
        width_rule: how muP changes its learning rates; None: not known.
        remark: additional information for users, as a sentence.
    """

    name: str
    states: tuple[str, ...] = ()
    matrix_states: tuple[str, ...] = ()
    row_states: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("step",)
    other_shapes: tuple[str, ...] = ()
    replica_states: tuple[str, ...] = ()
    local_states: tuple[str, ...] = ()
    optional: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, Any] = field(default_factory=dict)
    redefining: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    is_of_torch: bool = False
    is_elementwise: bool = True
    joins_split_weights: bool = False
    gathers_rows: JoinedParts | None = None
    is_tried_with_zero: bool = False
    skips_on_device: bool = False
    decays_weights: bool = True
    width_rule: WidthRule | None = None
    remark: str = ""

    @property
    def taken(self) -> tuple[str, ...]:
        """All arguments that it takes, besides `weight_decay`; of torch.optim also besides `lr`."""
        return (*self.declared, *self.arguments)

    @property
    def kept(self) -> tuple[str, ...]:
        """All states that a checkpoint may contain for each weight."""
        tensors = (*self.matrix_states, *self.row_states, *self.states, *self.other_shapes)
        return (*self.numbers, *tensors, *self.replica_states, *self.local_states)

    @property
    def momentum(self) -> str | None:
        """The argument that is its momentum, whole or as the first of two numbers; None if it has none."""
        taken = (*self.declared, *self.arguments)
        return next((name for name in ("betas", "momentum") if name in taken), None)

    def arguments_in_effect(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `arguments`: as given, or the default.

        Args:
            given: arguments set in the configuration.
        """
        return {name: given.get(name, default) for name, default in self.arguments.items()}

    @property
    def requires_whole_weights(self) -> bool:
        """True if it computes something of a whole weight, and not of each of its matrices."""
        return self.joins_split_weights and not self.matrix_states

    def values_per_element(self, given: Mapping[str, Any]) -> int:
        """Return the number of values stored for each element of a weight, other than `matrix_states`.

        Args:
            given: arguments set in the configuration.
        """
        return self._number_stored(self.states, given)

    def values_per_row(self, given: Mapping[str, Any]) -> int:
        """Return the number of `row_states` that are stored.

        Args:
            given: arguments set in the configuration.
        """
        return self._number_stored(self.row_states, given)

    def _number_stored(self, states: tuple[str, ...], given: Mapping[str, Any]) -> int:
        values = self.arguments_in_effect(given)
        return sum(name not in self.optional or bool(values[self.optional[name]]) for name in states)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_ERRORS = ("worker_error", "server_error")
_INTERVALS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_FACTORS = ("factor_max", "factor_min", "factor_threshold")
_ADAM = ("lr", "betas", "eps", "bias_correction")
_SWITCHES = ("adam_w_mode", "bias_correction")
_LION: Mapping[str, Any] = {"betas": (0.9, 0.99)}
_ADAM_ARGUMENTS: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}

_NEVER_USED = {
    "capturable": "is for CUDA graphs, which are not used",
    "differentiable": "is for differentiating through the update, which is not supported",
    "maximize": "would maximize the loss",
}


def _of_torch(
    name: str,
    states: tuple[str, ...],
    arguments: Mapping[str, Any],
    *,
    refused: Mapping[str, str] | None = None,
    **facts: object,
) -> OptimizerFacts:
    """Describe a class of torch.optim; most of them take the arguments in `_NEVER_USED`."""
    return OptimizerFacts(
        name=name,
        states=states,
        arguments={**arguments, "foreach": None},
        refused=_NEVER_USED if refused is None else refused,
        is_of_torch=True,
        **facts,  # type: ignore[arg-type]
    )


_NOT_CAPTURABLE = {name: why for name, why in _NEVER_USED.items() if name != "capturable"}
_ADAFACTOR = {
    "maximize": _NEVER_USED["maximize"],
    "eps": "is a pair of numbers in Adafactor, which always uses its default",
}

OPTIMIZER_FACTS: Mapping[str, OptimizerFacts] = {
    facts.name.lower(): facts
    for facts in (
        OptimizerFacts(
            name="Adam",
            width_rule="signs",
            states=_MOMENTS,
            declared=(*_ADAM, "adam_w_mode", "state_dtype"),
            redefining=_SWITCHES,
            is_tried_with_zero=True,
            skips_on_device=True,
        ),
        OptimizerFacts(
            name="AdamW",
            width_rule="signs",
            states=_MOMENTS,
            declared=(*_ADAM, "state_dtype"),
            redefining=_SWITCHES,
            is_tried_with_zero=True,
            skips_on_device=True,
        ),
        OptimizerFacts(
            name="CPU_Adam",
            width_rule="signs",
            states=_MOMENTS,
            declared=(*_ADAM, "adam_w_mode", "state_dtype"),
            redefining=_SWITCHES,
            is_tried_with_zero=True,
            skips_on_device=True,
        ),
        OptimizerFacts(
            name="CPU_torch_adam",
            width_rule="signs",
            states=_MOMENTS,
            declared=("lr", "betas", "eps"),
            redefining=_SWITCHES,
            is_tried_with_zero=True,
        ),
        OptimizerFacts(
            name="Lamb",
            states=_MOMENTS,
            declared=(*_ADAM, "max_coeff", "min_coeff"),
            is_elementwise=False,
            joins_split_weights=True,
            gathers_rows="norms",
            remark="The trust ratio is that of the paper: the bias correction is inside it. DeepSpeed "
            "corrects the step after the ratio, so with the default `betas` its first update is smaller by "
            "a factor of 3.2; add warmup.",
        ),
        OptimizerFacts(
            name="OneBitAdam",
            states=_MOMENTS,
            numbers=("step", "frozen_step"),
            replica_states=_ERRORS,
            declared=(*_ADAM, "freeze_step"),
            redefining=("bias_correction",),
            is_elementwise=False,
            joins_split_weights=True,
            remark="Adam with decoupled weight decay for `freeze_step` updates. Then gradients are not "
            "averaged over replicas: each takes its own into the momentum, which the replicas average with "
            "one bit per element, and the mean square is frozen. Elements without a gradient until then are "
            "not trained on; the root of the mean square is at least a tenth of its root mean square over "
            "the weight. Scales belong to the part of a tensor on a rank, so that from then on results "
            "depend on the data-parallel and model-parallel sizes beyond rounding. Checkpoints then have 4 "
            "more bytes per parameter for each replica. The gradient norm is then the root mean square over "
            "replicas, which is larger, "
            "and a step is skipped on all ranks if the gradient of one is not finite. The learning rate "
            "follows WarmupDecayLR with `lr`, `min-lr` and `warmup`, unless `scheduler` is given.",
        ),
        OptimizerFacts(
            name="OneBitLamb",
            states=(*_MOMENTS, "exp_avg_sq_fresh"),
            numbers=("step", "frozen_step", "trust_average", "last_factor"),
            replica_states=_ERRORS,
            declared=(*_ADAM, "freeze_step", "max_coeff", "min_coeff", "coeff_beta", *_FACTORS),
            redefining=("bias_correction",),
            is_elementwise=False,
            joins_split_weights=True,
            remark="Lamb for `freeze_step` updates, then communication and variance as in OneBitAdam. The "
            "trust ratio is then its running average, which begins with the first ratio, times a factor that "
            "follows the variance; `freeze_step` should be at least 1 / (1 - `coeff_beta`). "
            "`exp_avg_sq_fresh` is stored after the freeze. The learning rate follows `lr-decay-style`.",
        ),
        OptimizerFacts(
            name="ZeroOneAdam",
            states=_MOMENTS,
            numbers=("step", "frozen_step", "local_rate"),
            replica_states=_ERRORS,
            local_states=("local_exp_avg", "local_update"),
            declared=(*_ADAM, *_INTERVALS),
            redefining=("bias_correction",),
            is_elementwise=False,
            joins_split_weights=True,
            remark="The first `var_update_scaler` updates are those of Adam with decoupled weight decay. "
            "Then the mean square is updated, with averaged gradients, in fewer updates: after each "
            "`var_update_scaler` of these their interval doubles. In the others momenta are averaged with "
            "one bit per element, as in OneBitAdam. After `var_freeze_step` the mean square is frozen, and "
            "the interval between averages doubles every `local_step_scaler` updates, from 1 up to "
            "`local_step_clipper`. In between, replicas make local steps: their weights differ until the "
            "next average, and a device stores 8 more bytes per parameter. Evaluations and checkpoints then "
            "have, as the model, the weights of the last average. A checkpoint also contains the states with "
            "which as many replicas continue to the last bit; another number of replicas continues with "
            "their mean. `bias_correction` is Adam's; in DeepSpeed it has no effect. The learning rate "
            "follows `lr-decay-style`.",
        ),
        OptimizerFacts(
            name="SM3",
            states=("momentum_buffer",),
            numbers=(),
            other_shapes=("accumulator_0", "accumulator_1"),
            optional={"momentum_buffer": "momentum"},
            # A sum of squares only grows: it is too large for a decaying mean, and the reverse.
            redefining=("beta",),
            declared=("lr",),
            arguments={"momentum": 0.0, "beta": 0.0, "eps": 1e-30},
            is_elementwise=False,
            joins_split_weights=True,
            gathers_rows="maxima",
            decays_weights=False,
        ),
        OptimizerFacts(
            name="Lion",
            width_rule="signs",
            states=("exp_avg",),
            numbers=(),
            declared=("lr",),
            arguments=_LION,
            is_tried_with_zero=True,
        ),
        OptimizerFacts(
            name="Muon",
            width_rule="spectral",
            states=_MOMENTS,
            matrix_states=("momentum_buffer",),
            declared=("lr", "betas", "eps"),
            row_states=("row_variance",),
            optional={"row_variance": "row_beta"},
            arguments={
                "momentum": 0.95,
                "nesterov": True,
                "ns_steps": 5,
                "coefficients": "polar_express",
                "qkv": "separate",
                "scale": "original",
                "row_beta": 0.0,
                "cautious_decay": False,
                "adam_lr": None,
            },
            former={"coefficients": "quintic", "qkv": "together"},
            is_elementwise=False,
            joins_split_weights=True,
            gathers_rows="matrices",
            remark="The matrices of linear layers, of each expert and of routers have a `momentum_buffer`. "
            "Embeddings, the head, norms and biases are updated by Adam with decoupled weight decay, with "
            "`betas`, `eps` and the learning rate `adam_lr` (null: the same as the matrices). Where the "
            "schedule is below its largest rate, `adam_lr` is reduced in proportion. With tensor parallelism "
            "the momentum is gathered in every update. The iteration that makes it orthogonal is in float32 "
            "in a run in fp32, else in bfloat16. Five steps with `coefficients: polar_express` make singular "
            "values of at least 0.003 times the norm of the matrix 0.994 to 1.006, those of `quintic` 0.7 to "
            "1.2. `qkv` is what is made orthogonal of attention's query-key-value weight: query, key and "
            "value each (`separate`), each head of each (`per_head`), or the whole weight (`together`). "
            "`scale` is the factor of the orthogonal matrix of R rows and C columns: sqrt(max(1, R / C)) "
            "(`original`), or 0.2 sqrt(max(R, C)) (`match_rms_adamw`), with which learning rates of AdamW "
            "serve. With `row_beta` (NorMuon: 0.95) each row of that matrix is divided by the root of its "
            "mean square over the updates. `cautious_decay: true` decays only elements that the step moves "
            "towards 0, also in weights updated by Adam. A run that began with a version without "
            "`coefficients` and `qkv` continues with `quintic` and `together` unless the configuration sets "
            "them.",
        ),
        OptimizerFacts(
            name="madgrad_wd",
            states=("start", "grad_sum", "grad_sum_sq"),
            declared=("lr",),
            arguments={"momentum": 0.9, "eps": 1e-6},
        ),
        _of_torch("Adadelta", ("square_avg", "acc_delta"), {"rho": 0.9, "eps": 1e-6}),
        _of_torch(
            "Adafactor",
            (),
            {"beta2_decay": -0.8, "d": 1.0},
            refused=_ADAFACTOR,
            other_shapes=("row_var", "col_var", "variance"),
            is_elementwise=False,
        ),
        _of_torch(
            "Adagrad",
            ("sum",),
            {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "fused": None},
            refused=_NOT_CAPTURABLE,
            is_tried_with_zero=True,
        ),
        _of_torch("Adamax", ("exp_avg", "exp_inf"), _ADAM_ARGUMENTS),
        _of_torch(
            "ASGD",
            ("ax",),
            {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6},
            numbers=("step", "eta", "mu"),
            remark="The averages `ax` are stored, but the model uses the latest weights, not their average.",
        ),
        _of_torch(
            "NAdam",
            _MOMENTS,
            {**_ADAM_ARGUMENTS, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
            numbers=("step", "mu_product"),
            redefining=("decoupled_weight_decay",),
        ),
        _of_torch(
            "RAdam",
            _MOMENTS,
            {**_ADAM_ARGUMENTS, "decoupled_weight_decay": False},
            redefining=("decoupled_weight_decay",),
        ),
        _of_torch(
            "RMSprop",
            ("square_avg", "momentum_buffer", "grad_avg"),
            {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False},
            optional={"momentum_buffer": "momentum", "grad_avg": "centered"},
        ),
        _of_torch(
            "Rprop",
            ("prev", "step_size"),
            {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
            decays_weights=False,
            remark="The learning rate of the first update is the first step size; later ones have no effect.",
        ),
        _of_torch(
            "SGD",
            ("momentum_buffer",),
            {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "fused": None},
            refused=_NOT_CAPTURABLE,
            numbers=(),
            width_rule="gradients",
            optional={"momentum_buffer": "momentum"},
        ),
    )
}
"""Lower-case name -> properties."""
