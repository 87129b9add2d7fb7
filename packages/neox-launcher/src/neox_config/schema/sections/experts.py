"""Mixture of experts: layers whose feed-forward block is chosen for each token."""

from typing import Literal

from neox_config.schema.parameter import Section, param

__all__ = ["ExpertsSection"]

_WHEN_ON = "moe_num_experts >= 2"
_TOP_K = "moe_num_experts is above 1 and moe_router_type is topk"


class ExpertsSection(Section, resume="model"):
    """Mixture of experts: a router sends each token to a few of many feed-forward blocks, the experts.

    No token is dropped, whatever the experts' shares are.
    """

    moe_num_experts: int = param(
        1,
        origin="NeoX",
        ge=1,
        le=65_536,
        source="arXiv:1701.06538",
        doc="Number of experts of a layer that has them; 1: no layer has experts.",
    )
    moe_top_k: int = param(
        1,
        origin="NeoX",
        ge=1,
        le=65_536,
        used_when=_WHEN_ON,
        doc="Experts per token. Their outputs are added, each times the router's weight.",
    )
    moe_expert_interval: int = param(
        1,
        origin="NeoX",
        ge=1,
        used_when=_WHEN_ON,
        doc="Layers 0, n, 2n and so on have experts, the others a feed-forward block.",
    )
    moe_layers: tuple[int, ...] | None = param(
        None,
        origin="ours",
        none_means="those of moe_expert_interval",
        used_when=_WHEN_ON,
        doc="Numbers of the layers that have experts, from 0.",
    )
    moe_expert_width: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000_000,
        none_means="intermediate_size if it is given, else 4 * hidden_size, rounded up to a multiple of 256",
        used_when=_WHEN_ON,
        doc="Inner width of an expert; with a gated activation, that of each of its two input matrices.",
    )
    moe_router_type: Literal["sinkhorn", "topk"] = param(
        "sinkhorn",
        origin="NeoX",
        resume="training",
        used_when=_WHEN_ON,
        source="arXiv:2202.01169 (sinkhorn)",
        doc="How experts are chosen in training. topk: the largest scores. sinkhorn: the largest after three "
        "steps that balance the experts over all tokens of the micro-batch, also over later ones. Evaluation "
        "and generation always choose the largest scores.",
    )
    moe_scores: Literal["auto", "softmax", "sigmoid"] = param(
        "auto",
        origin="ours",
        used_when=_WHEN_ON,
        doc="Function of the router's logits, whose results are the weights of the chosen experts. auto is "
        "what GPT-NeoX does: sigmoid for one expert per token with moe-router-type: sinkhorn, else softmax.",
    )
    moe_normalize_weights: bool = param(
        False,
        origin="ours",
        used_when=_WHEN_ON,
        doc="Divide the weights of a token's experts by their sum, as in Mixtral.",
    )
    moe_weight_scale: float = param(
        1.0,
        origin="ours",
        gt=0,
        le=1_000_000,
        used_when=_WHEN_ON,
        doc="Factor of the weights of a token's experts, after they are normalized; DeepSeek-V3 has 2.5.",
    )
    moe_router_bias: bool = param(
        False,
        origin="ours",
        used_when=_WHEN_ON,
        doc="Add a learned bias to the router's logits, and so to scores and weights, as in gpt-oss; "
        "moe-expert-bias changes the choice alone.",
    )
    moe_groups: int = param(
        1,
        origin="ours",
        ge=1,
        le=65_536,
        used_when=_TOP_K,
        source="arXiv:2405.04434 (softmax), arXiv:2412.19437 (sigmoid)",
        doc="Divide the experts into this many groups of neighbors, of which a token first chooses "
        "moe-top-groups, and then its experts from these. What a group counts is its largest score with "
        "moe-scores: softmax, as in DeepSeek-V2, and the sum of its two largest with sigmoid, as in "
        "DeepSeek-V3, each with the expert's bias.",
    )
    moe_top_groups: int = param(
        1,
        origin="ours",
        ge=1,
        le=65_536,
        used_when="moe_groups >= 2",
        doc="Groups of experts among which a token chooses.",
    )
    moe_jitter_eps: float | None = param(
        None,
        origin="NeoX",
        gt=0,
        lt=1,
        resume="training",
        none_means="no jitter",
        used_when=_TOP_K,
        source="arXiv:2101.03961",
        doc="In training, multiply each input of the router by a random number from 1 - this to 1 + this.",
    )
    use_bias_in_experts: bool = param(
        False,
        origin="ours",
        used_when=_WHEN_ON,
        doc="Add biases to the projections of experts, as in gpt-oss. The shared expert has none.",
    )
    moe_shared_width: int = param(
        0,
        origin="ours",
        ge=0,
        le=1_000_000_000,
        used_when=_WHEN_ON,
        source="arXiv:2401.06066",
        doc="Inner width of a shared expert, which all tokens pass in addition; 0: there is none.",
    )
    moe_shared_gate: bool = param(
        False,
        origin="ours",
        used_when="moe_shared_width >= 1",
        doc="Multiply the output of the shared expert by the sigmoid of a learned number per token, as in "
        "Qwen2-MoE.",
    )
    moe_balance_loss: float = param(
        0.0,
        origin="ours",
        ge=0,
        le=1_000,
        resume="training",
        used_when=_TOP_K,
        source="arXiv:2412.19437, equation 17",
        doc="Coefficient of a loss that balances the experts of each layer: the number of experts times the "
        "sum over them of their share of the tokens times their mean share of scores, 1 if they are equal. "
        "Its gradient reaches the router; the logged losses do not contain it. 1e-2 is usual.",
    )
    moe_balance_over: Literal["sequence", "micro_batch", "batch"] = param(
        "sequence",
        origin="ours",
        resume="training",
        used_when="moe_balance_loss is not 0",
        source="arXiv:2101.03961 (micro_batch); arXiv:2501.11873 (batch)",
        doc="The tokens over which moe-balance-loss takes the experts' shares of tokens. sequence: those of "
        "each sequence, so that the result does not depend on the layout. micro_batch: those of each "
        "micro-batch of a data-parallel rank, as in Switch. batch: those of the update up to the current "
        "micro-batch, of all data-parallel ranks: experts may specialize in parts of a batch. Mean scores "
        "are always those of the sequence or of the rank's micro-batch, and the losses of micro-batches and "
        "ranks are averaged. More ranks instead of more micro-batches are the same for micro_batch, but not "
        "for batch, where ranks count at once.",
    )
    moe_router_z_loss: float = param(
        0.0,
        origin="ours",
        ge=0,
        le=1_000,
        resume="training",
        used_when=_WHEN_ON,
        source="arXiv:2202.08906",
        doc="Coefficient of the mean square of the logarithm of the sum of the exponentials of each token's "
        "router logits, which keeps them small. As with moe-balance-loss, losses do not contain it. 1e-3 is "
        "usual.",
    )
    moe_expert_bias: bool = param(
        False,
        origin="ours",
        used_when=_TOP_K,
        source="arXiv:2408.15664",
        doc="Add a number per expert to the scores by which experts are chosen, and not to their weights. "
        "After each update that of an expert with less than the mean number of tokens grows, and others "
        "shrink.",
    )
    moe_expert_bias_rate: float = param(
        0.001,
        origin="ours",
        ge=0,
        le=1,
        resume="training",
        used_when="moe_expert_bias is true",
        doc="Change of moe-expert-bias at an update; 0 leaves it as it is, and so does lora-rank.",
    )
