"""Choose the fused operators of the layers, once for the whole model and the same on every rank.

`true` requires the fused operator: if it cannot be used, training ends with the reason before it starts.
`auto` uses it if it is correct and faster. Otherwise layers use PyTorch's operators.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from neox_config import NeoXConfig, Resolved
from neox_config.derive.objective import is_encoder, is_retrieval
from neox_config.facts.norms import NORM_FACTS
from neox_kernels import (
    KernelUnavailable,
    Operator,
    add_layer_norm,
    add_rms_norm,
    apex_layer_norm,
    bias_dropout_add,
    bias_geglu,
    bias_gelu,
    bias_swiglu,
    choose,
    cross_entropy,
    layer_norm,
    rms_norm,
    rotary,
    scaled_causal_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    split_rotary,
)
from neox_kernels.operator import MakeExample
from neox_model.assembly.choices import DTYPES, all_ranks_agree
from neox_model.assembly.compiler_cache import private_compiler_cache
from neox_model.layers.attention.dense import hidden_keys
from neox_model.parallel.cross_entropy import LossOperator, chunk_rows_on
from neox_model.parallel.groups import Group, Groups

__all__ = ["Operators", "choose_loss_operator", "choose_operators", "reference_operators"]

logger = logging.getLogger(__name__)

# Smallest head width that FlexAttention's kernels support.
_FLEX_HEAD_WIDTH = 16

Requested = Any  # bool | Literal["auto"]; mypy does not see through the configuration's models.
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The operators that layers call instead of PyTorch's; None: use PyTorch's.

    Attributes:
        softmax: (scores_BNST, scale, masked_out or None) -> weights; None: attention stores no scores.
        rotary: (query_SBNK, key_SBNK, cos_SR, sin_SR) -> both rotated.
        split_rotary: (projected_SBX, cos_SR, sin_SR, groups, head width) -> rotated queries and keys, and
            values; the projection may be overwritten.
        bias_gelu: (x, bias) -> gelu(x + bias), tanh form.
        gated_activation: (up, gate, up_bias, gate_bias) -> (up + up_bias) * f(gate + gate_bias);
            a bias may be None; f depends on the activation.
        gated_again: (gradient of the result, and the same) -> the result again, and the four's gradients.
        bias_dropout_add: (x, bias or None, residual, probability, training) -> sum.
        norm: the model's norm: (x, weight, bias, epsilon) -> normalized x; RMS norm has no bias.
        norm_of_sum: (x, residual, weight, bias, epsilon) -> their sum, and that normalized; None also if no
            layer normalizes such a sum, or adds dropout to it.
        norm_with_input: `norm` in a form that returns x too, and adds its gradient in the backward pass.
        flex_unusable: why FlexAttention cannot be used; None if it can.
    """

    softmax: Callable[[Tensor, float, Tensor | None], Tensor] | None = None
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    split_rotary: Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]] | None = None
    bias_gelu: Callable[[Tensor, Tensor], Tensor] | None = None
    gated_activation: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor] | None = None
    gated_again: Callable[..., tuple[Tensor | None, ...]] | None = None
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, float, bool], Tensor] | None = None
    norm: Callable[..., Tensor] | None = None
    norm_of_sum: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm_with_input: Callable[..., tuple[Tensor, Tensor]] | None = None
    flex_unusable: str | None = None


def choose_operators(
    resolved: Resolved, groups: Groups, *, device: torch.device, dtype: torch.dtype
) -> Operators:
    """Choose operators by the configuration and this machine's capabilities. Collective over all ranks.

    Args:
        resolved: the configuration.
        groups: this job's process groups.
        device: device of the layers.
        dtype: dtype of their activations.

    Raises:
        KernelUnavailable: a requested fused operator cannot be used.
    """
    config = resolved.config
    if config.model.onnx_safe:
        return _exported(config)
    if device.type == "cuda":
        private_compiler_cache()
    model, attention = config.model, config.attention
    chooser = _Chooser.of(resolved, groups, device=device, dtype=dtype)
    tokens = (model.seq_length, resolved.derived.micro_batch_size)
    heads = max(1, model.num_attention_heads // groups.model.size)
    shape_SBNK = (*tokens, heads, model.hidden_size // model.num_attention_heads)
    shape_SBF = (*tokens, max(1, resolved.derived.mlp_width // groups.model.size))
    shape_SBD = (*tokens, model.hidden_size)
    scores = (tokens[1], heads, tokens[0], tokens[0])
    norm, norm_of_sum, norm_with_input = _norms(config, chooser, shape_SBD)
    gated_activation, gated_again = _gated_activation(config, chooser, shape_SBF)
    has_gelu = model.activation == "gelu"
    rope = attention.pos_emb == "rotary" and attention.rope_fusion
    return Operators(
        softmax=_softmax(config, chooser, scores),
        rotary=chooser.fused("rope-fusion", rope, rotary, shape_SBNK, _rotary_of(config, groups)),
        # What writes gradients in place has no second derivatives.
        split_rotary=chooser.fused(
            "rope-fusion",
            False if config.engine.eigenvalue.enabled else rope,
            split_rotary,
            shape_SBNK,
            _projection_of(config, groups),
        ),
        bias_gelu=chooser.fused(
            "bias-gelu-fusion", has_gelu and model.bias_gelu_fusion, bias_gelu, shape_SBF
        ),
        gated_activation=gated_activation,
        gated_again=gated_again,
        bias_dropout_add=chooser.fused(
            "bias-dropout-fusion", _bias_dropout_fusion(config, device), bias_dropout_add, shape_SBD
        ),
        norm=norm,
        norm_of_sum=norm_of_sum,
        norm_with_input=norm_with_input,
        flex_unusable=_why_not_flex(config, device, head_width=shape_SBNK[-1]),
    )


def reference_operators(config: NeoXConfig, device: torch.device) -> Operators:
    """Return PyTorch's operators; attention is computed as with those that `choose_operators` returns."""
    width = config.model.hidden_size // config.model.num_attention_heads
    return replace(
        _exported(config) if stores_scores(config) else Operators(),
        flex_unusable=_why_not_flex(config, device, head_width=width),
    )


def choose_loss_operator(
    resolved: Resolved, groups: Groups, *, device: torch.device, vocab_size: int
) -> LossOperator | None:
    """Choose the operator for the loss of chunks of logits; None: PyTorch's. Collective over all ranks.

    Args:
        resolved: the configuration.
        groups: this job's process groups.
        device: device of the logits.
        vocab_size: entries of the vocabulary, with padding.

    Raises:
        KernelUnavailable: the fused operator is requested and cannot be used.
    """
    config, dtype = resolved.config, DTYPES[resolved.derived.precision]
    requested = config.model.loss_fusion
    if config.model.onnx_safe or dtype == torch.float16 or is_retrieval(config):
        return None
    if requested == "auto" and device.type == "cpu":
        # The default, about which there is nothing to report here.
        return None
    columns = -(-vocab_size // groups.model.size)
    rows = min(chunk_rows_on(device, columns), config.model.seq_length * resolved.derived.micro_batch_size)
    chooser = _Chooser.of(resolved, groups, device=device, dtype=dtype)
    return chooser.fused("loss-fusion", requested, cross_entropy, (rows, columns))


def _bias_dropout_fusion(config: NeoXConfig, device: torch.device) -> Requested:
    """Return what is requested; the reference draws other random numbers, so layers cannot alternate."""
    model = config.model
    if model.bias_dropout_fusion == "auto" and device.type == "cuda" and model.compile is not False:
        logger.info("bias_dropout_add: reference implementation, which torch.compile fuses")
        return False
    return model.bias_dropout_fusion


def _key_heads(config: NeoXConfig, groups: Groups) -> int:
    return max(1, (config.model.num_kv_heads or config.model.num_attention_heads) // groups.model.size)


def _projection_of(config: NeoXConfig, groups: Groups) -> MakeExample:
    """Return a maker of this model's projections, and angles."""
    return partial(_projection_arguments, _key_heads(config, groups), config.attention.rotary_pct)


def _projection_arguments(
    key_heads: int, share: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    sequence, batch, heads, width = shape
    whole = torch.randn(sequence, batch, (heads + 2 * key_heads) * width, dtype=dtype, device=device)
    angles = torch.rand(sequence, int(width * share) // 2, device=device)
    return whole.requires_grad_(), angles.cos(), angles.sin(), key_heads, width


def _rotary_of(config: NeoXConfig, groups: Groups) -> MakeExample:
    """Return a maker of this model's queries and keys, which are slices of a projection, and angles."""
    return partial(_rotary_arguments, _key_heads(config, groups), config.attention.rotary_pct)


def _rotary_arguments(
    key_heads: int, share: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    *_, heads, width = shape
    whole, cos, sin, *_ = _projection_arguments(key_heads, share, shape, dtype, device)
    query, key, _ = whole.detach().split([heads * width, key_heads * width, key_heads * width], dim=-1)
    return (
        query.unflatten(-1, (heads, width)).requires_grad_(),
        key.unflatten(-1, (key_heads, width)).requires_grad_(),
        cos,
        sin,
    )


def _why_not_flex(config: NeoXConfig, device: torch.device, *, head_width: int) -> str | None:
    if device.type != "cuda":
        return "it is used on GPUs alone (it has no backward pass on a CPU)"
    if config.model.attention_dropout > 0.0:
        return "it has no dropout (set attention-dropout: 0 to use it)"
    if head_width < _FLEX_HEAD_WIDTH:
        return f"it requires heads of at least {_FLEX_HEAD_WIDTH} channels, but these have {head_width}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chooser:
    """Chooses between the fused and the reference implementation of operators.

    Under autocast, whose tensors have two dtypes, it chooses the reference implementations; a rule refuses
    requests for the fused ones.
    """

    device: torch.device
    dtype: torch.dtype
    agree: Callable[[bool], bool] | None
    has_one_dtype: bool = True

    @classmethod
    def of(
        cls, resolved: Resolved, groups: Groups, *, device: torch.device, dtype: torch.dtype
    ) -> "_Chooser":
        """Return the chooser of a model."""
        return cls(
            device=device,
            dtype=dtype,
            agree=_agreement(groups.control),
            has_one_dtype=resolved.derived.autocast is None,
        )

    def form(
        self,
        parameter: str,
        requested: Requested,
        operator: Operator[..., Any],
        shape: tuple[int, ...],
        example: MakeExample | None = None,
    ) -> Function:
        """Return the implementation to call; an error names the parameter."""
        if not self.has_one_dtype:
            return operator.reference
        try:
            return choose(
                requested,
                operator,
                device=self.device,
                dtype=self.dtype,
                shape=shape,
                agree=self.agree,
                example=example,
            )
        except KernelUnavailable as error:
            raise KernelUnavailable(f"{parameter}: true: {error}") from error

    def fused(
        self,
        parameter: str,
        requested: Requested,
        operator: Operator[..., Any],
        shape: tuple[int, ...],
        example: MakeExample | None = None,
    ) -> Function | None:
        """Return the fused implementation, None if the layer uses PyTorch's operators."""
        chosen = self.form(parameter, requested, operator, shape, example)
        return None if chosen is operator.reference else chosen

    def all_have(self, operator: Operator[..., Any]) -> bool:
        """Return True if the operator can be used on every rank; log the reason."""
        if not self.has_one_dtype:
            logger.info("%s: PyTorch's kernel, because amp is enabled", operator.name)
            return False
        availability = operator.available(device=self.device, dtype=self.dtype)
        everywhere = availability.ok if self.agree is None else self.agree(availability.ok)
        reason = "another rank cannot use it" if availability.ok and not everywhere else availability.reason
        logger.info("%s: %s", operator.name, reason if everywhere else f"PyTorch's kernel, because {reason}")
        return everywhere


def _agreement(control: Group) -> Callable[[bool], bool] | None:
    return None if control.size == 1 else partial(all_ranks_agree, control)


def _norms(
    config: NeoXConfig, chooser: _Chooser, shape: tuple[int, ...]
) -> tuple[Function | None, Function | None, Function | None]:
    """Choose the norm, the norm of the sum of residual and attention, and the norm that returns its input.

    The second only if nothing is between the two. PyTorch's layer norm replaces NVIDIA apex's, which computes
    the same.
    """
    model = config.model
    if NORM_FACTS[model.norm].has_bias and not model.use_bias_in_norms:
        # The kernels add a bias; a rule refuses layernorm-fusion: true.
        return None, None, None
    if model.norm == "apexlayernorm":
        return apex_layer_norm.fused if chooser.all_have(apex_layer_norm) else None, None, None
    fused: dict[str, tuple[str, Requested, Operator[..., Any], Operator[..., Any]]] = {
        "layernorm": ("layernorm-fusion", model.layernorm_fusion, layer_norm, add_layer_norm),
        "rmsnorm": ("rmsnorm-fusion", model.rmsnorm_fusion, rms_norm, add_rms_norm),
    }
    if model.norm not in fused:
        return None, None, None
    parameter, requested, alone, of_sum = fused[model.norm]
    norm = chooser.fused(parameter, requested, alone, shape)
    with_input = None if norm is None else alone.with_input
    if model.hidden_dropout > 0.0 or model.gpt_j_residual or model.apply_residual_connection_post_layernorm:
        return norm, None, with_input
    return norm, chooser.fused(parameter, requested, of_sum, shape), with_input


def _gated_activation(
    config: NeoXConfig, chooser: _Chooser, shape: tuple[int, ...]
) -> tuple[Function | None, Function | None]:
    """Choose the gated activation, also for when it is computed again; only swiglu and geglu are fused."""
    model = config.model
    fused: dict[str, Operator[..., Any]] = {"swiglu": bias_swiglu, "geglu": bias_geglu}
    if model.activation not in fused:
        return None, None
    operator = fused[model.activation]
    chosen = chooser.fused("glu-fusion", model.glu_fusion, operator, shape)
    return chosen, None if chosen is None else operator.again


def stores_scores(config: NeoXConfig) -> bool:
    """Return True if attention stores its scores, for a requested kernel, to scale them, or for an export."""
    attention = config.attention
    fusions = (attention.scaled_upper_triang_masked_softmax_fusion, attention.scaled_masked_softmax_fusion)
    return True in fusions or attention.apply_query_key_layer_scaling or config.model.onnx_safe


def _softmax(
    config: NeoXConfig, chooser: _Chooser, shape: tuple[int, ...]
) -> Callable[[Tensor, float, Tensor | None], Tensor] | None:
    """Choose the softmax if attention stores scores."""
    attention = config.attention
    causal = attention.scaled_upper_triang_masked_softmax_fusion
    masked = attention.scaled_masked_softmax_fusion
    if not stores_scores(config):
        if "auto" in (causal, masked):
            logger.info("softmax: PyTorch's scaled_dot_product_attention, which stores no scores")
        return None
    name, requested, unmasked = "scaled-upper-triang-masked-softmax-fusion", causal, scaled_causal_softmax
    if is_encoder(config):
        # Without a mask, all keys are seen.
        name, requested, unmasked = "scaled-masked-softmax-fusion", masked, scaled_softmax
    elif masked is True or (masked and not causal):
        name = "scaled-masked-softmax-fusion"
        return partial(_masked_softmax, chooser.form(name, masked, scaled_masked_softmax, shape))
    return partial(
        _softmax_by_mask,
        chooser.form(name, requested, unmasked, shape),
        chooser.form(name, requested, scaled_masked_softmax, shape),
    )


def _softmax_by_mask(
    unmasked: Function, masked: Function, scores_BNST: Tensor, scale: float, masked_out: Tensor | None
) -> Tensor:
    """Apply the operator without a mask, which may hide later keys, or the masked operator."""
    weights_BNST: Tensor = (
        unmasked(scores_BNST, scale) if masked_out is None else masked(scores_BNST, masked_out, scale)
    )
    return weights_BNST


def _masked_softmax(masked: Function, scores_BNST: Tensor, scale: float, masked_out: Tensor | None) -> Tensor:
    """Apply the masked operator; without a mask, mask later keys."""
    if masked_out is None:
        masked_out = hidden_keys(scores_BNST.shape[-2], scores_BNST.shape[-1], None, scores_BNST.device)
    weights_BNST: Tensor = masked(scores_BNST, masked_out, scale)
    return weights_BNST


def _exported(config: NeoXConfig) -> Operators:
    """Return the operators of a model for export.

    They are reference implementations, and a softmax of stored scores instead of PyTorch's fused attention,
    which its exporter decomposes wrongly with shared keys (seen with torch 2.13).
    """
    unmasked = scaled_softmax if is_encoder(config) else scaled_causal_softmax
    return Operators(
        softmax=partial(_softmax_by_mask, unmasked.reference, scaled_masked_softmax.reference),
        flex_unusable="the exporter does not support it",
    )
