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

from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import MLP, Attention, Experts, ModelSpec, Retrieval, Rotary
from neox_config.spec.run import Fusion, Fusions, RunSpec
from neox_kernels import (
    KernelUnavailable,
    Operator,
    add_layer_norm,
    add_rms_norm,
    apex_layer_norm,
    bias_dropout_add,
    bias_geglu,
    bias_geglu_tanh,
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
from neox_model.layers.experts import (
    LOCAL_DISPATCH,
    Dispatcher,
    grouped_product,
    uncompiled_grouped_product,
)
from neox_model.parallel.cross_entropy import LossOperator, chunk_rows_on
from neox_model.parallel.groups import Groups

__all__ = ["Operators", "choose_loss_operator", "choose_operators", "reference_operators"]

logger = logging.getLogger(__name__)

# Smallest head width that FlexAttention's kernels support.
_FLEX_HEAD_WIDTH = 16

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
        expert_product: see `neox_model.layers.experts`; None: a loop over experts.
        adapter_product: the same for the adapters of experts.
        expert_dispatch: sends rows to the ranks with their experts.
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
    expert_product: Function | None = None
    adapter_product: Function | None = None
    expert_dispatch: Dispatcher = LOCAL_DISPATCH
    flex_unusable: str | None = None


def choose_operators(
    spec: ModelSpec, run: RunSpec, groups: Groups, *, device: torch.device, dtype: torch.dtype
) -> Operators:
    """Choose operators by the model, the run and this machine's capabilities. Collective over all ranks.

    Args:
        spec: the model.
        run: how it runs.
        groups: this job's process groups.
        device: device of the layers.
        dtype: dtype of their activations.

    Raises:
        KernelUnavailable: a requested fused operator cannot be used.
    """
    fusions = run.fusions
    if fusions.is_for_export:
        return _exported(is_encoder=spec.is_encoder)
    if device.type == "cuda":
        private_compiler_cache()
    chooser = _Chooser(groups, device=device, dtype=dtype, autocast=run.precision.autocast)
    tokens, ranks = (run.batch.length, run.batch.micro), groups.model.size
    shape_SBD = (*tokens, spec.width)
    # The reference draws other random numbers, so layers cannot alternate.
    dropout_fusion = fusions.bias_dropout
    if dropout_fusion == "auto" and device.type == "cuda" and run.compilation.requested is not False:
        logger.info("bias_dropout_add: reference implementation, which torch.compile fuses")
        dropout_fusion = False
    norm, norm_of_sum, norm_with_input = _norms(spec, fusions, run.dropout.hidden, chooser, shape_SBD)
    found = Operators(
        bias_dropout_add=chooser.fused("bias-dropout-fusion", dropout_fusion, bias_dropout_add, shape_SBD),
        norm=norm,
        norm_of_sum=norm_of_sum,
        norm_with_input=norm_with_input,
    )
    # Attention and MLP have one shape in all layers that have them, but not all rotate queries.
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    attention = max(mixers, key=lambda mixer: isinstance(mixer.position, Rotary), default=None)
    if attention is not None:
        found = replace(
            found,
            **_of_attention(attention, run, chooser, tokens, ranks, is_encoder=spec.is_encoder),
        )
    channel = next((layer.channel for layer in spec.layers if isinstance(layer.channel, MLP)), None)
    if channel is not None:
        found = replace(found, **_of_channel(channel, fusions, chooser, tokens, ranks))
    experts = next((layer.channel for layer in spec.layers if isinstance(layer.channel, Experts)), None)
    if experts is not None:
        widths = [spec.width, experts.width // ranks]
        found = replace(
            found,
            expert_product=_expert_product("experts", widths, chooser),
            expert_dispatch=Dispatcher(groups.experts),
        )
        if spec.adapters is not None and {"up", "gate", "down"} & {*spec.adapters.matrices}:
            adapter_product = _expert_product("experts' adapters", [*widths, spec.adapters.rank], chooser)
            found = replace(found, adapter_product=adapter_product)
    return found


def _expert_product(whose: str, widths: list[int], chooser: "_Chooser") -> Function | None:
    why_not = _why_not_grouped(widths, chooser)
    logger.info("%s: %s", whose, why_not or "products of all experts are one operator (grouped_mm)")
    grouped = grouped_product if chooser.dtype == torch.bfloat16 else uncompiled_grouped_product
    return None if why_not else grouped


def _why_not_grouped(widths: list[int], chooser: "_Chooser") -> str | None:
    """Return why the products of experts are computed one after the other; None if they are not."""
    dtypes = (torch.bfloat16,) if chooser.device.type == "cuda" else (torch.bfloat16, torch.float32)
    loop, unit = "products are computed in a loop over experts, because", 16 // chooser.dtype.itemsize
    if not chooser.has_one_dtype:
        return f"{loop} grouped_mm does not know autocast"
    if chooser.dtype not in dtypes:
        usable = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        return f"{loop} grouped_mm requires {usable} on this device"
    if any(width % unit for width in widths):
        return f"{loop} grouped_mm requires widths of a multiple of 16 bytes: set multiples of {unit}"
    return None


def _of_attention(
    mixer: Attention,
    run: RunSpec,
    chooser: "_Chooser",
    tokens: tuple[int, int],
    ranks: int,
    *,
    is_encoder: bool,
) -> dict[str, Any]:
    """Choose the softmax and the rotary embedding, and whether FlexAttention is used."""
    fusions, why_not = run.fusions, _why_not_flex(mixer.head_width, run.dropout.attention, chooser.device)
    softmax: Function | None = None
    heads, key_heads = max(1, mixer.heads // ranks), max(1, mixer.kv_heads // ranks)
    share = mixer.position.fraction if isinstance(mixer.position, Rotary) else 0.0
    shape_SBNK, scores = (*tokens, heads, mixer.head_width), (tokens[1], heads, tokens[0], tokens[0])
    if _stores_scores(fusions.stores_scores, mixer.changes_scores, why_not):
        softmax = _softmax(fusions, chooser, scores, is_encoder=is_encoder)
    elif "auto" in (fusions.causal_softmax, fusions.masked_softmax):
        logger.info("softmax: PyTorch's scaled_dot_product_attention, which stores no scores")
    # What writes gradients in place has no second derivatives. Norms come between projection and rotation.
    in_place = False if fusions.has_second_derivatives or mixer.qk_norm else fusions.rope
    if mixer.qk_norm and share and fusions.rope is not False:
        logger.info("split_rotary: not used, because queries and keys have norms before they are rotated")
    rotated = partial(_rotary_arguments, key_heads, share)
    split = partial(_projection_arguments, key_heads, share)
    return {
        "softmax": softmax,
        "flex_unusable": why_not,
        "rotary": chooser.fused("rope-fusion", fusions.rope, rotary, shape_SBNK, rotated),
        "split_rotary": chooser.fused("rope-fusion", in_place, split_rotary, shape_SBNK, split),
    }


def _of_channel(
    channel: MLP, fusions: Fusions, chooser: "_Chooser", tokens: tuple[int, int], ranks: int
) -> dict[str, Any]:
    """Choose the activation of the MLP, also for when a gated one is computed again."""
    shape_SBF = (*tokens, max(1, channel.width // ranks))
    has_gelu = channel.activation in ("gelu", "gelu_tanh")
    gelu = chooser.fused("bias-gelu-fusion", has_gelu and fusions.bias_gelu, bias_gelu, shape_SBF)
    gated: dict[str, Operator[..., Any]] = {
        "swiglu": bias_swiglu,
        "geglu": bias_geglu,
        "geglu_tanh": bias_geglu_tanh,
    }
    if channel.activation not in gated:
        return {"bias_gelu": gelu}
    if not channel.is_plain:
        logger.info("swiglu: PyTorch's operators, because the fused ones have no limit, alpha or offset")
        return {"bias_gelu": gelu}
    operator = gated[channel.activation]
    chosen = chooser.fused("glu-fusion", fusions.glu, operator, shape_SBF)
    again = None if chosen is None else operator.again
    return {"bias_gelu": gelu, "gated_activation": chosen, "gated_again": again}


def reference_operators(
    mixer: Attention, fusions: Fusions, dropout: float, device: torch.device
) -> Operators:
    """Return PyTorch's operators; attention is computed as with those that `choose_operators` returns.

    Args:
        mixer: the attention.
        fusions: requested operators.
        dropout: dropout probability of attention weights.
        device: device of the layers.
    """
    why_not = _why_not_flex(mixer.head_width, dropout, device)
    stores_scores = _stores_scores(fusions.stores_scores, mixer.changes_scores, why_not)
    found = _exported(is_encoder=mixer.both_ways) if stores_scores else Operators()
    return replace(found, flex_unusable=why_not)


def choose_loss_operator(
    spec: ModelSpec, run: RunSpec, groups: Groups, *, device: torch.device, vocab_size: int
) -> LossOperator | None:
    """Choose the operator for the loss of chunks of logits; None: PyTorch's. Collective over all ranks.

    Args:
        spec: the model.
        run: how it runs.
        groups: this job's process groups.
        device: device of the logits.
        vocab_size: entries of the vocabulary, with padding.

    Raises:
        KernelUnavailable: the fused operator is requested and cannot be used.
    """
    dtype, requested = DTYPES[run.precision.weights], run.fusions.loss
    if run.fusions.is_for_export or dtype == torch.float16 or isinstance(spec.head, Retrieval):
        return None
    if requested == "auto" and device.type == "cpu":
        # The default, about which there is nothing to report here.
        return None
    columns = -(-vocab_size // groups.model.size)
    rows = min(chunk_rows_on(device, columns), run.batch.length * run.batch.micro)
    if spec.head.softcap is not None:
        dtype = torch.promote_types(dtype, torch.float32)
    chooser = _Chooser(groups, device=device, dtype=dtype, autocast=run.precision.autocast)
    return chooser.fused("loss-fusion", requested, cross_entropy, (rows, columns))


def _projection_arguments(
    key_heads: int, share: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """Return a projection of this model, and angles."""
    sequence, batch, heads, width = shape
    whole = torch.randn(sequence, batch, (heads + 2 * key_heads) * width, dtype=dtype, device=device)
    angles = torch.rand(sequence, int(width * share) // 2, device=device)
    return whole.requires_grad_(), angles.cos(), angles.sin(), key_heads, width


def _rotary_arguments(
    key_heads: int, share: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """Return queries and keys of this model, which are slices of a projection, and angles."""
    *_, heads, width = shape
    whole, cos, sin, *_ = _projection_arguments(key_heads, share, shape, dtype, device)
    query, key, _ = whole.detach().split([heads * width, key_heads * width, key_heads * width], dim=-1)
    return (
        query.unflatten(-1, (heads, width)).requires_grad_(),
        key.unflatten(-1, (key_heads, width)).requires_grad_(),
        cos,
        sin,
    )


def _why_not_flex(head_width: int, dropout: float, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it is used on GPUs alone (it has no backward pass on a CPU)"
    if dropout > 0.0:
        return "it has no dropout (set attention-dropout: 0 to use it)"
    if head_width < _FLEX_HEAD_WIDTH:
        return f"it requires heads of at least {_FLEX_HEAD_WIDTH} channels, but these have {head_width}"
    return None


def _stores_scores(is_requested: bool, changes: tuple[str, ...], why_not_flex: str | None) -> bool:
    """Return True if attention stores its scores, as requested or because nothing else computes it."""
    return is_requested or (bool(changes) and why_not_flex is not None)


class _Chooser:
    """Chooses between the fused and the reference implementation of operators.

    Under autocast, whose tensors have two dtypes, it chooses the reference implementations; a rule refuses
    requests for the fused ones.
    """

    def __init__(
        self, groups: Groups, *, device: torch.device, dtype: torch.dtype, autocast: str | None
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.agree = None if groups.control.size == 1 else partial(all_ranks_agree, groups.control)
        self.has_one_dtype = autocast is None

    def form(
        self,
        parameter: str,
        requested: Fusion,
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
        requested: Fusion,
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


def _norms(
    spec: ModelSpec, fusions: Fusions, dropout: float, chooser: _Chooser, shape: tuple[int, ...]
) -> tuple[Function | None, Function | None, Function | None]:
    """Choose the norm, the norm of the sum of residual and attention, and the norm that returns its input.

    The second only if nothing is between the two. PyTorch's layer norm replaces NVIDIA apex's, which computes
    the same.
    """
    if NORM_FACTS[spec.norm.kind].has_bias and not spec.norm.bias:
        # The kernels add a bias; a rule refuses layernorm-fusion: true.
        return None, None, None
    if fusions.apex_norm:
        if spec.norm.zero_centered:
            logger.info("apex_layer_norm: PyTorch's kernel, because weights are stored minus 1")
            return None, None, None
        return apex_layer_norm.fused if chooser.all_have(apex_layer_norm) else None, None, None
    fused: dict[str, tuple[str, Fusion, Operator[..., Any], Operator[..., Any]]] = {
        "layernorm": ("layernorm-fusion", fusions.layernorm, layer_norm, add_layer_norm),
        "rmsnorm": ("rmsnorm-fusion", fusions.rmsnorm, rms_norm, add_rms_norm),
    }
    if spec.norm.kind not in fused:
        return None, None, None
    parameter, requested, alone, fused_add_norm = fused[spec.norm.kind]
    norm = chooser.fused(parameter, requested, alone, shape)
    with_input = None if norm is None else alone.with_input
    adds_first = all(
        each.residual == "serial" and not each.residual_after_norm and each.norm_placement != "after"
        for each in spec.layers
    )
    if dropout > 0.0 or not adds_first:
        return norm, None, with_input
    return norm, chooser.fused(parameter, requested, fused_add_norm, shape), with_input


def _softmax(
    fusions: Fusions, chooser: _Chooser, shape: tuple[int, ...], *, is_encoder: bool
) -> Callable[[Tensor, float, Tensor | None], Tensor]:
    """Choose the softmax of stored scores."""
    causal, masked = fusions.causal_softmax, fusions.masked_softmax
    name, requested, unmasked = "scaled-upper-triang-masked-softmax-fusion", causal, scaled_causal_softmax
    if is_encoder:
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


def _exported(*, is_encoder: bool) -> Operators:
    """Return the operators of a model for export.

    They are reference implementations, and a softmax of stored scores instead of PyTorch's fused attention,
    which its exporter decomposes wrongly with shared keys (seen with torch 2.13).
    """
    unmasked = scaled_softmax if is_encoder else scaled_causal_softmax
    return Operators(
        softmax=partial(_softmax_by_mask, unmasked.reference, scaled_masked_softmax.reference),
        flex_unusable="the exporter does not support it",
    )
