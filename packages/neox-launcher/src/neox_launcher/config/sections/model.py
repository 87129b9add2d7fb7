"""The transformer: its sizes, norms, activation, dropout and initialization."""

from typing import Literal

from neox_launcher.config.parameter import FILLED_IN, Section, param

__all__ = ["GATED_ACTIVATIONS", "Fusion", "InitMethod", "ModelSection"]

# True: the fused operator or an error; auto: where it can be used and is faster.
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
]

GATED_ACTIVATIONS = ("geglu", "swiglu", "reglu")


class ModelSection(Section, resume="model"):
    """What is built, whatever the devices."""

    num_layers: int = param(origin="Meg", gt=0, doc="Transformer layers.")
    hidden_size: int = param(origin="Meg", gt=0, doc="Width of the stream of activations between layers.")
    num_attention_heads: int = param(
        origin="Meg", gt=0, doc="Attention heads of a layer; each is hidden-size / num-attention-heads wide."
    )
    num_kv_heads: int | None = param(
        None,
        origin="NeoX",
        gt=0,
        none_means="num_attention_heads",
        source="arXiv:2305.13245",
        doc="Heads of keys and values; each serves num-attention-heads / num-kv-heads heads of queries.",
    )
    max_position_embeddings: int = param(
        origin="Meg",
        gt=0,
        doc="Positions that the model can tell apart; rows of the table of learned positions.",
    )
    seq_length: int = param(
        FILLED_IN,
        none_means="max_position_embeddings",
        origin="Meg",
        resume="training",
        gt=0,
        doc="Tokens of one training sample.",
    )
    norm: Literal["layernorm", "rmsnorm", "scalenorm", "apexlayernorm"] = param(
        "layernorm",
        origin="NeoX",
        doc="Normalization before each part of a layer and at the end of the model.",
    )
    layernorm_epsilon: float = param(
        1e-5,
        origin="Meg",
        gt=0,
        used_when="norm is layernorm or apexlayernorm",
        doc="Added to the variance before its root is taken.",
    )
    rms_norm_epsilon: float = param(
        1e-8,
        origin="NeoX",
        gt=0,
        used_when="norm is rmsnorm",
        source="arXiv:1910.07467",
        doc="Added to the mean square before its root is taken: scale * x * rsqrt(mean(x^2) + epsilon).",
    )
    scalenorm_epsilon: float = param(
        1e-8,
        origin="NeoX",
        gt=0,
        used_when="norm is scalenorm",
        source="arXiv:1910.05895",
        doc="Smallest length that the norm divides by.",
    )
    activation: Literal["gelu", "geglu", "relu", "softsign", "swish", "mish", "silu", "swiglu", "reglu"] = (
        param(
            "gelu",
            origin="NeoX",
            doc="Activation of the feed-forward part; the three that end in glu are gated and have "
            "two input matrices; gmlp and amlp layers apply the gate's function.",
        )
    )
    openai_gelu: bool = param(
        False,
        origin="Meg",
        used_when="activation is gelu",
        doc="Use the tanh form of gelu instead of the erf form.",
    )
    intermediate_size: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="4 * hidden_size, or int(8 * hidden_size / 3) for a gated activation",
        doc="Inner width of the feed-forward part.",
    )
    use_bias_in_attn_linear: bool = param(
        True, origin="NeoX", doc="The two projections of attention have biases."
    )
    use_bias_in_mlp: bool = param(
        True, origin="NeoX", doc="The projections of the feed-forward part have biases."
    )
    bias_gelu_fusion: Fusion = param(
        False,
        origin="Meg",
        used_when="activation is gelu",
        doc="Add the bias and apply gelu in one kernel; with auto where that is faster. Both use gelu's tanh "
        "form.",
    )
    bias_dropout_fusion: Fusion = param(
        False,
        origin="Meg",
        resume="free",
        doc="Add the bias, drop out and add the residual in one kernel; with auto where that is faster.",
    )
    layernorm_fusion: Fusion = param(
        False,
        origin="NeoX",
        resume="free",
        used_when="norm is layernorm",
        doc="Use this project's layer norm kernel; with auto where that is faster.",
    )
    compile: Fusion = param(
        "auto",
        origin="ours",
        resume="free",
        doc="Compile the layers with torch.compile before training: true does, or says why it cannot. "
        "auto does on a GPU where a trial shows it to be right and faster, in trainings long enough to repay "
        "it (a tenth of the layers' time is more than a minute); on a CPU it does not. The log says which, "
        "and why. Not with ZeRO stage 3 or samples of changing lengths.",
    )
    hidden_dropout: float = param(
        0.1,
        origin="Meg",
        resume="training",
        ge=0,
        lt=1,
        doc="Share that is dropped of the embeddings and of what each part adds to the stream.",
    )
    attention_dropout: float = param(
        0.1,
        origin="Meg",
        resume="training",
        ge=0,
        lt=1,
        doc="Share of the attention probabilities that is dropped.",
    )
    apply_residual_connection_post_layernorm: bool = param(
        False, origin="Meg", doc="Add to the normalized input of each part instead of to its input."
    )
    gpt_j_residual: bool = param(
        False,
        origin="NeoX",
        doc="Attention and feed-forward part read the same input, and both are added to it.",
    )
    no_weight_tying: bool = param(
        False,
        origin="Meg",
        doc="Use a separate output projection matrix instead of the token embedding.",
    )
    num_unique_layers: int | None = param(
        None,
        origin="Meg",
        gt=0,
        none_means="every layer has its own weights",
        doc="Sets of layer weights; the layers take turns in using them.",
    )
    param_sharing_style: Literal["grouped", "spaced"] = param(
        "grouped",
        origin="Meg",
        used_when="num_unique_layers is set",
        doc="Order of sharing two sets over four layers: grouped is 1,2,1,2 and spaced is 1,1,2,2.",
    )
    make_vocab_size_divisible_by: int = param(
        128,
        origin="Meg",
        gt=0,
        doc="The vocabulary is padded to a multiple of this, the same for every parallel layout.",
    )
    init_method: InitMethod = param(
        "normal",
        origin="NeoX",
        resume="free",
        doc="Initialization of embeddings, query-key-value and the feed-forward input. Standard "
        "deviations: normal "
        "init-method-std; scaled ones are divided by sqrt(2 * num-layers); small_init sqrt(2 / (5 * "
        "hidden-size)); "
        "wang_init 2 / (num-layers * sqrt(hidden-size)).",
    )
    output_layer_init_method: InitMethod = param(
        "scaled_normal",
        origin="NeoX",
        resume="free",
        doc="Initialization of the two projections that write into the stream: attention and "
        "feed-forward output.",
    )
    init_method_std: float = param(
        0.02,
        origin="Meg",
        resume="free",
        gt=0,
        used_when="an init method is normal or scaled_normal",
        doc="Standard deviation.",
    )
    use_cpu_initialization: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Make the initial weights in host memory; the values are the same either way.",
    )
    gmlp_attn_dim: int | None = param(
        64,
        origin="NeoX",
        gt=0,
        none_means="no attention inside gMLP layers",
        used_when="attention_config has gmlp or amlp layers",
        source="arXiv:2105.08050",
        doc="Width of the single attention head inside an aMLP layer.",
    )
    onnx_safe: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Keep to operators that torch's ONNX exporter translates: attention is written out instead of "
        "calling PyTorch's fused one, and no kernel of this project is used.",
    )
