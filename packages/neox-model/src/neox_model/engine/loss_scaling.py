"""The loss scale of a configuration, for every engine."""

from neox_config import Resolved
from neox_config.schema.sections.precision import Amp
from neox_model.optim.loss_scale import LossScaleSettings

__all__ = ["loss_scale_settings"]

_APEX_INITIAL_SCALE = 2.0**16
_APEX_WINDOW = 2000


def loss_scale_settings(resolved: Resolved) -> LossScaleSettings | None:
    """Return the settings of the loss scale; None if the loss is not scaled."""
    if resolved.derived.autocast == "fp16":
        return _loss_scale_of_amp(resolved.config.precision.amp)
    if resolved.derived.precision != "fp16":
        return None
    fp16 = resolved.config.precision.fp16
    is_dynamic = fp16.loss_scale == 0
    return LossScaleSettings(
        initial=2.0**fp16.initial_scale_power if is_dynamic else fp16.loss_scale,
        is_dynamic=is_dynamic,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _loss_scale_of_amp(amp: Amp) -> LossScaleSettings:
    """Return the loss scale of NVIDIA apex, which halves it at every overflow."""
    is_dynamic, minimum = amp.loss_scale == 0, amp.min_loss_scale or 1.0
    dynamic = max(minimum, min(_APEX_INITIAL_SCALE, amp.max_loss_scale))
    return LossScaleSettings(
        initial=dynamic if is_dynamic else amp.loss_scale,
        is_dynamic=is_dynamic,
        window=_APEX_WINDOW,
        hysteresis=1,
        minimum=minimum,
        maximum=amp.max_loss_scale,
    )
