"""The transformer model: sizes, norms, activation, dropout and initialization."""

from typing import Literal

from neox_config.facts.activations import ACTIVATION_FACTS, ActivationName
from neox_config.facts.attention import GMLP_TYPES, WITH_HEADS, has_layers
from neox_config.facts.norms import NormName, with_bias, with_epsilon, with_weight
from neox_config.schema.parameter import FILLED_IN, Section, param

__all__ = ["Fusion", "InitMethod", "ModelSection"]

# True: use the fused operator, or raise an error; auto: use it where it is available and faster.
Fusion = bool | Literal["auto"]

InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
    "single_residual_scaled_normal",
]

_GATED = [name for name, facts in ACTIVATION_FACTS.items() if facts.is_gated]


class ModelSection(Section, resume="model"):
    """Architecture of the model, independent of the parallel layout."""

    num_layers: int = param(origin="Meg", gt=0, le=10_000, doc="Number of transformer layers.")
    hidden_size: int = param(
        origin="Meg", gt=0, le=1_000_000, doc="Hidden size, the width of the activations between layers."
    )
    num_attention_heads: int = param(
        origin="Meg",
        gt=0,
        le=100_000,
        doc="Number of attention heads per layer, each of head-dim channels.",
    )
    num_kv_heads: int | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=100_000,
        none_means="num_attention_heads",
        source="arXiv:2305.13245",
        doc="Number of key and value heads (grouped-query attention). Each is shared by num-attention-heads "
        "/ num-kv-heads query heads.",
    )
    head_dim: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000,
        none_means="hidden_size / num_attention_heads",
        used_when=WITH_HEADS,
        doc="Width of an attention head: channels of a query, key and value. If it is set, "
        "num-attention-heads does not have to divide hidden-size.",
    )
    max_position_embeddings: int = param(
        origin="Meg",
        gt=0,
        le=1_000_000_000,
        doc="Maximum sequence length that the model supports; the size of a learned position embedding. "
        "With other position embeddings, it only limits seq-length.",
    )
    seq_length: int = param(
        FILLED_IN,
        none_means="max_position_embeddings",
        origin="Meg",
        resume="training",
        gt=0,
        le=1_000_000_000,
        doc="Sequence length in tokens of training samples.",
    )
    norm: NormName = param(
        "layernorm",
        origin="NeoX",
        doc="Normalization of the sublayers (norm-placement) and at the end of the model. "
        "non_parametric_layernorm is layernorm without weight and bias.",
    )
    norm_placement: Literal["before", "after", "both"] = param(
        "before",
        origin="ours",
        source="arXiv:2501.00656 (after), arXiv:2408.00118 (both)",
        doc="Norms of a sublayer (attention, feed-forward block). before: one on its input. after: one on "
        "its output, before it is added to the residual, as in OLMo 2. both: one on each, as in Gemma 2.",
    )
    norm_zero_centered: bool = param(
        False,
        origin="ours",
        used_when=with_weight(),
        doc="Store the weight of each norm minus 1, as Gemma does, so that it begins at 0; the norm "
        "multiplies by 1 + weight.",
    )
    layernorm_epsilon: float = param(
        1e-5,
        origin="Meg",
        gt=0,
        used_when=with_epsilon("layernorm_epsilon"),
        doc="Constant added to the variance before the square root.",
    )
    rms_norm_epsilon: float = param(
        1e-8,
        origin="NeoX",
        gt=0,
        used_when=with_epsilon("rms_norm_epsilon"),
        source="arXiv:1910.07467",
        doc="Constant added to the mean square before the square root: scale * x * rsqrt(mean(x^2) + "
        "epsilon).",
    )
    scalenorm_epsilon: float = param(
        1e-8,
        origin="NeoX",
        gt=0,
        used_when=with_epsilon("scalenorm_epsilon"),
        source="arXiv:1910.05895",
        doc="Lower bound on the L2 norm that the input is divided by.",
    )
    activation: ActivationName = param(
        "gelu",
        origin="NeoX",
        doc=f"Activation function of the feed-forward block. {', '.join(_GATED)} are gated and use two input "
        "matrices; gmlp and amlp layers use only the function of the gate.",
    )
    glu_limit: float | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000,
        none_means="no limits",
        used_when="activation is swiglu",
        doc="Clamp what swiglu multiplies: the gate from above, up from both sides; gpt-oss has 7. The "
        "product is (up + glu-up-offset) * gate * sigmoid(glu-alpha * gate). gmlp and amlp layers do not "
        "use it.",
    )
    glu_alpha: float = param(
        1.0,
        origin="ours",
        gt=0,
        le=1_000,
        used_when="activation is swiglu",
        doc="Factor of the gate inside the sigmoid of swiglu (see glu-limit); gpt-oss has 1.702.",
    )
    glu_up_offset: float = param(
        0.0,
        origin="ours",
        ge=-1_000,
        le=1_000,
        used_when="activation is swiglu",
        doc="Added to up in swiglu (see glu-limit); gpt-oss has 1.",
    )
    openai_gelu: bool = param(
        False,
        origin="Meg",
        used_when="activation is gelu",
        doc="Use the tanh approximation of gelu instead of the exact (erf) form.",
    )
    mlp_width: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=100_000_000,
        none_means="follows from intermediate_size or expansion_factor; without them 4 * hidden_size, or "
        "int(8 * hidden_size / 3) for a gated activation, rounded up to mlp_multiple_of",
        doc="Inner width of the feed-forward block: the width of each of its input matrices.",
    )
    intermediate_size: int | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=1_000_000_000,
        none_means="not set",
        doc="GPT-NeoX's size of the feed-forward block, rounded up to mlp-multiple-of. With a gated "
        "activation, int(2/3 of it) is the width of both input matrices together: 32768 with mlp-multiple-of "
        "256 gives an mlp-width of 11008. mlp-width sets the width itself.",
    )
    expansion_factor: float | None = param(
        None,
        origin="NeoX",
        gt=0,
        le=1_000_000,
        none_means="not set",
        doc="Sets intermediate-size to int(expansion-factor * hidden-size).",
    )
    mlp_multiple_of: int = param(
        1,
        origin="NeoX",
        gt=0,
        le=100_000_000,
        used_when="mlp_width is null",
        doc="Round the inner width of the feed-forward block up to a multiple of this.",
    )
    use_bias_in_norms: bool = param(
        True,
        origin="NeoX",
        used_when=with_bias(),
        doc="Add a bias to norms that have one.",
    )
    use_bias_in_attn_linear: bool = param(
        True, origin="NeoX", doc="Add a bias to the two attention projections."
    )
    use_bias_in_qkv: bool | None = param(
        None,
        origin="ours",
        none_means="use_bias_in_attn_linear",
        doc="Add a bias to the query-key-value projection. Qwen2 has one there and none on the output of "
        "attention.",
    )
    use_bias_in_mlp: bool = param(True, origin="NeoX", doc="Add a bias to the feed-forward projections.")
    bias_gelu_fusion: Fusion = param(
        False,
        origin="Meg",
        used_when="activation is gelu",
        doc="Add the bias and apply gelu in one fused kernel; auto: where that is faster. true and auto both "
        "use the tanh approximation of gelu.",
    )
    glu_fusion: Fusion = param(
        False,
        origin="ours",
        resume="free",
        used_when="activation is swiglu or geglu",
        doc="Add the biases, activate the gate and multiply in one fused kernel; auto: where that is faster. "
        "gmlp and amlp layers do not use it.",
    )
    bias_dropout_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Apply bias, dropout and residual connection in one fused kernel; auto: where that is faster.",
    )
    layernorm_fusion: Fusion = param(
        False,
        origin="NeoX",
        resume="free",
        used_when="norm is layernorm",
        doc="Use the fused layer norm kernel of this project, and, without hidden dropout and with a "
        "sequential residual, the one that also adds the attention's output to the residual; auto: where "
        "that is faster.",
    )
    rmsnorm_fusion: Fusion = param(
        False,
        origin="ours",
        resume="free",
        used_when="norm is rmsnorm",
        doc="Use the fused RMS norm kernel of this project, and, without hidden dropout and with a "
        "sequential residual, the one that also adds the attention's output to the residual; auto: where "
        "that is faster.",
    )
    loss_fusion: Fusion = param(
        "auto",
        origin="ours",
        resume="free",
        doc="Compute the loss of a chunk of logits and its gradient in one fused kernel; auto: where that is "
        "faster. Not used in float16, where all logits are stored.",
    )
    compile: Fusion = param(
        "auto",
        origin="ours",
        resume="free",
        doc="Compile the layers with torch.compile before training. true: always, or fail with the reason. "
        "auto: on a GPU if a trial run gives correct results faster and training is long enough to make up "
        "for the compile time (a tenth of the layers' time is more than a minute); never on a CPU. The log "
        "reports the decision and the reason. Not available with ZeRO stage 3 or with samples of varying "
        "length.",
    )
    hidden_dropout: float = param(
        0.1,
        origin="Meg",
        resume="training",
        ge=0,
        lt=1,
        doc="Dropout probability on embeddings and sublayer outputs.",
    )
    attention_dropout: float = param(
        0.1,
        origin="Meg",
        resume="training",
        ge=0,
        lt=1,
        doc="Dropout probability on attention probabilities.",
    )
    apply_residual_connection_post_layernorm: bool = param(
        False,
        origin="Meg",
        doc="Take the residual connection of each sublayer from its normalized input instead of its input.",
    )
    gpt_j_residual: bool = param(
        False,
        origin="NeoX",
        doc="Compute attention and feed-forward block in parallel from the same input and add both to it "
        "(parallel residual).",
    )
    gpt_j_tied: bool = param(
        False,
        origin="NeoX",
        used_when="gpt_j_residual is true",
        doc="With a parallel residual, attention and feed-forward block read the output of one norm instead "
        "of having one each.",
    )
    no_weight_tying: bool = param(
        False,
        origin="Meg",
        doc="Use a separate output projection instead of sharing the weights of the token embedding.",
    )
    embedding_scale: float = param(
        1.0,
        origin="ours",
        gt=0,
        le=1_000_000,
        doc="Multiply the embeddings of tokens by this, rounded to the dtype of the weights, before "
        "positions are added. Gemma has sqrt(hidden-size).",
    )
    logit_scale: float = param(
        1.0,
        origin="ours",
        gt=0,
        le=1_000_000,
        used_when="objective is not ict",
        doc="Multiply the logits by this, in training and in generation.",
    )
    logit_softcap: float | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000,
        none_means="no limit",
        used_when="objective is not ict",
        doc="Limit the logits smoothly: logit-softcap * tanh(logits / logit-softcap), after logit-scale. "
        "Gemma 2 has 30.",
    )
    num_unique_layers: int | None = param(
        None,
        origin="Meg",
        gt=0,
        le=10_000,
        none_means="every layer has its own weights",
        doc="Number of distinct layers; the other layers share their weights.",
    )
    param_sharing_style: Literal["grouped", "spaced"] = param(
        "grouped",
        origin="Meg",
        used_when="num_unique_layers is set",
        doc="Order in which layers share weights. With two distinct layers in four: grouped is 1,2,1,2 and "
        "spaced is 1,1,2,2.",
    )
    make_vocab_size_divisible_by: int = param(
        128,
        origin="Meg",
        gt=0,
        le=1_000_000,
        doc="Pad the vocabulary to a multiple of this; the padded size is the same for every parallel "
        "layout.",
    )
    init_method: InitMethod = param(
        "normal",
        origin="NeoX",
        resume="free",
        doc="Initialization of the embeddings, the query-key-value projection and the feed-forward input "
        "projection. Standard deviations: normal: init-method-std; the scaled methods: divided by sqrt(2 * "
        "num-layers), single_residual_scaled_normal by sqrt(num-layers); small_init: sqrt(2 / (5 * "
        "hidden-size)); wang_init: 2 / (num-layers * sqrt(hidden-size)).",
    )
    output_layer_init_method: InitMethod = param(
        "scaled_normal",
        origin="NeoX",
        resume="free",
        doc="Initialization of the output projections of attention and feed-forward block.",
    )
    init_method_std: float = param(
        0.02,
        origin="Meg",
        resume="free",
        gt=0,
        used_when="an init method is normal, scaled_normal or single_residual_scaled_normal",
        doc="Standard deviation of the initial weights.",
    )
    use_cpu_initialization: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Initialize the weights in host memory; the values are the same either way.",
    )
    gmlp_attn_dim: int | None = param(
        64,
        origin="NeoX",
        gt=0,
        le=1_000_000,
        none_means="no attention in gMLP layers",
        used_when=has_layers(GMLP_TYPES),
        source="arXiv:2105.08050",
        doc="Size of the single attention head in an aMLP layer.",
    )
    onnx_safe: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Use only operators that PyTorch's ONNX exporter supports: attention is computed step by step "
        "instead of with PyTorch's fused operator, and no kernels of this project are used.",
    )
    objective: Literal["causal", "masked", "ict"] = param(
        "causal",
        origin="ours",
        source="arXiv:1810.04805 (masked), arXiv:1906.00300 (ict)",
        doc="causal: predict each next token from the tokens before it. masked: predict masked tokens from "
        "all tokens, as BERT does. ict: embed sentences and blocks of text, to find the block of a sentence "
        "(inverse cloze task). With masked and ict, attention is in both directions, and the model "
        "generates no text.",
    )
