"""Maximal update parametrization (muP): hyperparameters of a small model for a large one."""

from neox_config.schema.parameter import Section, block, param
from neox_config.schema.paths import PathText

__all__ = ["BaseShapes", "MupSection"]

_WHEN_ON = "use_mup is true"
_SOURCE = "arXiv:2203.03466, appendix F.4"


class BaseShapes(Section):
    """Sizes of the base model, whose hyperparameters are used; the parameters of the same names."""

    hidden_size: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="required by use_mup",
        used_when=_WHEN_ON,
        doc="Its hidden-size.",
    )
    num_attention_heads: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="required by use_mup",
        used_when=_WHEN_ON,
        doc="Its number of attention heads.",
    )
    head_dim: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="required by use_mup",
        used_when=_WHEN_ON,
        doc="Width of its attention heads.",
    )
    mlp_width: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="required by use_mup",
        used_when=_WHEN_ON,
        doc="Inner width of its MLP.",
    )
    num_layers: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="num_layers: nothing changes with depth",
        used_when=_WHEN_ON,
        source="arXiv:2505.01618",
        doc="Its number of layers. A model with L times as many adds 1/L of what its sublayers return "
        "(CompleteP).",
    )


class MupSection(Section, resume="training"):
    """Maximal update parametrization (muP): a large model is trained with the hyperparameters of a small one.

    Learning rate, weight decay, epsilon, initialization and the multipliers below are those of the base
    model, and each weight has its own multiples of them, by how many times wider and deeper the model is.
    """

    use_mup: bool = param(
        False,
        origin="NeoX",
        source="arXiv:2203.03466; arXiv:2505.01618 (depth, epsilon)",
        doc="Use muP. Requires mup_base, or base_shapes_file.",
    )
    mup_base: BaseShapes = block(BaseShapes, origin="ours", doc="Sizes of the base model.")
    base_shapes_file: PathText | None = param(
        None,
        origin="NeoX",
        resume="free",
        used_when=_WHEN_ON,
        none_means="mup_base alone has the sizes",
        doc="YAML file with the values of mup_base that the configuration does not give.",
    )
    save_base_shapes: bool = param(
        False,
        origin="NeoX",
        resume="free",
        used_when=_WHEN_ON,
        doc="Instead of training, write the sizes of this model to base_shapes_file.",
    )
    mup_init_scale: float = param(
        1.0,
        origin="NeoX",
        resume="free",
        gt=0,
        used_when=_WHEN_ON,
        source=_SOURCE,
        doc="Multiplies the initial values of all weights that are drawn at random.",
    )
    mup_attn_temp: float = param(
        1.0,
        origin="NeoX",
        gt=0,
        used_when=_WHEN_ON,
        source=_SOURCE,
        doc="Temperature of attention: divides the input of its softmax.",
    )
    mup_output_temp: float = param(
        1.0, origin="NeoX", gt=0, used_when=_WHEN_ON, source=_SOURCE, doc="Divides the logits."
    )
    mup_embedding_mult: float = param(
        1.0,
        origin="NeoX",
        gt=0,
        used_when=_WHEN_ON,
        source=_SOURCE,
        doc="Multiplies the output of the embedding, with positions that are added to it.",
    )
    mup_rp_embedding_mult: float = param(
        1.0,
        origin="NeoX",
        gt=0,
        used_when=_WHEN_ON,
        source=_SOURCE,
        doc="Multiplies learned positions, by their initial values and learning rate.",
    )
