"""Which fused operators the layers call: decided once for the whole model, alike on every rank.

`true` asks for the fused operator by name: it is used, or training does not start and the reason is told.
`auto` uses it where it is right and faster, and otherwise what the layer does without it. Whoever has not
asked gets PyTorch's own operators.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neox_kernels import (
    KernelUnavailable,
    Operator,
    apex_layer_norm,
    bias_dropout_add,
    bias_gelu,
    choose,
    layer_norm,
    rotary,
    scaled_causal_softmax,
    scaled_masked_softmax,
)
from neox_launcher.config import NeoXConfig, Resolved
from neox_model.build.choices import all_say_so
from neox_model.build.compiler_cache import private_compiler_cache
from neox_model.layers.attention.dense import hidden_keys
from neox_model.parallel.groups import Group, Groups

__all__ = ["Operators", "choose_operators"]

logger = logging.getLogger(__name__)

# The least that its kernels multiply at once.
_FLEX_HEAD_WIDTH = 16

Requested = Any  # bool | Literal["auto"]; mypy does not see through the configuration's models.
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """What the layers call instead of PyTorch's own operators; None: those.

    Attributes:
        softmax: (scores_BNST, scale, masked_out or None) -> weights; None: attention makes no scores.
        rotary: (query_SBNK, key_SBNK, cos_SR, sin_SR) -> both rotated.
        bias_gelu: (x, bias) -> gelu(x + bias), tanh form.
        bias_dropout_add: (x, bias or None, residual, probability, training) -> sum.
        layer_norm: (x, weight, bias, epsilon) -> normalised x.
        flex_unusable: why FlexAttention cannot be used; None: it can.
    """

    softmax: Callable[[Tensor, float, Tensor | None], Tensor] | None = None
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    bias_gelu: Callable[[Tensor, Tensor], Tensor] | None = None
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor] | None = None
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    flex_unusable: str | None = None


def choose_operators(
    resolved: Resolved, groups: Groups, *, device: torch.device, dtype: torch.dtype
) -> Operators:
    """Look what the configuration asks for and what this machine can do. Collective over all ranks.

    Args:
        resolved: the configuration.
        groups: this job's.
        device: where the layers will be.
        dtype: of their activations.

    Raises:
        KernelUnavailable: a fused operator was asked for and cannot be used.
    """
    config = resolved.config
    if config.model.onnx_safe:
        return _EXPORTED
    if device.type == "cuda":
        private_compiler_cache()
    model, attention = config.model, config.attention
    chooser = _Chooser(device=device, dtype=dtype, agree=_agreement(groups.control))
    tokens = (model.seq_length, resolved.derived.micro_batch_size)
    heads = max(1, model.num_attention_heads // groups.model.size)
    shape_SBNK = (*tokens, heads, model.hidden_size // model.num_attention_heads)
    shape_SBF = (*tokens, max(1, resolved.derived.intermediate_size // groups.model.size))
    shape_SBD = (*tokens, model.hidden_size)
    scores = (tokens[1], heads, tokens[0], tokens[0])
    has_gelu, is_rotary = model.activation == "gelu", attention.pos_emb == "rotary"
    return Operators(
        softmax=_softmax(config, chooser, scores),
        rotary=chooser.fused("rope-fusion", is_rotary and attention.rope_fusion, rotary, shape_SBNK),
        bias_gelu=chooser.fused(
            "bias-gelu-fusion", has_gelu and model.bias_gelu_fusion, bias_gelu, shape_SBF
        ),
        bias_dropout_add=chooser.fused(
            "bias-dropout-fusion", model.bias_dropout_fusion, bias_dropout_add, shape_SBD
        ),
        layer_norm=_layer_norm(config, chooser, shape_SBD),
        flex_unusable=_why_not_flex(config, device, head_width=shape_SBNK[-1]),
    )


def _why_not_flex(config: NeoXConfig, device: torch.device, *, head_width: int) -> str | None:
    if device.type != "cuda":
        return "that has no backward pass on a CPU"
    if config.model.attention_dropout > 0.0:
        return "that has no dropout (attention-dropout: 0 would allow it)"
    if head_width < _FLEX_HEAD_WIDTH:
        return f"that needs heads of at least {_FLEX_HEAD_WIDTH} channels, and these have {head_width}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chooser:
    """Decides between the fused and the plain form of one operator after another."""

    device: torch.device
    dtype: torch.dtype
    agree: Callable[[bool], bool] | None

    def form(
        self, parameter: str, requested: Requested, operator: Operator[..., Any], shape: tuple[int, ...]
    ) -> Function:
        """The fused form or the plain twin; an error names the parameter that asks for it."""
        try:
            return choose(
                requested, operator, device=self.device, dtype=self.dtype, shape=shape, agree=self.agree
            )
        except KernelUnavailable as error:
            raise KernelUnavailable(f"{parameter}: true: {error}") from error

    def fused(
        self, parameter: str, requested: Requested, operator: Operator[..., Any], shape: tuple[int, ...]
    ) -> Function | None:
        """The fused form; None where the layer's own way serves."""
        chosen = self.form(parameter, requested, operator, shape)
        return None if chosen is operator.reference else chosen

    def all_have(self, operator: Operator[..., Any]) -> bool:
        """Whether the operator can be used on every rank; the reason is logged."""
        availability = operator.available(device=self.device, dtype=self.dtype)
        everywhere = availability.ok if self.agree is None else self.agree(availability.ok)
        reason = "another rank cannot use it" if availability.ok and not everywhere else availability.reason
        logger.info("%s: %s", operator.name, reason if everywhere else f"PyTorch's kernel, because {reason}")
        return everywhere


def _agreement(control: Group) -> Callable[[bool], bool] | None:
    return None if control.size == 1 else partial(all_say_so, control)


def _layer_norm(config: NeoXConfig, chooser: _Chooser, shape: tuple[int, ...]) -> Function | None:
    """NVIDIA apex's kernel is the same mathematics under another name, so PyTorch's may stand in for it."""
    model = config.model
    if model.norm == "apexlayernorm":
        return apex_layer_norm.fused if chooser.all_have(apex_layer_norm) else None
    requested = model.norm == "layernorm" and model.layernorm_fusion
    return chooser.fused("layernorm-fusion", requested, layer_norm, shape)


def _softmax(
    config: NeoXConfig, chooser: _Chooser, shape: tuple[int, ...]
) -> Callable[[Tensor, float, Tensor | None], Tensor] | None:
    """The softmax of scores, where attention makes any: for a kernel asked for by name, or to scale them."""
    attention = config.attention
    causal = attention.scaled_upper_triang_masked_softmax_fusion
    masked = attention.scaled_masked_softmax_fusion
    if True not in (causal, masked) and not attention.apply_query_key_layer_scaling:
        if "auto" in (causal, masked):
            logger.info("softmax: PyTorch's scaled_dot_product_attention, which keeps no scores")
        return None
    if masked is True or (masked and not causal):
        name = "scaled-masked-softmax-fusion"
        return partial(_masked_softmax, chooser.form(name, masked, scaled_masked_softmax, shape))
    name = "scaled-upper-triang-masked-softmax-fusion"
    return partial(
        _causal_softmax,
        chooser.form(name, causal, scaled_causal_softmax, shape),
        chooser.form(name, causal, scaled_masked_softmax, shape),
    )


def _causal_softmax(
    causal: Function, masked: Function, scores_BNST: Tensor, scale: float, masked_out: Tensor | None
) -> Tensor:
    """The causal operator where only later keys are hidden, the masked one elsewhere."""
    weights_BNST: Tensor = (
        causal(scores_BNST, scale) if masked_out is None else masked(scores_BNST, masked_out, scale)
    )
    return weights_BNST


def _masked_softmax(masked: Function, scores_BNST: Tensor, scale: float, masked_out: Tensor | None) -> Tensor:
    """The masked operator always, with the later keys as mask where there is no other."""
    if masked_out is None:
        masked_out = hidden_keys(scores_BNST.shape[-2], scores_BNST.shape[-1], None, scores_BNST.device)
    weights_BNST: Tensor = masked(scores_BNST, masked_out, scale)
    return weights_BNST


# What a model that is to be exported calls: plain twins, and scores with a softmax instead of PyTorch's fused
# attention, which its exporter takes apart wrongly where keys are shared (seen with torch 2.13).
_EXPORTED = Operators(
    softmax=partial(_causal_softmax, scaled_causal_softmax.reference, scaled_masked_softmax.reference),
    flex_unusable="the exporter does not know that",
)
