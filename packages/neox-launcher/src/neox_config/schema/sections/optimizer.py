"""The optimizer, weight decay and gradient clipping."""

from typing import Any, Literal

from pydantic import ConfigDict

from neox_config.facts.conditions import one_of
from neox_config.facts.deepspeed_schedules import ScheduleType, WarmupType
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.parameter import FILLED_IN, Section, block, param

__all__ = [
    "KNOWN_OPTIMIZERS",
    "TORCH_OPTIMIZERS",
    "Optimizer",
    "OptimizerParams",
    "OptimizerSection",
    "Scheduler",
    "SchedulerParams",
]

# Any other name is looked up in torch.optim. Two of its classes cannot train these models: LBFGS calls the
# loss itself, and SparseAdam requires sparse gradients. Its Muon takes only matrices; ours is used.
KNOWN_OPTIMIZERS = tuple(facts.name for facts in OPTIMIZER_FACTS.values() if not facts.is_of_torch)
TORCH_OPTIMIZERS = tuple(facts.name for facts in OPTIMIZER_FACTS.values() if facts.is_of_torch)


def _if_taken(argument: str) -> str | None:
    """Return the condition that the optimizer takes a declared parameter; None if every one does."""
    ours = [facts for facts in OPTIMIZER_FACTS.values() if not facts.is_of_torch]
    names = [facts.name for facts in ours if argument not in facts.taken]
    return f"type is not {one_of(names)}" if names else None


class OptimizerParams(Section):
    """Arguments of the optimizer; optimizers of torch.optim accept additional ones."""

    model_config = ConfigDict(extra="allow")

    lr: float = param(origin="DSC", ge=0, doc="Learning rate after warmup.")
    betas: tuple[float, float] = param(
        (0.9, 0.999),
        origin="DSC",
        used_when=_if_taken("betas"),
        doc="Decay rates of the running averages of gradients and squared gradients. Lion and optimizers of "
        "torch.optim have their own default.",
    )
    eps: float = param(
        1e-8,
        origin="DSC",
        ge=0,
        used_when=_if_taken("eps"),
        doc="Constant added to the denominator of the update. SM3 (1e-30), madgrad_wd (1e-6) and optimizers "
        "of torch.optim have their own default.",
    )
    weight_decay: float = param(
        FILLED_IN,
        none_means="weight-decay outside the optimizer block",
        origin="DSC",
        ge=0,
        used_when="the optimizer decays weights",
        doc="Weight decay coefficient.",
    )
    torch_adam: bool = param(
        False,
        origin="DSC",
        resume="free",
        used_when="type is Adam",
        doc="Not used: Adam always uses the fused implementation of PyTorch.",
    )
    adam_w_mode: bool = param(
        True,
        origin="DSC",
        used_when="type is Adam or CPU_Adam",
        doc="Use decoupled weight decay, as in AdamW.",
    )
    bias_correction: bool = param(
        True,
        origin="DSC",
        used_when=_if_taken("bias_correction"),
        doc="Apply bias correction to the running averages of Adam.",
    )
    state_dtype: Literal["fp32", "bf16"] = param(
        "fp32",
        origin="ours",
        used_when=_if_taken("state_dtype"),
        doc="Data type in which Adam stores its running averages. bf16 halves their memory: updates are "
        "computed in float32, and averages are rounded up or down at random, so that small changes are not "
        "lost; the random bits do not depend on the layout. Slower than the fused update. Under ZeRO it "
        "requires the torch engine.",
        source="arXiv:2010.06192",
    )
    freeze_step: int = param(
        100000,
        origin="DSC",
        gt=0,
        used_when="type is OneBitAdam or OneBitLamb",
        doc="Number of updates before communication is compressed and the running average of squared "
        "gradients is frozen.",
    )
    cuda_aware: bool = param(
        False,
        origin="DSC",
        resume="free",
        doc="Not used: momenta are averaged through distributed_backend.",
    )
    comm_backend_name: Literal["nccl", "mpi", "hccl", "compressed", "gloo"] = param(
        "nccl",
        origin="DSC",
        resume="free",
        doc="Not used: momenta are averaged through distributed_backend.",
    )
    var_freeze_step: int = param(
        100000,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Last update that may change the running average of squared gradients.",
    )
    var_update_scaler: int = param(
        16,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Number of updates of the running average of squared gradients after which their interval "
        "doubles, from 1.",
    )
    local_step_scaler: int = param(
        32678,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Number of updates, after var_freeze_step, after which the interval between averages over "
        "replicas doubles, from 1.",
    )
    local_step_clipper: int = param(
        16,
        origin="DSC",
        gt=0,
        used_when="type is ZeroOneAdam",
        doc="Maximum interval between averages over replicas, in updates; 1 disables local steps.",
    )
    max_coeff: float = param(
        10.0, origin="DSC", gt=0, used_when="type is Lamb or OneBitLamb", doc="Maximum trust ratio."
    )
    min_coeff: float = param(
        0.01, origin="DSC", ge=0, used_when="type is Lamb or OneBitLamb", doc="Minimum trust ratio."
    )
    coeff_beta: float = param(
        0.9,
        origin="DSC",
        ge=0,
        lt=1,
        used_when="type is OneBitLamb",
        doc="Decay rate of the running average of the trust ratio.",
    )
    factor_max: float = param(
        4.0,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Maximum scaling factor of the frozen trust ratio, at least 1.",
    )
    factor_min: float = param(
        0.5,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Minimum scaling factor of the frozen trust ratio, at most 1.",
    )
    factor_threshold: float = param(
        0.1,
        origin="DSC",
        gt=0,
        used_when="type is OneBitLamb",
        doc="Maximum change of that factor per update, relative to its last value.",
    )

    def given(self) -> dict[str, Any]:
        """Return the arguments set in the configuration, including those that are not declared here."""
        values = {
            name: getattr(self, name) for name in self.model_fields_set if name in type(self).model_fields
        }
        return values | dict(self.model_extra or {})


class Optimizer(Section):
    """The optimizer and its arguments."""

    type: str = param(
        "Adam",
        origin="DSC",
        min_length=1,
        free_choice=", ".join(KNOWN_OPTIMIZERS) + ", or a class of torch.optim",
        doc="Name of the optimizer, case-insensitive. Adam uses decoupled weight decay, as AdamW does.",
    )
    params: OptimizerParams = block(origin="DSC", doc="Arguments of the optimizer.")

    @property
    def kind(self) -> str:
        """Lower-case type, for comparisons."""
        return self.type.lower()


_WARMUP = "type is WarmupLR, WarmupDecayLR or WarmupCosineLR"
_WARMUP_OF_RATES = "type is WarmupLR or WarmupDecayLR"
_WARMUP_OF_RATIOS = "type is WarmupCosineLR"
_DECAY = "type is WarmupDecayLR or WarmupCosineLR"
_RANGE_TEST = "type is LRRangeTest"
_ONE_CYCLE = "type is OneCycle"
_ONE_CYCLE_MOMENTUM = "type is OneCycle and cycle_momentum is true"


class SchedulerParams(Section):
    """Arguments of the schedule."""

    warmup_min_lr: float = param(
        0.0,
        origin="DSC",
        ge=0,
        used_when=_WARMUP_OF_RATES,
        doc="Learning rate of the first two iterations; WarmupDecayLR decays to it.",
    )
    warmup_max_lr: float | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="optimizer.params.lr",
        used_when=_WARMUP_OF_RATES,
        doc="Learning rate after warmup. DeepSpeed's default for WarmupDecayLR is 0.001.",
    )
    warmup_num_steps: int = param(
        1000, origin="DSC", gt=0, used_when=_WARMUP, doc="Number of warmup iterations; 1 counts as 2."
    )
    total_num_steps: int | None = param(
        None,
        origin="DSC",
        gt=0,
        none_means="lr-decay-iters",
        used_when=_DECAY,
        doc="Iteration at which the decay ends.",
    )
    warmup_type: WarmupType = param("log", origin="DSC", used_when=_WARMUP, doc="Shape of the warmup.")
    warmup_min_ratio: float = param(
        0.0,
        origin="DSC",
        ge=0,
        le=1,
        used_when=_WARMUP_OF_RATIOS,
        doc="The warmup starts at this multiple of optimizer.params.lr, after one iteration with the rate 0.",
    )
    cos_min_ratio: float = param(
        0.0001,
        origin="DSC",
        ge=0,
        le=1,
        used_when=_WARMUP_OF_RATIOS,
        doc="The decay ends at this multiple of optimizer.params.lr.",
    )
    cycle_min_lr: float | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="required by OneCycle",
        used_when=_ONE_CYCLE,
        doc="Learning rate at both ends of the cycle.",
    )
    cycle_max_lr: float | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="required by OneCycle",
        used_when=_ONE_CYCLE,
        doc="Learning rate between the two halves of the cycle.",
    )
    decay_lr_rate: float = param(
        0.0,
        origin="DSC",
        ge=0,
        used_when=_ONE_CYCLE,
        doc="After the cycle, the learning rate is cycle_min_lr / (1 + decay_lr_rate * steps of "
        "decay_step_size).",
    )
    cycle_first_step_size: int = param(
        2000, origin="DSC", gt=0, used_when=_ONE_CYCLE, doc="Iterations of the first half of the cycle."
    )
    cycle_second_step_size: int | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="cycle_first_step_size",
        used_when=_ONE_CYCLE,
        doc="Iterations of the second half of the cycle.",
    )
    cycle_first_stair_count: int = param(
        0,
        origin="DSC",
        ge=0,
        used_when=_ONE_CYCLE,
        doc="Number of stairs in which learning rate and momentum change in the first half; 0: continuously.",
    )
    cycle_second_stair_count: int | None = param(
        None,
        origin="DSC",
        ge=0,
        none_means="cycle_first_stair_count",
        used_when=_ONE_CYCLE,
        doc="The same for the second half.",
    )
    decay_step_size: int = param(
        0,
        origin="DSC",
        ge=0,
        used_when=_ONE_CYCLE,
        doc="Iterations after which decay_lr_rate and decay_mom_rate apply once; 0: no change after the "
        "cycle.",
    )
    cycle_momentum: bool = param(
        True,
        origin="DSC",
        used_when=_ONE_CYCLE,
        doc="Change the momentum in the opposite direction: the first beta of Adam, the momentum of others, "
        "which DeepSpeed leaves alone. The second beta keeps its value; DeepSpeed sets it to 0.99.",
    )
    cycle_min_mom: float = param(
        0.8,
        origin="DSC",
        ge=0,
        lt=1,
        used_when=_ONE_CYCLE_MOMENTUM,
        doc="Momentum between the two halves of the cycle, and of the first iteration.",
    )
    cycle_max_mom: float = param(
        0.9, origin="DSC", ge=0, lt=1, used_when=_ONE_CYCLE_MOMENTUM, doc="Momentum at the ends of the cycle."
    )
    decay_mom_rate: float = param(
        0.0,
        origin="DSC",
        ge=0,
        used_when=_ONE_CYCLE_MOMENTUM,
        doc="After the cycle, the momentum is cycle_max_mom * (1 + decay_mom_rate * steps of "
        "decay_step_size).",
    )
    lr_range_test_min_lr: float = param(
        0.001, origin="DSC", ge=0, used_when=_RANGE_TEST, doc="Learning rate of the first iteration."
    )
    lr_range_test_step_size: int = param(
        2000,
        origin="DSC",
        gt=0,
        used_when=_RANGE_TEST,
        doc="Iterations in which the learning rate grows by lr_range_test_step_rate times "
        "lr_range_test_min_lr.",
    )
    lr_range_test_step_rate: float = param(
        1.0, origin="DSC", ge=0, used_when=_RANGE_TEST, doc="Growth of the learning rate per step."
    )
    lr_range_test_staircase: bool = param(
        False, origin="DSC", used_when=_RANGE_TEST, doc="Grow once per step, not in every iteration."
    )


class Scheduler(Section):
    """Learning rate schedule of DeepSpeed, instead of lr-decay-style, min-lr and warmup."""

    type: ScheduleType | None = param(
        None,
        origin="DSC",
        none_means="the schedule of lr-decay-style",
        doc="Name of the schedule. WarmupLR: warmup, then constant. WarmupDecayLR: warmup, then linear. "
        "WarmupCosineLR: warmup, then half a cosine. OneCycle: one rise and fall, the opposite of the "
        "momentum, then a slow decay. LRRangeTest: grows, to find the largest rate that does not diverge. "
        "Every value is DeepSpeed's.",
    )
    params: SchedulerParams = block(SchedulerParams, origin="DSC", doc="Arguments of the schedule.")


class OptimizerSection(Section, resume="training"):
    """The optimizer, weight decay and gradient clipping."""

    optimizer: Optimizer = block(origin="DSC", doc="The optimizer and its arguments.")
    scheduler: Scheduler = block(Scheduler, origin="DSC", doc="Learning rate schedule of DeepSpeed.")
    weight_decay: float = param(
        0.01,
        origin="Meg",
        ge=0,
        used_when="the optimizer decays weights",
        doc="Weight decay of matrices, unless optimizer.params.weight_decay is set.",
    )
    gradient_clipping: float = param(
        0.0, origin="DSC", ge=0, doc="Maximum L2 norm of the global gradient; 0 disables clipping."
    )
    ema_decay: float | None = param(
        None,
        origin="ours",
        gt=0,
        lt=1,
        none_means="weights are not averaged",
        doc="Keep an exponential moving average (EMA) of the weights, a float32 number per parameter: after "
        "an iteration it is ema-decay times itself plus 1 - ema-decay times the weight. It begins with the "
        "first weights, which count ema-decay^n after n iterations. Checkpoints contain it, evaluations also "
        "use it (loss/validation_ema), load-ema loads it, and neox-convert to-hf --ema exports it.",
    )
    ema_interval: int = param(
        1,
        origin="ours",
        gt=0,
        used_when="ema_decay is set",
        doc="Iterations between two updates of the averages of ema-decay.",
    )
    zero_allow_untested_optimizer: bool = param(
        False,
        origin="DSC",
        resume="free",
        doc="Allow ZeRO with element-wise optimizers that DeepSpeed does not list as tested.",
    )
