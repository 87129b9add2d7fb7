"""Build a transformer layer, and the parts that it shares with the rest of the model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import Tensor, nn

from neox_config.spec import model as kinds
from neox_config.spec.model import Adapters, Attention, ModelSpec
from neox_config.spec.run import RunSpec
from neox_model.assembly.attention import build_attention
from neox_model.assembly.norms import build_norm
from neox_model.assembly.operators import Operators
from neox_model.errors import LayoutError
from neox_model.initialization import build_init_method, multiplied
from neox_model.layers.activations import ACTIVATIONS, GATED_ACTIVATIONS, clamped_swiglu
from neox_model.layers.attention import DocumentMasks
from neox_model.layers.experts import Balance, ExpertBlocks, Experts, Router
from neox_model.layers.mlp import MLP, GatedMLP
from neox_model.layers.positions import RotaryTables
from neox_model.layers.residual_layer import add_dropped
from neox_model.layers.transformer_layer import TransformerLayer
from neox_model.parallel.groups import Group
from neox_model.parallel.logical import InitMethod
from neox_model.parallel.low_rank import LowRank
from neox_model.parallel.sequence import with_own_dropout

__all__ = [
    "LAYERS",
    "MIXERS",
    "build_activation",
    "build_adapters",
    "build_init",
    "build_layer",
]

Factory = Callable[[], nn.Module]
Options = dict[str, Any]

# Class of a mixer -> function with the arguments of `build_attention` that returns a factory of its module.
MIXERS: Mapping[type[Any], Callable[..., Factory]] = {
    Attention: build_attention,
}

# Class of a mixer that is all of its layer -> function that returns the class of the layer and its keyword
# arguments, given those that all layers have.
LAYERS: Mapping[type[Any], str] = {kinds.SpatialMLP: "neox_model.extras.gmlp.build:build_gmlp_layer"}

# The class of layers that process some of the tokens (`RunSpec.dropout.token_layers`).
_DROPS_TOKENS = "neox_model.extras.token_dropping.layer:TokenDroppingTransformerLayer"


def build_init(run: RunSpec, kind: str, *, is_output: bool = False) -> InitMethod:
    """Return the init method of a kind of weights; `is_output`: they write to the residual stream."""
    chosen, of_kind = run.initialization, run.multipliers.get(kind)
    init = build_init_method(
        chosen.output_method if is_output else chosen.method,
        std=chosen.std,
        hidden_size=chosen.width,
        num_layers=chosen.depth,
    )
    if of_kind is None:
        return init
    return multiplied(init, kind, times=of_kind.std, rows=of_kind.rows, columns=of_kind.columns)


def build_adapters(adapters: Adapters | None, dropout: float) -> dict[str, LowRank]:
    """Return the form of each adapter by the name of its matrix in a layer; empty without adapters."""
    if adapters is None:
        return {}
    return dict.fromkeys(adapters.matrices, LowRank(adapters.rank, adapters.alpha, dropout))


def build_layer(
    spec: ModelSpec,
    layer_index: int,
    run: RunSpec,
    *,
    group: Group,
    operators: Operators,
    masks: DocumentMasks | None = None,
    tables: dict[Any, RotaryTables] | None = None,
) -> tuple[type[nn.Module], Options]:
    """Return the class of one layer and its keyword arguments.

    Args:
        spec: the model.
        layer_index: index of the layer, from 0.
        run: how it runs.
        group: the tensor-parallel ranks.
        operators: the operators that the layer calls.
        masks: masks of documents that the layers share; None: the layer makes its own.
        tables: rotary tables that the layers share, to which it adds; None: likewise.

    Raises:
        LayoutError: sizes do not divide.
    """
    layer = spec.layers[layer_index]

    def inits(kind: str, output_kind: str) -> Options:
        output_init = build_init(run, output_kind, is_output=True)
        return {"init": build_init(run, kind), "output_init": output_init, "group": group}

    norm_class, norm_kwargs = build_norm(layer.norm, spec.width, operators, group)
    shared: Options = {
        "norm": partial(norm_class, **norm_kwargs),
        "dropout": run.dropout.hidden,
        "residual_after_norm": layer.residual_after_norm,
        "norm_placement": layer.norm_placement,
        "bias_dropout_add": with_own_dropout(operators.bias_dropout_add or add_dropped, group),
        "return_hidden_only": layer_index == len(spec.layers) - 1,
    }
    if type(layer.mixer) in LAYERS:
        build: Callable[..., tuple[type[nn.Module], Options]] = resolve_name(LAYERS[type(layer.mixer)])
        return build(layer, spec.width, run, shared, inits=inits("up", "down"), operators=operators)
    if layer.norm_placement != "before":
        # The norm of an output is of the sum with its bias.
        operators = replace(operators, bias_dropout_add=None)
    drops_tokens = layer_index in run.dropout.token_layers
    adapters = build_adapters(spec.adapters, run.dropout.adapters)
    options = {
        "attention": MIXERS[type(layer.mixer)](
            layer.mixer,
            layer_index,
            run,
            width=spec.width,
            **inits("qkv", "dense"),
            operators=operators,
            adapters=adapters,
            # The document ids of a layer that drops tokens are those of the tokens that it keeps.
            masks=None if drops_tokens else masks,
            norm=layer.norm,
            tables=tables,
            gate_init=build_init(run, "gate"),
        ),
        "mlp": CHANNELS[type(layer.channel)](
            layer.channel, spec.width, run, {**inits("up", "down"), "adapters": adapters}, operators
        ),
        "parallel_residual": layer.residual == "parallel",
        "shares_norm": layer.shares_norm,
        "adds_in_norm": operators.norm_of_sum is not None,
        "group": group,
    }
    return resolve_name(_DROPS_TOKENS) if drops_tokens else TransformerLayer, shared | options


def _mlp(channel: kinds.MLP, width: int, run: RunSpec, inits: Options, operators: Operators) -> Factory:
    _check_width(channel.width, "MLP", "mlp-width", inits["group"])
    options = {
        **inits,
        "bias": channel.bias,
        "skip_bias": operators.bias_dropout_add is not None,
        "activation": build_activation(channel.activation),
    }
    if channel.is_gated:
        is_fused = operators.gated_again is not None
        # Not an operator to choose: it computes something else, also where no operator is chosen.
        options["gated_activation"] = _clamped(channel) or operators.gated_activation
        options["gated_again"] = operators.gated_again
        options["recomputes_product"] = run.recomputation.recomputes_product(is_fused=is_fused)
        options["adds_gradients"] = not run.layout.splits_backward
        return partial(GatedMLP, width, channel.width, **options)
    options["bias_activation"] = operators.bias_gelu
    return partial(MLP, width, channel.width, **options)


def _clamped(channel: kinds.MLP | kinds.Experts) -> Callable[..., Tensor] | None:
    """Return the function of up and gate; None: it only activates and multiplies."""
    if channel.is_plain:
        return None
    return partial(clamped_swiglu, limit=channel.limit, alpha=channel.alpha, up_offset=channel.up_offset)


def _experts(
    channel: kinds.Experts, width: int, run: RunSpec, inits: Options, operators: Operators
) -> Factory:
    group, given, shared, adapters = inits["group"], run.experts, None, inits["adapters"]
    _check_width(channel.width, "experts'", "moe-expert-width", group)
    dispatch = operators.expert_dispatch
    if channel.number % dispatch.group.size:
        raise LayoutError(
            f"{channel.number} experts cannot be divided over {dispatch.group.size} ranks; set "
            "expert-parallel-size to a divisor of moe-num-experts"
        )
    balance = Balance(
        sinkhorn=given.moe_router_type == "sinkhorn",
        jitter=given.moe_jitter_eps,
        loss=given.moe_balance_loss,
        over=given.moe_balance_over,
        z_loss=given.moe_router_z_loss,
        accumulation=run.batch.accumulation,
    )
    if channel.shared is not None:
        _check_width(channel.shared_width, "shared expert's", "moe-shared-width", group)
        # Its rank's part of the sum is added to that of the others, by torch's operators.
        plain = replace(operators, bias_dropout_add=None, bias_gelu=None)
        later = {name: replace(form, is_summed_later=True) for name, form in adapters.items()}
        shared = _mlp(channel.shared, width, run, {**inits, "adapters": later}, plain)
    router = partial(
        Router,
        width,
        channel.number,
        chosen=channel.chosen,
        scores=channel.scores,
        normalized=channel.normalized,
        scale=channel.weight_scale,
        groups=channel.groups,
        top_groups=channel.top_groups,
        has_bias=channel.has_bias,
        has_logits_bias=channel.logits_bias,
        balance=balance,
        init=inits["init"],
        group=group,
    )
    blocks = partial(
        ExpertBlocks,
        hidden_size=width,
        width=channel.width,
        activation=build_activation(channel.activation),
        is_gated=channel.is_gated,
        gated=_clamped(channel),
        bias=channel.biases,
        product=operators.expert_product,
        adapters=adapters,
        adapter_product=operators.adapter_product,
        init=inits["init"],
        output_init=inits["output_init"],
        group=group,
        experts=dispatch.group,
    )
    return partial(
        Experts,
        width,
        router=router,
        blocks=blocks,
        init=inits["init"],
        shared=shared,
        has_shared_gate=channel.shared_gate,
        group=group,
        dispatch=dispatch,
    )


def _check_width(width: int, whose: str, name: str, group: Group) -> None:
    if width % group.size:
        raise LayoutError(
            f"the {whose} width of {width:,} cannot be split over {group.size} tensor-parallel ranks; "
            f"set {name} to a multiple of {group.size}"
        )


# Class of a channel mixer -> function that returns a factory of its module.
CHANNELS: Mapping[type[Any], Callable[..., Factory]] = {kinds.MLP: _mlp, kinds.Experts: _experts}


def build_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function; for a gated activation, that of the gate."""
    return (GATED_ACTIVATIONS | ACTIVATIONS)[name]
