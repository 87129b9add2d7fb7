"""The number formats of training."""

from typing import Literal

from pydantic import ConfigDict

from neox_launcher.config.parameter import Section, block, param

__all__ = ["Amp", "Bf16", "Fp16", "PrecisionSection"]


class Fp16(Section):
    """float16 with loss scaling."""

    enabled: bool = param(False, origin="DSC", doc="Train in float16.")
    loss_scale: float = param(
        0.0, origin="DSC", ge=0, doc="Factor of the loss; 0 lets it follow the overflows (dynamic scaling)."
    )
    initial_scale_power: int = param(
        16,
        origin="DSC",
        ge=0,
        le=64,
        used_when="loss_scale is 0",
        doc="The scale starts at 2 to this power.",
    )
    loss_scale_window: int = param(
        1000,
        origin="DSC",
        gt=0,
        used_when="loss_scale is 0",
        doc="Updates without overflow that double it.",
    )
    hysteresis: int = param(
        2,
        origin="DSC",
        ge=1,
        used_when="loss_scale is 0",
        doc="Overflows that it takes to halve the scale.",
    )
    consecutive_hysteresis: bool = param(
        False,
        origin="DSC",
        used_when="loss_scale is 0",
        doc="Every update without overflow restores the allowance of `hysteresis`.",
    )
    min_loss_scale: int = param(
        1, origin="DSC", gt=0, used_when="loss_scale is 0", doc="The scale never falls below this."
    )
    auto_cast: bool = param(False, origin="DSC", doc="Turn floating-point inputs of the model into float16.")


class Bf16(Section):
    """bfloat16; needs no loss scaling."""

    enabled: bool = param(False, origin="DSC", doc="Train in bfloat16.")


class Amp(Section):
    """NVIDIA apex's mixed precision; other keys go to apex.amp.initialize."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = param(False, origin="DSC", doc="Use apex's mixed precision.")


class PrecisionSection(Section, resume="training"):
    """Number formats; of fp16, bf16 and amp at most one is enabled."""

    precision: Literal["fp16", "fp32", "bfloat16"] | None = param(
        None,
        origin="NeoX",
        none_means="what the fp16 and bf16 blocks say, else fp32",
        doc="The number format of training, where no block says it.",
    )
    fp16: Fp16 = block(Fp16, origin="DSC", doc="float16 with loss scaling.")
    bf16: Bf16 = block(Bf16, origin="DSC", doc="bfloat16.")
    amp: Amp = block(Amp, origin="DSC", doc="NVIDIA apex's mixed precision.")
    fp16_lm_cross_entropy: bool = param(
        False,
        origin="Meg",
        used_when="training is in fp16",
        doc="Compute the loss in float16 instead of float32.",
    )

    @property
    def is_fp16(self) -> bool:
        """Whether training is in float16."""
        return self.fp16.enabled or self.precision == "fp16"

    @property
    def is_bf16(self) -> bool:
        """Whether training is in bfloat16."""
        return self.bf16.enabled or self.precision == "bfloat16"
