"""Precision of training."""

from typing import Literal

from neox_config.schema.parameter import Section, block, param

__all__ = ["Amp", "Bf16", "Fp16", "PrecisionSection"]


class Fp16(Section):
    """Training in float16 with loss scaling."""

    enabled: bool = param(False, origin="DSC", doc="Train in float16.")
    loss_scale: float = param(
        0.0, origin="DSC", ge=0, doc="Static loss scale; 0 selects dynamic loss scaling."
    )
    initial_scale_power: int = param(
        16,
        origin="DSC",
        ge=0,
        le=64,
        used_when="loss_scale is 0",
        doc="The initial loss scale is 2 to this power.",
    )
    loss_scale_window: int = param(
        1000,
        origin="DSC",
        gt=0,
        used_when="loss_scale is 0",
        doc="Number of updates without overflow after which the loss scale is doubled.",
    )
    hysteresis: int = param(
        2,
        origin="DSC",
        ge=1,
        used_when="loss_scale is 0",
        doc="Number of overflows before the loss scale is halved.",
    )
    consecutive_hysteresis: bool = param(
        False,
        origin="DSC",
        used_when="loss_scale is 0",
        doc="Reset the count of `hysteresis` after every update without overflow.",
    )
    min_loss_scale: int = param(1, origin="DSC", gt=0, used_when="loss_scale is 0", doc="Minimum loss scale.")
    auto_cast: bool = param(
        False, origin="DSC", resume="free", doc="Not used: the inputs of the model are whole numbers."
    )


class Bf16(Section):
    """Training in bfloat16, which needs no loss scaling."""

    enabled: bool = param(False, origin="DSC", doc="Train in bfloat16.")


_SCALED = "amp computes in fp16"


class Amp(Section):
    """Automatic mixed precision (torch.autocast): products in 16 bits, weights and sums in float32.

    The parameters are those of apex.amp.initialize; NVIDIA recommends torch.autocast in its place.
    """

    enabled: bool = param(
        False,
        origin="DSC",
        doc="Compute matrix products in 16 bits; weights, gradients and optimizer states stay in float32.",
    )
    opt_level: Literal["O0", "O1", "O2", "O3"] = param(
        "O1",
        origin="DSC",
        doc="NVIDIA's level. O0: float32, as without amp; O1: torch.autocast. O2 and O3, which cast the "
        "weights, are refused: the fp16 block is O2.",
    )
    dtype: Literal["fp16", "bf16"] = param(
        "fp16",
        origin="ours",
        used_when="opt_level is O1",
        doc="Data type of autocast; float16 uses loss scaling, bfloat16 needs none.",
    )
    loss_scale: float = param(
        0.0,
        origin="DSC",
        ge=0,
        used_when=_SCALED,
        doc="Static loss scale; 0 or dynamic selects dynamic loss scaling: it starts at 65,536, is halved at "
        "every overflow, and doubled after 2,000 updates without one.",
    )
    min_loss_scale: float | None = param(
        None,
        origin="DSC",
        gt=0,
        used_when=_SCALED,
        none_means="1",
        doc="Minimum of the dynamic loss scale.",
    )
    max_loss_scale: float = param(
        2.0**24, origin="DSC", gt=0, used_when=_SCALED, doc="Maximum of the dynamic loss scale."
    )


class PrecisionSection(Section, resume="training"):
    """Precision of training; at most one of fp16, bf16 and amp can be enabled."""

    precision: Literal["fp16", "fp32", "bfloat16"] | None = param(
        None,
        origin="NeoX",
        none_means="fp16 or bfloat16 if that block is enabled, else fp32",
        doc="Data type of training; may be set instead of enabling the fp16 or bf16 block.",
    )
    fp16: Fp16 = block(Fp16, origin="DSC", doc="Training in float16 with loss scaling.")
    bf16: Bf16 = block(Bf16, origin="DSC", doc="Training in bfloat16.")
    amp: Amp = block(Amp, origin="DSC", doc="Automatic mixed precision (torch.autocast); at ZeRO stage 0.")
    fp16_lm_cross_entropy: bool = param(
        False,
        origin="Meg",
        used_when="training is in fp16",
        doc="Compute the loss in float16 instead of float32.",
    )

    @property
    def is_fp16(self) -> bool:
        """True if training is in float16."""
        return self.fp16.enabled or self.precision == "fp16"

    @property
    def is_bf16(self) -> bool:
        """True if training is in bfloat16."""
        return self.bf16.enabled or self.precision == "bfloat16"

    @property
    def autocast(self) -> Literal["fp16", "bf16"] | None:
        """Return the data type of autocast; None: everything is computed in the data type of the weights."""
        return self.amp.dtype if self.amp.enabled and self.amp.opt_level != "O0" else None
