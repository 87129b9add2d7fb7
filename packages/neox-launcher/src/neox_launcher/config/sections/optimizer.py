"""The optimizer, weight decay and gradient clipping."""

from typing import Any, Literal

from pydantic import ConfigDict

from neox_launcher.config.optimizers import OPTIMIZER_FACTS
from neox_launcher.config.parameter import FILLED_IN, Section, block, param

__all__ = [
    "KNOWN_OPTIMIZERS",
    "TORCH_OPTIMIZERS",
    "Optimizer",
    "OptimizerParams",
    "OptimizerSection",
    "Scheduler",
    "SchedulerParams",
]

# Spelt as the documents do; any other name is looked up in torch.optim, which has further classes that do not
# train such models: LBFGS calls the loss itself, SparseAdam wants sparse gradients, Muon takes matrices only.
KNOWN_OPTIMIZERS = tuple(facts.name for facts in OPTIMIZER_FACTS.values() if not facts.is_of_torch)
TORCH_OPTIMIZERS = tuple(facts.name for facts in OPTIMIZER_FACTS.values() if facts.is_of_torch)

_ONE_BIT = "type is OneBitAdam, OneBitLamb or ZeroOneAdam"


class OptimizerParams(Section):
    """Arguments of the optimizer; further ones are allowed where torch.optim has the class."""

    model_config = ConfigDict(extra="allow")

    lr: float = param(origin="DSC", ge=0, doc="Learning rate after warm-up.")
    betas: tuple[float, float] = param(
        (0.9, 0.999),
        origin="DSC",
        used_when="type is not madgrad_wd or SM3",
        doc="Decay of the running means of gradients and of squared gradients.",
    )
    eps: float = param(1e-8, origin="DSC", ge=0, doc="Added to the denominator of the update.")
    weight_decay: float = param(
        FILLED_IN,
        none_means="the weight-decay outside the block",
        origin="DSC",
        ge=0,
        used_when="the optimizer decays weights",
        doc="Weight decay.",
    )
    torch_adam: bool = param(
        False,
        origin="DSC",
        resume="free",
        used_when="type is Adam",
        doc="Not used: Adam is always torch's fused one.",
    )
    adam_w_mode: bool = param(
        True,
        origin="DSC",
        used_when="type is Adam or CPU_Adam",
        doc="Decay weights apart from the gradient, as AdamW does.",
    )
    bias_correction: bool = param(
        True,
        origin="DSC",
        used_when="type is not CPU_torch_adam, madgrad_wd or SM3",
        doc="Correct Adam's running means for their start at zero.",
    )
    freeze_step: int = param(
        100000, origin="DSC", gt=0, used_when=_ONE_BIT, doc="Updates before communication is compressed."
    )
    cuda_aware: bool = param(
        False,
        origin="DSC",
        resume="free",
        used_when="comm_backend_name is mpi",
        doc="The MPI library can send device memory.",
    )
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed", "gloo"] = param(
        "nccl", origin="DSC", resume="free", used_when=_ONE_BIT, doc="What carries the compressed gradients."
    )
    var_freeze_step: int = param(
        100000,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Last update that changes the variance.",
    )
    var_update_scaler: int = param(
        16,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Growth of the gap between variance updates.",
    )
    local_step_scaler: int = param(
        32678,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Updates between growths of local steps.",
    )
    local_step_clipper: int = param(
        16,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Most updates between two synchronizations.",
    )
    max_coeff: float = param(
        10.0, origin="DSC", gt=0, used_when="type is Lamb or OneBitLamb", doc="Largest trust ratio."
    )
    min_coeff: float = param(
        0.01, origin="DSC", ge=0, used_when="type is Lamb or OneBitLamb", doc="Smallest trust ratio."
    )
    coeff_beta: float = param(
        0.9, origin="DSC", ge=0, lt=1, used_when="type is OneBitLamb", doc="Decay of the mean trust ratio."
    )
    factor_max: float = param(
        4.0,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Largest factor of the frozen trust ratio.",
    )
    factor_min: float = param(
        0.5,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Smallest factor of the frozen trust ratio.",
    )
    factor_threshold: float = param(
        0.1,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Largest change of that factor per update.",
    )

    def given(self) -> dict[str, Any]:
        """The arguments that the configuration states, for optimizers that know other names than these."""
        values = {
            name: getattr(self, name) for name in self.model_fields_set if name in type(self).model_fields
        }
        return values | dict(self.model_extra or {})


class Optimizer(Section):
    """Which optimizer, and its arguments."""

    type: str = param(
        "Adam",
        origin="DSC",
        min_length=1,
        free_choice=", ".join(KNOWN_OPTIMIZERS) + ", or a class of torch.optim",
        doc="Name of the optimizer, in any case. Adam decouples weight decay, as AdamW.",
    )
    params: OptimizerParams = block(origin="DSC", doc="Arguments of the optimizer.")

    @property
    def kind(self) -> str:
        """The type in lower case, as it is compared."""
        return self.type.lower()


_WARMUP = "type is WarmupLR or WarmupDecayLR"


class SchedulerParams(Section):
    """Arguments of the schedule; those of LRRangeTest, OneCycle and WarmupCosineLR are allowed, too."""

    model_config = ConfigDict(extra="allow")

    warmup_min_lr: float = param(
        0.0, origin="DSC", ge=0, used_when=_WARMUP, doc="Learning rate of the first iteration."
    )
    warmup_max_lr: float | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="optimizer.params.lr",
        used_when=_WARMUP,
        doc="Learning rate after warm-up.",
    )
    warmup_num_steps: int = param(1000, origin="DSC", gt=0, used_when=_WARMUP, doc="Iterations of warm-up.")
    total_num_steps: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="lr-decay-iters",
        used_when="type is WarmupDecayLR",
        doc="Iteration at which the learning rate reaches 0.",
    )
    warmup_type: Literal["log", "linear"] = param(
        "log", origin="DSC", used_when=_WARMUP, doc="Curve of the warm-up."
    )


class Scheduler(Section):
    """A schedule of DeepSpeed's, instead of lr-decay-style."""

    type: Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] | None = param(
        None, origin="DSC", none_means="the schedule of lr-decay-style", doc="Name of the schedule."
    )
    params: SchedulerParams = block(SchedulerParams, origin="DSC", doc="Arguments of the schedule.")


class OptimizerSection(Section, resume="training"):
    """The optimizer, weight decay and gradient clipping."""

    optimizer: Optimizer = block(origin="DSC", doc="Which optimizer, and its arguments.")
    scheduler: Scheduler = block(Scheduler, origin="DSC", doc="A schedule of DeepSpeed's.")
    weight_decay: float = param(
        0.01,
        origin="Meg",
        ge=0,
        used_when="the optimizer decays weights",
        doc="Weight decay of matrices, where optimizer.params.weight_decay does not say it.",
    )
    gradient_clipping: float = param(
        0.0, origin="DSC", ge=0, doc="Largest length (2-norm) of the whole gradient; 0 does not clip."
    )
    zero_allow_untested_optimizer: bool = param(
        False, origin="DSC", resume="free", doc="Allow ZeRO with elementwise optimizers other than Adam."
    )
